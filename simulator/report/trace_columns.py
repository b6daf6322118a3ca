"""What a trace shows, as columns: tracks, slices, arrows and counters, whatever file they go to.

A process is a rank and a thread one of its streams; links that flows share have a process of their
own. Thread ids are unique over all ranks and never equal a process id: viewers put the thread that
carries its process's id before the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.budget import require
from simulator.hardware.placement import devices
from simulator.lower.mesh import Mesh
from simulator.program import ACTION_CODE, ACTIONS, NONE, Flow, Int64, Program
from simulator.report.breakdown import binding, moves, stream_category, work_category
from simulator.timeline import Timeline

if TYPE_CHECKING:
    from simulator.report.result import Result

Bools = npt.NDArray[np.bool_]

BYTES = 300.0
"""Memory that a trace takes for each op, about."""

LABELS = ("stage", "microbatch", "layer", "step")
"""Columns of a program that slices state, where they are there."""

_ORDER = (
    "compute", "tp", "unshard", "reduce", "dp", "tied", "shards", "pipeline", "offload", "host",
    "fetch", "send", "recv", "copy", "pin", "worker", "storage",
    "snapshot", "write",
)  # fmt: skip
"""Tracks of a rank from top to bottom, by the first word of their stream."""

_MESSAGES = {
    "SEND_F": "send F", "RECV_F": "recv F", "SEND_B": "send B", "RECV_B": "recv B",
}  # fmt: skip

SHARED = "shared links"
"""What has the counters of links; below the ranks where names order it."""

MOST_LINKS = 16
"""Links whose use is drawn, the busiest."""


class Coded(NamedTuple):
    """Texts by number: ``texts[code]`` of each row, nothing where the code is NONE."""

    code: Int64
    texts: tuple[str, ...]


class Slices(NamedTuple):
    """Ops as boxes on tracks, one row each; those of a track follow each other in time."""

    rank: Int64
    track: Int64
    """Position of the track among those of its rank."""
    start: Int64
    end: Int64
    name: Coded
    category: Coded
    labels: dict[str, Int64]
    """By `LABELS`; NONE where there is none."""
    cost: Coded
    bytes: npt.NDArray[np.float64]
    """Of a flow; below 0 for work."""
    group: Coded
    wait: Int64
    """Ticks that this rank waited for the other members of a flow; NONE for work."""
    sends: Int64
    """Number of the arrow that begins at a slice, or NONE."""
    receives: Int64
    """Number of the arrow that ends at a slice, or NONE."""

    def blocks(self, rows: int) -> Iterator[Slices]:
        """Yield at most so many slices at a time, so that writing all takes no more memory."""
        for first in range(0, len(self.rank), rows):
            some = slice(first, first + rows)
            yield Slices(*(_rows(column, some) for column in self))


def _rows(column: Any, rows: slice) -> Any:
    if isinstance(column, Coded):
        return Coded(column.code[rows], column.texts)
    if isinstance(column, dict):
        return {name: values[rows] for name, values in column.items()}
    return column[rows]


class Counter(NamedTuple):
    """A value over time of a process; of several at one time the last counts."""

    process: int
    name: str
    unit: str
    """`bytes`, `count` or `%`."""
    time: Int64
    values: npt.NDArray[Any]


class Trace(NamedTuple):
    """All that a trace file holds."""

    processes: dict[int, str]
    """Names by process id, in order."""
    tracks: tuple[str, ...]
    """Names of the tracks that ranks have, from the top; not every rank has every one."""
    slices: Slices
    counters: tuple[Counter, ...]

    def thread(self, rank: Int64, track: Int64) -> Int64:
        """Return the thread ids of tracks."""
        return rank * len(self.tracks) + track + 1

    @property
    def threads(self) -> tuple[Int64, Int64]:
        """Rank and track of every thread that has slices, in order."""
        width = max(len(self.tracks), 1)
        return np.divmod(np.unique(self.slices.rank * width + self.slices.track), width)


def trace_of(result: Result, shown: Bools) -> Trace:
    """Return what a trace of some ranks shows, by rank, track, start and op."""
    count = int(shown[result.tiled.tile_ranks].any(axis=0).sum()) * len(result.tiled.rank)
    require(BYTES * count, f"a trace of {count:,} ops", "choose ranks")
    program, timeline = result.excerpt(np.flatnonzero(shown))
    number, names = _tracks(program, timeline)
    ops = np.flatnonzero(shown[program.rank])
    order = np.lexsort((ops, timeline.end[ops], timeline.start[ops], number[ops],
                        program.rank[ops]))  # fmt: skip
    slices = _slices(program, timeline, number, ops[order], shown)
    ranks = np.unique(slices.rank)
    processes = dict(zip(ranks.tolist(), _rank_names(result, ranks), strict=True))
    counters = [*_memory(result, shown), *_in_flight(program, timeline, ops)]
    if result.moves is not None and len(ops):
        network = result.tiled.num_ranks
        processes[network] = SHARED
        counters += _links(result, network)
    return Trace(processes, names, slices, tuple(counters))


def _tracks(program: Program, timeline: Timeline) -> tuple[Int64, tuple[str, ...]]:
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
    return number, tuple(names)


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


def _slices(
    program: Program, timeline: Timeline, number: Int64, ops: Int64, shown: Bools
) -> Slices:
    """Return one box for each op."""
    name, category = _names(program, ops)
    size, group, wait = _flows(program, timeline, ops)
    sends, receives = (_arrows(program, ops, shown, side) for side in ("SEND", "RECV"))
    return Slices(
        rank=program.rank[ops].astype(np.int64),
        track=number[ops],
        start=timeline.start[ops],
        end=timeline.end[ops],
        name=name,
        category=category,
        labels={label: getattr(program, label)[ops].astype(np.int64) for label in LABELS},
        cost=_coded(program.cost[ops].astype(np.int64), [c.name for c in program.costs]),
        bytes=size,
        group=group,
        wait=wait,
        sends=sends,
        receives=receives,
    )


def _coded(code: Int64, texts: list[str]) -> Coded:
    """Return codes of texts, each text once."""
    unique = list(dict.fromkeys(texts))
    at = {text: k for k, text in enumerate(unique)}
    new = np.array([*(at[text] for text in texts), NONE], np.int64)  # NONE is -1, the last one
    return Coded(new[code], tuple(unique))


def _names(program: Program, ops: Int64) -> tuple[Coded, Coded]:
    """Return the name of each op, such as ``F3``, ``send F3`` or ``all_reduce``, and its category.

    Categories are those of the breakdown: what a rank does, or what it waits for in its flows.
    """
    action = program.action[ops].astype(np.int64)
    is_message = np.isin(action, [ACTION_CODE[kind] for kind in _MESSAGES])
    moving = moves(program)[ops]
    by_cost = moving & ~is_message
    heads = [_MESSAGES.get(kind, kind) for kind in ACTIONS]
    heads += [cost.name for cost in program.costs]
    head = np.where(by_cost, len(ACTIONS) + program.cost[ops], action)
    tail = np.where(by_cost, NONE, program.microbatch[ops])
    width = int(tail.max(initial=0)) + 2
    used, code = np.unique(head * width + tail + 1, return_inverse=True)
    texts = [
        heads[h] if t == 0 else f"{heads[h]}{t - 1}" for h, t in (divmod(u, width) for u in used)
    ]
    categories = [work_category(kind) for kind in ACTIONS]
    categories += [stream_category(stream) for stream in program.streams]
    categories.append("flow")  # of a flow without a stream
    kind = np.where(moving, len(ACTIONS) + program.stream[ops], action)
    kind[moving & (program.stream[ops] == NONE)] = len(categories) - 1
    return _coded(code.reshape(-1).astype(np.int64), texts), _coded(kind, categories)


def _flows(
    program: Program, timeline: Timeline, ops: Int64
) -> tuple[npt.NDArray[np.float64], Coded, Int64]:
    """Return the size and group of each flow, and how long this rank waited for the others."""
    flows = np.flatnonzero(program.is_flow[ops])
    members = ops[flows]
    last = binding(program, timeline, members, streams=True)
    arrival = np.where(last == NONE, 0, timeline.end[last])
    wait = np.full(len(ops), NONE, np.int64)
    wait[flows] = timeline.start[members] - arrival
    size = np.full(len(ops), float(NONE))
    sizes = [c.count * c.bytes if isinstance(c, Flow) else 0.0 for c in program.costs]
    size[flows] = np.array([*sizes, 0.0])[program.cost[members]]
    joint, group = program.joint[members], np.full(len(ops), NONE, np.int64)
    group[flows[joint != NONE]] = program.joint_group[joint[joint != NONE]]
    used = np.unique(group[group != NONE])
    texts = [""] * len(program.groups)
    for g in used.tolist():
        texts[g] = _short(program.groups[g].tolist())
    return size, _coded(group, texts), wait


def _short(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown}, ... ({len(ranks)} ranks)" if len(ranks) > 8 else shown


def _arrows(program: Program, ops: Int64, shown: Bools, side: str) -> Int64:
    """Return the number of the arrow that each op begins or ends, where both ranks are shown.

    An arrow goes from each send to its receive; its number is that of their joint op.
    """
    ends = [
        _message_ops(program, [code for code, kind in enumerate(ACTIONS) if kind.startswith(of)])
        for of in ("SEND", "RECV")
    ]
    both = (ends[0] != NONE) & (ends[1] != NONE)
    both &= shown[program.rank[ends[0]]] & shown[program.rank[ends[1]]]
    at = np.full(len(program.rank) + 1, NONE, np.int64)
    joints = np.flatnonzero(both)
    at[ends[side == "RECV"][joints]] = joints
    return at[ops]


def _message_ops(program: Program, actions: list[int]) -> Int64:
    """Return the member of each joint op that has one of some actions, or NONE."""
    members = np.full(len(program.joint_group), NONE, np.int64)
    ops = np.flatnonzero(np.isin(program.action, actions) & (program.joint != NONE))
    members[program.joint[ops]] = ops
    return members


def _memory(result: Result, shown: Bools) -> Iterator[Counter]:
    """Draw device memory over time; a bare schedule states none."""
    if result.scenario is None:
        return
    static, memory = result.tiled.static_bytes, result.memory
    base = static if len(static) else np.zeros(len(shown))
    for rank in np.flatnonzero(shown).tolist():
        time, size = memory.of_rank(rank)
        time, size = np.append(0, time), np.append(0.0, size) + base[rank]
        yield _counter(rank, "memory", "bytes", time, size)


def _in_flight(program: Program, timeline: Timeline, ops: Int64) -> Iterator[Counter]:
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
        counts = np.cumsum(delta[begin:end])
        yield _counter(r, "microbatches in flight", "count", time[begin:end], counts)


def _links(result: Result, process: int) -> Iterator[Counter]:
    """Draw how much of each of the busiest links' capacity the last step uses."""
    use = result.links
    begin, end = use.window
    time = begin + (end - begin) * np.arange(use.by_bin.shape[1]) // use.by_bin.shape[1]
    for link in use.hottest(MOST_LINKS).tolist():
        share = 100 * use.share_over_time(link)
        if share.any():
            yield _counter(process, f"link {use.traffic.names[link]}", "%",
                           np.append(time, end), np.append(share, 0.0))  # fmt: skip


def _counter(process: int, name: str, unit: str, time: Int64, values: npt.NDArray[Any]) -> Counter:
    last = np.append(time[1:] != time[:-1], True)
    return Counter(process, name, unit, time[last], values[last])
