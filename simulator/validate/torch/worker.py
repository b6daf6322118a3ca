"""The work of one rank, in a process that `launch` starts through `rank`, or torchrun."""

from __future__ import annotations

import datetime
import io
import json
import mmap
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from simulator.validate.torch import measure
from simulator.validate.torch.allocation import held_bytes, peak_bytes
from simulator.validate.torch.device import DEVICES, Turns
from simulator.validate.torch.executor import Executor, Groups
from simulator.validate.torch.files import POSITION, grads_file, position_file, results_file
from simulator.validate.torch.job import A_VISIT, REPETITIONS, Job
from simulator.validate.torch.kernels import timed
from simulator.validate.torch.model import OPTIMIZERS, tokens, whole
from simulator.validate.torch.peers import part

GIVE_UP = datetime.timedelta(hours=1)
"""Until torch itself ends a wait; whoever started the ranks is quicker."""


def main(folder: Path) -> None:
    """Do this process's part of the job in a folder."""
    torch.set_num_threads(1)
    job = Job.read(folder / "job.json")
    code = 0
    try:
        if job.mode == "reference":
            compare_with_one_process(job, folder)
        else:
            rank = int(os.environ["RANK"])
            join(job, rank, f"file://{(folder / 'store').resolve()}")
            work(job, rank, folder)
    except OSError as error:
        print(f"cannot keep its files: {error.strerror or error}", file=sys.stderr)  # noqa: T201
        code = 1
    sys.stderr.flush()
    os._exit(code)  # a backend's threads have been seen to abort a process that ends by itself


def join(job: Job, rank: int, method: str) -> None:
    """Join the process group of all ranks."""
    device = DEVICES[job.device]
    if lacking := device.lacking(int(os.environ.get("LOCAL_WORLD_SIZE", job.world_size))):
        raise SystemExit(lacking)
    if device.name == "cuda":
        torch.cuda.set_device(device.here())
    dist.init_process_group(
        device.backend, init_method=method, rank=rank, world_size=job.world_size, timeout=GIVE_UP
    )


def joined(job: Job, rank: int, folder: Path) -> list[str]:
    """Do a rank's part of a job that torchrun has started; return what all ranks measured.

    Rank 0's folder then holds the gradients of all.
    """
    torch.set_num_threads(1)
    join(job, rank, "env://")
    work(job, rank, folder)
    mine = results_file(folder, rank).read_text(encoding="utf-8"), grads_file(folder, rank)
    every: list[Any] = [None] * job.world_size
    dist.all_gather_object(every, (mine[0], mine[1].read_bytes()))
    for other, (_, grads) in enumerate(every):
        grads_file(folder, other).write_bytes(grads)
    dist.destroy_process_group()
    return [text for text, _ in every]


def work(job: Job, rank: int, folder: Path) -> None:
    """Calibrate or replay, and write what was measured, a line a step."""
    device = DEVICES[job.device]
    turns = Turns(device, folder / "turns")
    ex = Executor(job, rank, device, Groups.of(job, device), turns)
    at = _positions(position_file(folder, rank))
    at(0, -1)
    with results_file(folder, rank).open("w", encoding="utf-8") as file:

        def write(document: dict[str, Any]) -> None:
            file.write(json.dumps(document) + "\n")
            file.flush()

        if job.mode == "calibrate":
            sizes = sorted({*measure.SIZES, job.boundary_bytes})
            begun = REPETITIONS
            write({
                "machine": machine(job),
                "actions": measure.actions(ex, REPETITIONS, lambda n: at(n, -1)),
                "messages": measure.messages(ex, sizes),
                "sums": measure.sums(ex, list(measure.SIZES)),
                "peer_sums": measure.peer_sums(ex, list(measure.SIZES)),
                "gap": measure.gap(ex),
                "copies": measure.copies(ex, list(measure.SIZES)),
                "kernels": timed(list(job.kernels), device, turns, lambda n: at(begun + n, -1)),
            })  # fmt: skip
        else:
            replay(ex, folder, at, write)
        dist.barrier()
    turns.close()


