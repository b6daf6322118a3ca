"""A trace in the Chrome JSON format, which Perfetto and chrome://tracing open.

A process is a rank and a thread one of its streams. Times are microseconds as exact decimals of
whole picoseconds. Thread ids are unique over all ranks and never equal a process id: viewers put
the thread that carries its process's id before the others.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.errors import DescriptionError
from simulator.files import check_writable, write_whole
from simulator.hardware.placement import devices
from simulator.lower.mesh import Mesh
from simulator.program import ACTION_CODE, ACTIONS, NONE, Flow, Int32, Int64, Program
from simulator.report.breakdown import binding, moves, stream_category, work_category
from simulator.timeline import Timeline
from simulator.units import TICKS_PER_SECOND, parse_quantity

if TYPE_CHECKING:
    from simulator.report.result import Result

Column = npt.NDArray[np.integer[Any]]

_TICKS_PER_MICROSECOND = TICKS_PER_SECOND // 10**6
_GIGABYTE = parse_quantity("1 GB", "bytes")

MANY_RANKS = 64
"""Ranks above which a trace shows one of each stage unless told otherwise."""

SUFFIXES = (".json", ".json.gz")
"""How the name of a trace ends."""

_ORDER = (
    "compute", "tp", "unshard", "reduce", "dp", "tied", "shards", "pipeline", "offload", "host",
    "fetch", "send", "recv", "copy", "pin", "worker", "storage",
    "snapshot", "write",
)  # fmt: skip
"""Tracks of a rank from top to bottom, by the first word of their stream."""

_MESSAGES = {
    "SEND_F": "send F", "RECV_F": "recv F", "SEND_B": "send B", "RECV_B": "recv B",
}  # fmt: skip


def write_trace(result: Result, path: Path, ranks: Sequence[int] | None = None) -> None:
    """Write the trace of a result; gzip it when the path ends in ``.gz``.

    Args:
        result: a program that has run.
        path: a new or old file whose name ends in ``.json`` or ``.json.gz``.
        ranks: the ranks to show; all of them when absent.

    Raises:
        DescriptionError: when the file cannot be written there, or a rank does not exist.
    """
    check_writable(path, SUFFIXES)
    shown = np.zeros(result.tiled.num_ranks, np.bool_)
    for rank in range(len(shown)) if ranks is None else ranks:
        if type(rank) is not int or not 0 <= rank < len(shown):
            raise DescriptionError(f"rank {rank!r} lies outside 0..{len(shown) - 1}")
        shown[rank] = True
    write_whole(path, partial(_write, result, shown))


def _write(result: Result, shown: npt.NDArray[np.bool_], path: Path) -> None:
    with path.open("wb") as file:
        data = trace_text(result, shown).encode()
        if path.suffix == ".gz":
            # No name and no time inside: the same trace is the same bytes.
            with gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=file, mtime=0) as z:
                z.write(data)
        else:
            file.write(data)


def trace_text(result: Result, shown: npt.NDArray[np.bool_]) -> str:
    """Return the trace of the ranks that are shown, one event a line."""
    program, timeline = result.excerpt(np.flatnonzero(shown))
    tracks = _tracks(program, timeline)
    ops = np.flatnonzero(shown[program.rank])
    order = np.lexsort((ops, timeline.start[ops], tracks.number[ops], program.rank[ops]))
    events = [
        *_metadata(result, program.rank[ops], tracks.number[ops], tracks),
        *_slices(program, timeline, tracks, ops[order]),
        *_arrows(program, timeline, tracks, shown),
        *_memory(result, shown),
        *_in_flight(program, timeline, ops),
    ]
    return '{"displayTimeUnit":"ms","traceEvents":[\n' + ",\n".join(events) + "\n]}\n"


class _Tracks(NamedTuple):
    """Where the slices of every op lie, so that those on one track never overlap."""

    number: Int64
    """Position of the track of each op among the tracks of its rank."""
    names: tuple[str, ...]

    def thread(self, rank: Int64, number: Int64) -> list[int]:
        """Return the thread ids of tracks."""
        threads: list[int] = (rank * len(self.names) + number + 1).tolist()
        return threads


def _tracks(program: Program, timeline: Timeline) -> _Tracks:
    """Return a track for each stream, then as many as ops without a stream need side by side."""

    def position(stream: int) -> tuple[int, int]:
        word = program.streams[stream].split(" ")[0]
        return (_ORDER.index(word) if word in _ORDER else len(_ORDER)), stream

    streams = sorted(range(len(program.streams)), key=position)
    place = np.zeros(len(streams) + 1, np.int64)
    place[streams] = np.arange(len(streams))
    number = place[program.stream]

    alone = np.flatnonzero(program.stream == NONE)
    alone = alone[np.lexsort((alone, timeline.start[alone]))]
    busy: dict[int, list[int]] = {}
    most = 0
    for op in alone.tolist():
        ends = busy.setdefault(int(program.rank[op]), [])
        lane = next((k for k, end in enumerate(ends) if end <= timeline.start[op]), len(ends))
        ends[lane : lane + 1] = [int(timeline.end[op])]
        number[op] = len(streams) + lane
        most = max(most, lane + 1)
    names = [program.streams[s] for s in streams] + [f"no stream {k}" for k in range(most)]
    return _Tracks(number, tuple(names))


def _metadata(result: Result, rank: Int32, number: Int64, tracks: _Tracks) -> Iterator[str]:
    """Name the processes and the threads that have slices, and say how to order them."""
    width = len(tracks.names)
    used = np.unique(rank.astype(np.int64) * width + number)
    ranks, numbers = np.divmod(used, max(width, 1))
    shown = np.unique(ranks)
    for pid, text in zip(shown.tolist(), _rank_names(result, shown), strict=True):
        name = json.dumps(text, ensure_ascii=False)
        head = f'{{"ph":"M","pid":{pid}'
        yield f'{head},"name":"process_name","args":{{"name":{name}}}}}'
        yield f'{head},"name":"process_sort_index","args":{{"sort_index":{pid}}}}}'
    threads = tracks.thread(ranks, numbers)
    for pid, tid, k in zip(ranks.tolist(), threads, numbers.tolist(), strict=True):
        head = f'{{"ph":"M","pid":{pid},"tid":{tid}'
        name = json.dumps(tracks.names[k])
        yield f'{head},"name":"thread_name","args":{{"name":{name}}}}}'
        yield f'{head},"name":"thread_sort_index","args":{{"sort_index":{k}}}}}'


def _rank_names(result: Result, ranks: Int64) -> Iterator[str]:
    """Yield the name of each rank, with its device and its place in the mesh."""
    s = result.scenario
    if s is None:
        yield from (f"rank {rank}" for rank in ranks.tolist())
        return
    mesh, placed = Mesh.of(s.plan), devices(s.plan, s.cluster)[ranks]
    for rank, device in zip(ranks.tolist(), placed.tolist(), strict=True):
        node, gpu = divmod(device, s.cluster.ranks_per_node)
        at = mesh.coordinates(rank)
        where = " ".join(f"{axis}{at[axis]}" for axis in ("pp", "dp", "tp"))
        yield f"rank {rank} · node {node} gpu {gpu} · {where}"


def _slices(program: Program, timeline: Timeline, tracks: _Tracks, ops: Int64) -> Iterable[str]:
    """Return one complete event for each op."""
    start, end = timeline.start[ops], timeline.end[ops]
    rank = program.rank[ops].astype(np.int64)
    name, category = _labels(program, ops)
    columns = (
        rank.tolist(), tracks.thread(rank, tracks.number[ops]),
        _microseconds(start), _microseconds(end - start), name, category,
        _arguments(program, ops), _flow_arguments(program, timeline, ops),
    )  # fmt: skip
    return [
        f'{{"ph":"X","pid":{pid},"tid":{tid},"ts":{ts},"dur":{dur},'
        f'"name":"{text}","cat":"{cat}","args":{{{args}{more}}}}}'
        for pid, tid, ts, dur, text, cat, args, more in zip(*columns, strict=True)
    ]


def _labels(program: Program, ops: Int64) -> tuple[list[str], list[str]]:
    """Return the name of each op, such as ``F3``, ``send F3`` or ``all_reduce``, and its category.

    Categories are those of the breakdown: what a rank does, or what it waits for in its flows.
    """
    action = program.action[ops].astype(np.int64)
    is_message = np.isin(action, [ACTION_CODE[kind] for kind in _MESSAGES])
    moving = moves(program)[ops]
    by_cost = moving & ~is_message
    heads = [_MESSAGES.get(kind, kind) for kind in ACTIONS]
    heads += [_escape(cost.name) for cost in program.costs]
    head = np.where(by_cost, len(ACTIONS) + program.cost[ops], action)
    tail = np.where(by_cost, NONE, program.microbatch[ops])
    names = [
        heads[h] if t == NONE else f"{heads[h]}{t}"
        for h, t in zip(head.tolist(), tail.tolist(), strict=True)
    ]
    categories = [work_category(kind) for kind in ACTIONS]
    categories += [_escape(stream_category(stream)) for stream in program.streams]
    categories.append("flow")  # without a stream: NONE is -1, the last one
    code = np.where(moving, len(ACTIONS) + program.stream[ops], action)
    code[moving & (program.stream[ops] == NONE)] = NONE
    return names, [categories[c] for c in code.tolist()]


def _arguments(program: Program, ops: Int64) -> list[str]:
    """Return what is known of each op, as members of a JSON object; what is absent is left out."""
    costs = [f'"cost":"{_escape(cost.name)}"' for cost in program.costs]
    columns = [
        _members(name, getattr(program, name)[ops])
        for name in ("stage", "microbatch", "layer", "step")
    ]
    names = [costs[cost] for cost in program.cost[ops].tolist()]
    return list(map("".join, zip(*columns, names, strict=True)))


def _members(name: str, column: Column) -> list[str]:
    texts = [f'"{name}":{value},' for value in range(int(column.max(initial=NONE)) + 1)]
    texts.append("")  # NONE is -1, the last one
    return [texts[value] for value in column.tolist()]


def _flow_arguments(program: Program, timeline: Timeline, ops: Int64) -> list[str]:
    """Return the size and group of each flow, and how long this rank waited for the others."""
    flows = np.flatnonzero(program.is_flow[ops])
    members = ops[flows]
    last = binding(program, timeline, members, streams=True)
    arrival = np.where(last == NONE, 0, timeline.end[last])
    waits = _microseconds(timeline.start[members] - arrival)
    joint = program.joint[members]
    group = np.where(joint == NONE, NONE, program.joint_group[joint]).tolist()
    groups = [_short(program.groups[g].tolist()) for g in range(len(program.groups))] + [""]
    sizes = [_real(c.count * c.bytes) if isinstance(c, Flow) else "" for c in program.costs]
    texts = [""] * len(ops)
    for at, cost, g, wait in zip(
        flows.tolist(), program.cost[members].tolist(), group, waits, strict=True
    ):
        texts[at] = f',"bytes":{sizes[cost]},"group":"{groups[g]}","wait_us":{wait}'
    return texts


def _short(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown}, ... ({len(ranks)} ranks)" if len(ranks) > 8 else shown


def _arrows(
    program: Program, timeline: Timeline, tracks: _Tracks, shown: npt.NDArray[np.bool_]
) -> Iterator[str]:
    """Draw an arrow from each send to its receive, where both ranks are shown."""
    sends, recvs = (
        _message_ops(program, [code for code, kind in enumerate(ACTIONS) if kind.startswith(side)])
        for side in ("SEND", "RECV")
    )
    both = (sends != NONE) & (recvs != NONE)
    both &= shown[program.rank[sends]] & shown[program.rank[recvs]]
    joints = np.flatnonzero(both).tolist()
    for phase, ops, bind in (("s", sends[both], ""), ("f", recvs[both], ',"bp":"e"')):
        rank = program.rank[ops].astype(np.int64)
        columns = (joints, rank.tolist(), tracks.thread(rank, tracks.number[ops]),
                   _microseconds(timeline.start[ops]))  # fmt: skip
        for joint, pid, tid, ts in zip(*columns, strict=True):
            yield (
                f'{{"ph":"{phase}","id":{joint},"pid":{pid},"tid":{tid},"ts":{ts},'
                f'"name":"message","cat":"pp"{bind}}}'
            )


def _message_ops(program: Program, actions: list[int]) -> Int64:
    """Return the member of each joint op that has one of some actions, or NONE."""
    members = np.full(len(program.joint_group), NONE, np.int64)
    ops = np.flatnonzero(np.isin(program.action, actions) & (program.joint != NONE))
    members[program.joint[ops]] = ops
    return members


def _memory(result: Result, shown: npt.NDArray[np.bool_]) -> Iterator[str]:
    """Draw device memory over time; a bare schedule states none."""
    if result.scenario is None:
        return
    static, memory = result.tiled.static_bytes, result.memory
    base = static if len(static) else np.zeros(len(shown))
    for rank in np.flatnonzero(shown).tolist():
        time, size = memory.of_rank(rank)
        time, size = np.append(0, time), np.append(0.0, size) + base[rank]
        values = [f"{value / _GIGABYTE:.6f}" for value in size.tolist()]
        yield from _counter(rank, time, values, "memory", "GB")


def _in_flight(program: Program, timeline: Timeline, ops: Int64) -> Iterator[str]:
    """Draw how many microbatches of each rank have begun forward and not ended backward."""
    ops = ops[(program.microbatch[ops] != NONE) & ~program.is_flow[ops]]
    key = np.zeros(len(ops), np.int64)
    for column in (program.rank, program.step, program.stage, program.microbatch):
        key = key * (int(column.max(initial=0)) + 2) + column[ops] + 1
    unique, owner = np.unique(key, return_inverse=True)
    owner = owner.reshape(-1)
    never = np.iinfo(np.int64).max
    begun, ended = np.full(len(unique), never), np.full(len(unique), NONE, np.int64)
    owner_rank = np.zeros(len(unique), np.int64)
    owner_rank[owner] = program.rank[ops]
    forward = program.action[ops] == ACTION_CODE["F"]
    backward = np.isin(program.action[ops], [ACTION_CODE[kind] for kind in ("B", "I", "W")])
    np.minimum.at(begun, owner[forward], timeline.start[ops[forward]])
    np.maximum.at(ended, owner[backward], timeline.end[ops[backward]])
    up = begun != never
    down = up & (ended != NONE)

    rank = np.concatenate([owner_rank[down], owner_rank[up]])
    time = np.concatenate([ended[down], begun[up]])
    delta = np.repeat([-1, 1], [int(down.sum()), int(up.sum())])
    order = np.lexsort((time, rank))
    rank, time, delta = rank[order], time[order], delta[order]
    for r in np.unique(rank).tolist():
        begin, end = np.searchsorted(rank, [r, r + 1])
        counts = np.cumsum(delta[begin:end]).tolist()
        yield from _counter(r, time[begin:end], counts, "microbatches in flight", "count")


def _counter(
    rank: int, time: Int64, values: Sequence[object], name: str, unit: str
) -> Iterator[str]:
    """Draw a value over time; of several at one time the last counts."""
    last = np.append(time[1:] != time[:-1], True)
    for is_last, ts, value in zip(last.tolist(), _microseconds(time), values, strict=True):
        if is_last:
            yield (
                f'{{"ph":"C","pid":{rank},"ts":{ts},"name":"{name}","args":{{"{unit}":{value}}}}}'
            )


def _microseconds(ticks: Int64) -> list[str]:
    """Return ticks as exact decimals in microseconds."""
    whole, rest = np.divmod(ticks, _TICKS_PER_MICROSECOND)
    return [
        f"{w}.{r:06d}".rstrip("0") if r else str(w)
        for w, r in zip(whole.tolist(), rest.tolist(), strict=True)
    ]


def _real(value: float) -> str:
    return repr(float(value)).removesuffix(".0")


def _escape(text: str) -> str:
    return json.dumps(text)[1:-1]
