"""Traces as torch.profiler (Kineto) writes them, a file a rank, for tools that read those.

Kernels of the device are the ops of the compute stream, and collectives and messages by NCCL's
names, with the arguments that recent versions of torch give them; copies are copies. The host is
not simulated: each kernel has a launch a nanosecond before its rank was there, which tools need to
tell what belongs together. What loaders and hosts do are operators of the host. Times are
microseconds to the nanosecond.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from simulator.errors import DescriptionError
from simulator.files import check_folder, write_folder
from simulator.program import ACTIONS, NONE, Int64, Program
from simulator.report.breakdown import binding, stream_category
from simulator.report.trace_json import nanoseconds
from simulator.timeline import Timeline

if TYPE_CHECKING:
    from simulator.report.result import Result

COMPUTE, FIRST = 7, 20
"""Stream of kernels that compute, as profilers call torch's default, and the first of others."""

HOST = 1
"""Thread of launches and ranges; what loaders do has threads after it."""

COPIES = {"copy": "HtoD", "fetch": "HtoD", "offload": "DtoH", "snapshot": "DtoH"}
"""Direction of copies between host and device, by the first word of their stream."""

ON_HOST = ("host", "storage", "worker", "pin", "write")
"""First words of streams that no device has a part in."""

COLLECTIVES = {
    "all_reduce": ("AllReduce", "allreduce"), "all_gather": ("AllGather", "_allgather_base"),
    "reduce_scatter": ("ReduceScatter", "_reduce_scatter_base"),
    "all_to_all": ("SendRecv", "all_to_all"), "broadcast": ("Broadcast", "broadcast"),
    "reduce": ("Reduce", "reduce"),
}  # fmt: skip
"""NCCL's kernel and torch's name of each collective."""

BYTES = 2
"""Of a number of what moves: sizes are given as counts of bfloat16."""


def write_kineto(result: Result, folder: Path, ranks: Sequence[int]) -> None:
    """Write a trace of each of some ranks into a new or empty folder, whole or not at all.

    Raises:
        DescriptionError: when the folder cannot be written, or a rank does not exist.
    """
    check_folder(folder)
    for rank in ranks:
        if not 0 <= rank < result.tiled.num_ranks:
            raise DescriptionError(f"rank {rank} lies outside 0..{result.tiled.num_ranks - 1}")

    def write(target: Path) -> None:
        for rank in ranks:
            text = json.dumps(kineto_document(result, rank)) + "\n"
            (target / f"rank{rank}.json").write_text(text, encoding="utf-8")

    write_folder(folder, write)


def kineto_document(result: Result, rank: int) -> dict[str, Any]:
    """Return the trace of one rank as plain values."""
    program, timeline = result.excerpt([rank])
    ops = np.flatnonzero(program.rank == rank)
    ops = ops[np.lexsort((ops, timeline.end[ops], timeline.start[ops]))]
    groups, steps = _groups(program, ops), _steps(program, timeline, ops)
    once = list({group["pg_name"]: group for group in groups.values()}.values())
    return {
        "schemaVersion": 1,
        "distributedInfo": {
            "backend": "nccl",
            "rank": rank,
            "world_size": result.tiled.num_ranks,
            "pg_count": len(once),
            "pg_config": once,
        },
        "deviceProperties": [{"id": 0, "name": _device(result)}],
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 0,
        "traceEvents": [
            *(
                _span("user_annotation", f"ProfilerStep#{k}", HOST, *span, {})
                for k, span in steps.items()
            ),
            *_ranges(program, timeline, ops, steps),
            *_events(program, timeline, ops, steps, groups, rank),
        ],
    }


def _device(result: Result) -> str:
    return "simulated" if result.scenario is None else result.scenario.cluster.node.device.name


def _groups(program: Program, ops: Int64) -> dict[int, dict[str, Any]]:
    """Return the process groups of a rank by their number in the program, each once."""
    known: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    found: dict[int, dict[str, Any]] = {}
    joint = program.joint[ops]
    for op, of in zip(ops[joint != NONE].tolist(), joint[joint != NONE].tolist(), strict=True):
        group = int(program.joint_group[of])
        if group not in found:
            ranks = sorted(program.groups[group].tolist())  # messages name their sender first
            axis = _axis(program, op)
            found[group] = known.setdefault((axis, tuple(ranks)), {
                "pg_name": str(group), "pg_desc": axis, "pg_size": len(ranks), "ranks": ranks,
            })  # fmt: skip
    return found


def _axis(program: Program, op: int) -> str:
    stream = int(program.stream[op])
    axis = "pp" if stream == NONE else stream_category(program.streams[stream])
    return "embedding" if axis == "tied" else axis


def _span(
    cat: str, name: str, thread: int, start: float, end: float, args: dict[str, Any]
) -> dict[str, Any]:
    pid = 0 if cat in ("kernel", "gpu_memcpy") else 1
    times = {"ts": start / 1000, "dur": (end - start) / 1000}
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": thread, **times, "args": args}