def replay(
    ex: Executor, folder: Path, at: Callable[[int, int], None],
    write: Callable[[dict[str, Any]], None],
) -> None:  # fmt: skip
    """Run the steps of a job."""
    job, kept = ex.job, {}
    write({
        "machine": machine(job),
        "messages": measure.messages(ex, [job.boundary_bytes]),
        "sums": measure.sums(ex, []),
        "peer_sums": measure.peer_sums(ex, []),
        "buckets": {stage: [flat.numel() * flat.element_size() for flat in flats]
                    for stage, flats in ex.sums.items()},
    })  # fmt: skip

    def keep(stage: int) -> None:
        for name, param in ex.stages[stage].named_parameters():
            assert param.grad is not None  # a part of a bucket
            kept[name] = param.grad.detach().cpu().clone()

    ex.before_update = keep

    def step(recorded: bool, counted: bool = False) -> None:
        number = ex.number
        dist.barrier()
        if counted:
            held = ex.held()

            def all_of_it(forget: Callable[[Any], None]) -> None:
                ex.handed = forget
                ex.step(lambda position: at(number, position))
                ex.handed = lambda gradient: None

            peak = peak_bytes(all_of_it, held, ex.here)
            write({"memory": {"held": held_bytes(held), "peak": peak}})
            return
        spans = ex.step(lambda position: at(number, position))
        losses = {str(m): loss for m, loss in sorted(ex.losses.items())}
        write({"step": number, "recorded": recorded, "losses": losses, "spans": spans})
        at(number + 1, -1)

    for number in range(job.warmup):
        step(recorded=False)
        if number == 0:
            ex.before_update = None
            saved = io.BytesIO()  # torch calls a full disk an internal error
            torch.save(kept, saved)
            grads_file(folder, ex.rank).write_bytes(saved.getvalue())
    step(recorded=False, counted=True)
    for _ in range(job.visits):
        if job.calibrates:
            wait_for_quiet(job.patience if ex.rank == 0 else 0)
            write({"actions": measure.actions(ex, A_VISIT)})
        for _ in range(job.steps):
            wait_for_quiet(job.patience if ex.rank == 0 else 0)
            step(recorded=True)


BUSY, LOOK = 0.06, 0.2
"""Share of its cores that a quiet host uses at most, and seconds over which that is seen."""


def wait_for_quiet(patience: float) -> None:
    """Wait until the host does nothing else, so long at most; the other ranks sleep meanwhile."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        used, whole = _host_time()
        time.sleep(LOOK)
        used_now, whole_now = _host_time()
        if used_now - used <= BUSY * (whole_now - whole):
            return


def _host_time() -> tuple[int, int]:
    """Return what all cores have spent on work, and altogether, in ticks since the start."""
    with Path("/proc/stat").open(encoding="utf-8") as file:
        spent = list(map(int, file.readline().split()[1:9]))
    return sum(spent) - spent[3] - spent[4], sum(spent)  # but idle and waiting for disks


def machine(job: Job) -> dict[str, Any]:
    """Return what this process runs on."""
    device = DEVICES[job.device]
    on_gpu = device.name == "cuda"
    name = torch.cuda.get_device_name(device.here()) if on_gpu else _processor()
    return {
        "host": os.uname().nodename,
        "system": f"{os.uname().sysname} {os.uname().release}",
        "device": name,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "threads_per_rank": torch.get_num_threads(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "backend": device.backend,
        "cuda": torch.version.cuda if on_gpu else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if device.backend == "nccl" else None,
        "gpus": torch.cuda.device_count() if on_gpu else None,
        "clock": "CLOCK_MONOTONIC",
        "busy": device.clock,
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return os.uname().machine


def _positions(path: Path) -> Callable[[int, int], None]:
    """Return a function that leaves a step and a position where the parent can read them."""
    path.write_bytes(bytes(POSITION.size))
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), POSITION.size)

    return partial(POSITION.pack_into, memory, 0)


def compare_with_one_process(job: Job, folder: Path) -> None:
    """Train the same model in this process alone, and compare gradients with those of the ranks."""
    here = torch.device(DEVICES[job.device].name)
    model = whole(job).to(here)
    optimizer = OPTIMIZERS[job.optimizer](list(model.parameters()))
    losses: list[list[list[float]]] = []
    worst = {"relative": 0.0, "parameter": "", "compared": 0}
    share = job.dp * job.num_microbatches
    for step in range(job.checked):
        losses.append([[] for _ in range(job.dp)])
        for replica in range(job.dp):
            for m in range(job.num_microbatches):
                data = tokens(job, step, replica, m).to(here)
                loss = model(data[:, :-1], data[:, 1:])
                losses[-1][replica].append(float(loss.detach()))
                (loss / share).backward()
        if step == 0:
            mine = {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}
            for rank in range(job.world_size):
                index = job.place(rank)[2]
                for name, grad in torch.load(grads_file(folder, rank)).items():
                    scale = float(mine[name].abs().max())
                    own = part(job, name, mine[name], index)
                    error = float((grad - own).abs().max()) / (scale or 1.0)
                    worst["compared"] += 1  # type: ignore[operator]
                    if error >= float(worst["relative"]):  # type: ignore[arg-type]
                        worst |= {"relative": error, "parameter": name}
        optimizer.step()
        optimizer.zero_grad()
    document = {"losses": losses, "gradients": worst, "parameters": len(list(model.parameters()))}
    (folder / "reference.json").write_text(json.dumps(document), encoding="utf-8")
