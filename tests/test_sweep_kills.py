"""A sweep that is killed goes on where it was: nothing lost, nothing run twice."""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

BATCHES = [str(16 * k) for k in range(1, 51)]
SWEEP = ("gpt2-xl-ddp", "--set", "plan.microbatch_size=1,2", "--set",
         f"run.global_batch_size={','.join(BATCHES)}")  # fmt: skip
POINTS = 2 * len(BATCHES)


def trainsim(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "simulator", "sweep", *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def in_this_process(out):
    """Run the sweep without starting another process, a batch of rows every 20 ms."""
    from simulator.explore.sweep import workers
    from simulator.explore.sweep.run import grid_of, run_sweep

    workers.CHUNK_S = 0.02
    values = {"plan.microbatch_size": [1, 2], "run.global_batch_size": list(map(int, BATCHES))}
    run_sweep("gpt2-xl-ddp", grid_of(values, {}, None), out=Path(out), workers=1)


def journal(out):
    path = Path(f"{out}.journal")
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[1:-1]]  # the last one may be torn


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The bytes that the sweep leaves when nobody disturbs it."""
    out = tmp_path_factory.mktemp("undisturbed") / "rows.csv"
    in_this_process(out)
    return out.read_bytes()


def test_a_sweep_killed_twenty_times_at_random_moments_is_complete(tmp_path, undisturbed):
    out, rng, seen = tmp_path / "rows.csv", random.Random(8), 0
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["simulator.explore.sweep.run", "simulator.api", "pandas"])
    for _ in range(20):
        child = context.Process(target=in_this_process, args=(out,))
        child.start()
        child.join(rng.uniform(0.0, 0.5))
        child.kill()
        child.join()
        assert not out.exists() or out.read_bytes() == undisturbed
        assert len(journal(out)) >= seen, "rows were lost"
        seen = len(journal(out))
    child = context.Process(target=in_this_process, args=(out,))
    child.start()
    child.join(120)
    assert child.exitcode == 0
    assert out.read_bytes() == undisturbed
    keys = [record["key"] for record in journal(out)]
    assert len(keys) == len(set(keys)) == POINTS, "rows were run twice"


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_when_the_sweep_is_killed_its_workers_end_and_the_next_one_goes_on(tmp_path, undisturbed):
    out = tmp_path / "rows.csv"
    process = trainsim(*SWEEP, "--out", out, "--workers", 2)
    wait_for(lambda: len(journal(out)) > 0)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()

    def nobody_left():
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return True
        return False

    wait_for(nobody_left)
    process.stdout.close()
    process.stderr.close()
    in_this_process(out)
    assert out.read_bytes() == undisturbed


def test_ctrl_c_leaves_a_state_that_goes_on_and_exits_with_130(tmp_path, undisturbed):
    out = tmp_path / "rows.csv"
    process = trainsim(*SWEEP, "--out", out, "--workers", 2)
    wait_for(lambda: len(journal(out)) > 0)
    os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to workers too
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines() == [
        f"the same command goes on from {out}.journal", "trainsim: interrupted",
    ]  # fmt: skip
    assert not out.exists()
    there = len(journal(out))
    assert 0 < there < POINTS
    in_this_process(out)
    assert out.read_bytes() == undisturbed


def test_a_worker_that_dies_costs_no_row(tmp_path, undisturbed):
    out = tmp_path / "rows.csv"
    process = trainsim(*SWEEP, "--out", out, "--workers", 2)
    wait_for(lambda: len(journal(out)) > 0)
    worker = next(pid for pid in children(process.pid) if is_worker(pid))
    os.kill(worker, signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out.read_bytes() == undisturbed


def children(pid):
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def is_worker(pid):
    return b"loky" in Path(f"/proc/{pid}/cmdline").read_bytes() and (
        b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    )


def test_a_worker_killed_on_a_dask_cluster_costs_no_row(tmp_path, undisturbed):
    pytest.importorskip("distributed", reason="needs Dask: pip install 'trainsim[dask]'")
    out, address = tmp_path / "rows.csv", tmp_path / "scheduler.json"
    dask = [sys.executable, "-m", "distributed.cli.dask_scheduler"]
    worker = [sys.executable, "-m", "distributed.cli.dask_worker", "--scheduler-file", address,
              "--nthreads", "1", "--no-nanny", "--no-dashboard"]  # fmt: skip
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": tmp_path}
    started = [
        subprocess.Popen(
            [*dask, "--host", "127.0.0.1", "--port", "0", "--no-dashboard",
             "--scheduler-file", address], **quiet
        )
    ]  # fmt: skip
    try:
        started += [subprocess.Popen(worker, **quiet) for _ in range(2)]
        wait_for(lambda: address.exists() and address.read_text())
        tcp = json.loads(address.read_text())["address"]
        process = trainsim(*SWEEP, "--out", out, "--scheduler", tcp)
        wait_for(lambda: len(journal(out)) > 0)
        started[1].kill()
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert out.read_bytes() == undisturbed
    finally:
        for each in started:
            each.kill()
            each.wait()