def _steps(program: Program, timeline: Timeline, ops: Int64) -> dict[int, tuple[int, int]]:
    """Return when each step begins and ends: with the end of its last op, where the next begins."""
    out, begin = {}, 0
    for step in np.unique(program.step[ops]).tolist():
        mine = ops[program.step[ops] == step]
        end = max(int(nanoseconds(timeline.end[mine]).max()), begin)
        out[step] = begin, end
        begin = end
    return out


def _launched(there: int, step: tuple[int, int]) -> int:
    """Return when the host launches what a rank is ready for: within its own step."""
    return max(there - 1, step[0])


def _ranges(
    program: Program, timeline: Timeline, ops: Int64, steps: dict[int, tuple[int, int]]
) -> Iterator[dict[str, Any]]:
    """Yield a range for each action, from its first launch on, as torch's pipelines name them."""
    compute = ops[program.stream[ops] == program.streams.index("compute")]
    labels = [getattr(program, name)[compute] for name in ("step", "stage", "action", "microbatch")]
    new = np.any([label[1:] != label[:-1] for label in labels], axis=0)
    for some in np.split(compute, np.flatnonzero(new) + 1) if len(compute) else ():
        first, last = int(some[0]), int(some[-1])
        action, microbatch = ACTIONS[program.action[first]], int(program.microbatch[first])
        name = f"PP:{max(int(program.stage[first]), 0)}{action}"
        name += "" if microbatch == NONE else str(microbatch)
        begin, end = nanoseconds(np.array([timeline.start[first], timeline.end[last]])).tolist()
        begin = _launched(begin, steps[int(program.step[first])])
        yield _span("user_annotation", name, HOST, begin, end, {})


def _events(
    program: Program,
    timeline: Timeline,
    ops: Int64,
    steps: dict[int, tuple[int, int]],
    groups: dict[int, dict[str, Any]],
    rank: int,
) -> Iterator[dict[str, Any]]:
    """Yield each op as a kernel with its launch, or as an operator of the host."""
    last = binding(program, timeline, ops, streams=True)
    arrival = np.where(last == NONE, 0, timeline.end[last])
    arrival = np.where(program.is_flow[ops], arrival, timeline.start[ops])
    columns = (ops.tolist(), nanoseconds(timeline.start[ops]).tolist(),
               nanoseconds(timeline.end[ops]).tolist(), nanoseconds(arrival).tolist())  # fmt: skip
    for number, (op, start, end, there) in enumerate(zip(*columns, strict=True), 1):
        stream = int(program.stream[op])
        word = program.streams[stream].split(" ")[0] if stream != NONE else ""
        name = program.costs[program.cost[op]].name
        if word in ON_HOST:
            yield _span("cpu_op", name, HOST + 1 + stream, start, end, {})
            continue
        launch = _launched(there, steps[int(program.step[op])])
        link = {"External id": number, "correlation": number}
        yield _span("cpu_op", name, HOST, launch, launch + 1, {"External id": number})
        yield _span("cuda_runtime", "cudaLaunchKernel", HOST, launch, launch + 1, link)
        thread = COMPUTE if word == "compute" else FIRST + stream
        args = {"device": 0, "context": 1, "stream": thread, **link}
        if word in COPIES:
            yield _span("gpu_memcpy", f"Memcpy {COPIES[word]} ({name})", thread, start, end, args)
        elif program.is_flow[op]:
            kernel, more = _call(program, op, groups, rank)
            yield _span("kernel", kernel, thread, start, end, {**args, **more})
        else:
            yield _span("kernel", name, thread, start, end, args)


def _call(
    program: Program, op: int, groups: dict[int, dict[str, Any]], rank: int
) -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments of NCCL's kernel for a flow."""
    cost, action = program.costs[program.cost[op]], ACTIONS[program.action[op]]
    kernel, torchs = COLLECTIVES.get(cost.name, (cost.name, cost.name))
    more: dict[str, Any] = {}
    joint = int(program.joint[op])
    group = None if joint == NONE else groups[int(program.joint_group[joint])]
    ranks = group["ranks"] if group else [rank]
    if cost.name == "send_recv":
        kernel, torchs = "SendRecv", action.partition("_")[0].lower()
        peer = next((r for r in ranks if r != rank), rank)
        more = {"Dst Rank": peer} if torchs == "send" else {"Src Rank": peer}
    count = round(getattr(cost, "bytes", 0.0) / BYTES)
    return f"ncclDevKernel_{kernel}", {
        "Collective name": torchs, "dtype": "BFloat16", "In msg nelems": count,
        "Out msg nelems": count, "Group size": len(ranks), **more,
        "Process Group Name": group["pg_name"] if group else "",
        "Process Group Description": group["pg_desc"] if group else "",
        "Process Group Ranks": str(ranks),
    }  # fmt: skip
