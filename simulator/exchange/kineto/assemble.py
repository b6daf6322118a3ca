"""A Program and a Timeline out of what ranks did.

Each rank has one stream `compute`, on which ops never overlap: of kernels that do, on whatever
streams of the device, the later one keeps what the earlier left of it, and one that is wholly
covered goes to a stream `beside`. Communication has a stream for each group and direction, and
more where calls overlap.

A joint op starts when its last member is there, so that each member's wait is told apart from the
transfer; where a member waited, an op without length marks when it was posted. What an op waited
for is read off the times: of an op that computes, the calls and copies that ended in the gap before
it; of a call, what computed last before it was posted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.exchange.kineto.events import Int64
from simulator.exchange.kineto.match import Matched
from simulator.exchange.kineto.ranks import BESIDE, COMPUTE, RankOps
from simulator.program import NONE, Cost, Flow, Groups, Program, Work
from simulator.timeline import Timeline
from simulator.units import TICKS_PER_SECOND

TICKS_PER_NANOSECOND = TICKS_PER_SECOND // 10**9

POSTED = "posted"
"""Name of what marks when a member of a joint op was there."""


class Assembled(NamedTuple):
    """A measured run as columns, and what was done to it."""

    program: Program
    timeline: Timeline
    posted: Int64
    """When each op began by itself, before it waited for other members, in ticks."""
    launched: Int64
    """When the host launched each op, in ticks, or NONE."""
    overlaps: int
    """Kernels that overlap an earlier one of their rank."""
    overlap_s: float
    """Seconds of them that count once."""
    dropped: int
    """Dependencies that were dropped, for ops would have waited for themselves."""


class _Rows(NamedTuple):
    """Ops of all ranks in the order of the program; times in ticks since the first step began."""

    rank: Int64
    op: Int64
    """Of the op within its rank; of a mark -2 less that of the op that it marks."""
    lane: npt.NDArray[np.object_]
    own: Int64
    start: Int64
    end: Int64
    joint: Int64


def assemble(
    ranks: Sequence[RankOps], calls: Matched, offset: Int64, origin: int, numbers: Sequence[int]
) -> Assembled:
    """Return the program and the timeline of a measured run.

    Args:
        ranks: what each did, in steps that are kept only.
        calls: which of their calls are one.
        offset: how far each rank's clock is ahead, in nanoseconds.
        origin: aligned time that becomes tick 0, in nanoseconds.
        numbers: steps that are kept, in order; they become 0, 1, ...
    """
    joint, own, start, end = _times(ranks, calls, offset, origin)
    parts, overlaps, covered = [], 0, 0
    for position, ops in enumerate(ranks):
        lanes = np.array(ops.lanes, object)
        begin, until = start[position].copy(), end[position]
        more, length = _uncover(lanes, begin, until)
        overlaps, covered = overlaps + more, covered + length
        _spread(lanes, np.minimum(own[position], begin), until)
        parts.append(_rows_of(position, lanes, own[position], begin, until, joint[position]))
    rows = _Rows(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
    edges = [_edges(rows, position) for position in range(len(ranks))]
    program, dropped = _program(ranks, calls, rows, np.concatenate(edges), numbers)
    launched = [
        np.where(r.launched == NONE, NONE, _ticks(r.launched, o, origin))
        for r, o in zip(ranks, offset.tolist(), strict=True)
    ]
    return Assembled(
        program, Timeline(rows.start, rows.end), rows.own, _gather(rows, launched), overlaps,
        covered / TICKS_PER_SECOND, dropped,
    )  # fmt: skip


def _ticks(nanoseconds: Int64, offset: int, origin: int) -> Int64:
    ticks: Int64 = (nanoseconds - offset - origin) * TICKS_PER_NANOSECOND
    return ticks


def _times(
    ranks: Sequence[RankOps], calls: Matched, offset: Int64, origin: int
) -> tuple[list[Int64], list[Int64], list[Int64], list[Int64]]:
    """Return by rank the joint op, own start, joint start and end of each op, in ticks."""
    shifts = offset.tolist()
    own = [_ticks(r.start, o, origin) for r, o in zip(ranks, shifts, strict=True)]
    end = [_ticks(r.end, o, origin) for r, o in zip(ranks, shifts, strict=True)]
    joint = [np.full(len(r.names), NONE, np.int64) for r in ranks]
    start = [some.copy() for some in own]
    for number, members in enumerate(calls.members):
        last = max(own[position][i] for position, i in members)
        for position, i in members:
            joint[position][i] = number
            start[position][i] = min(last, end[position][i])
    number = len(calls.members)
    for position, ops in enumerate(ranks):
        alone = np.flatnonzero([c is not None for c in ops.calls] & (joint[position] == NONE))
        joint[position][alone] = np.arange(number, number + len(alone))
        number += len(alone)
    return joint, own, start, end


def _uncover(lanes: npt.NDArray[np.object_], start: Int64, end: Int64) -> tuple[int, int]:
    """Cut what computes, in place, so that no two ops overlap; return how many and how much."""
    ops = np.flatnonzero(lanes == COMPUTE)
    ops = ops[np.lexsort((-end[ops], start[ops]))]
    before = np.concatenate([[np.iinfo(np.int64).min], np.maximum.accumulate(end[ops])[:-1]])
    before = before[: len(ops)]
    late = before > start[ops]
    cut = np.minimum(before, end[ops]) - start[ops]
    hidden = late & (before >= end[ops])
    lanes[ops[hidden]] = BESIDE
    start[ops[late & ~hidden]] = before[late & ~hidden]
    return int(late.sum()), int(cut[late].sum())


def _spread(lanes: npt.NDArray[np.object_], start: Int64, end: Int64) -> None:
    """Give ops that overlap others of their stream, in place, a stream of their own."""
    for lane in sorted(set(lanes.tolist()) - {COMPUTE}):
        ops = np.flatnonzero(lanes == lane)
        ops = ops[np.lexsort((end[ops], start[ops]))]
        if (start[ops][1:] >= np.maximum.accumulate(end[ops])[:-1]).all():
            continue
        ends: list[int] = []
        for op, begin, until in zip(
            ops.tolist(), start[ops].tolist(), end[ops].tolist(), strict=True
        ):
            k = next((k for k, e in enumerate(ends) if e <= begin), len(ends))
            ends[k : k + 1] = [until]
            if k:
                lanes[op] = f"{lane} ({k + 1})"


def _rows_of(
    position: int, lanes: npt.NDArray[np.object_], own: Int64, start: Int64, end: Int64,
    joint: Int64,
) -> tuple[npt.NDArray[np.generic], ...]:  # fmt: skip
    """Return the rows of a rank in the order of their start, a mark before each call that waits."""
    waits = np.flatnonzero((joint != NONE) & (start > own))
    index = np.concatenate([np.arange(len(own)), waits])
    mark = np.arange(len(index)) >= len(own)
    begin = np.where(mark, own[index], start[index])
    order = np.lexsort((~mark, end[index], begin))
    index, mark, begin = index[order], mark[order], begin[order]
    own = np.where(lanes[index] == COMPUTE, begin, own[index])
    return (
        np.full(len(index), position), np.where(mark, NONE - 1 - index, index), lanes[index], own,
        begin, np.where(mark, begin, end[index]), np.where(mark, NONE, joint[index]),
    )  # fmt: skip


def _edges(rows: _Rows, position: int) -> Int64:
    """Return (dependencies, 2): which row of a rank waited for which."""
    mine = np.flatnonzero(rows.rank == position)
    computes = rows.lane[mine] == COMPUTE
    work, other = mine[computes], mine[~computes]
    found = [np.zeros((0, 2), np.int64)]
    if len(work):
        # Of calls and copies: what computed last before they were posted.
        at = np.searchsorted(rows.end[work], rows.own[other], side="right") - 1
        first = (at >= 0) & (rows.start[other] == rows.own[other])
        found.append(np.stack([other[first], work[at[first]]], axis=1))
        begin = rows.start[work]
        free = np.concatenate([[np.iinfo(np.int64).min], rows.end[work][:-1]])
        for lane in sorted(set(rows.lane[other].tolist()) - {BESIDE}):
            there = other[(rows.lane[other] == lane) & (rows.op[other] >= 0)]
            if not len(there):
                continue
            last = np.searchsorted(rows.end[there], begin, side="right") - 1
            waited = (last >= 0) & (rows.end[there][last] > free) & (begin > free)
            found.append(np.stack([work[waited], there[last[waited]]], axis=1))
    return np.concatenate(found)


def _gather(rows: _Rows, columns: Sequence[Int64]) -> Int64:
    """Return a column of ranks in the order of rows; a mark has what the op has that it marks."""
    base = np.cumsum([0, *map(len, columns)])[:-1]
    op = np.where(rows.op < 0, NONE - 1 - rows.op, rows.op)
    values: Int64 = np.concatenate(columns)[base[rows.rank] + op]
    return values


def _program(
    ranks: Sequence[RankOps], calls: Matched, rows: _Rows, edges: Int64, numbers: Sequence[int]
) -> tuple[Program, int]:
    """Return the program of rows, and how many dependencies it leaves out."""
    cost, costs = _costs(ranks, rows)
    streams = (COMPUTE, *sorted(set(rows.lane.tolist()) - {COMPUTE}))
    number_of = {name: i for i, name in enumerate(streams)}
    column = {
        name: _gather(rows, [getattr(r.labels, name) for r in ranks])
        for name in ("step", "action", "stage", "microbatch")
    }
    group_of, groups = _groups(rows, calls)

    stream = np.array([number_of[lane] for lane in rows.lane], np.int16)

    def program(edges: Int64) -> Program:
        edges = edges[np.argsort(edges[:, 0], kind="stable")]
        degree = np.bincount(edges[:, 0], minlength=len(rows.rank))
        return Program(
            rank=rows.rank.astype(np.int32),
            stream=stream,
            action=column["action"].astype(np.int8),
            stage=column["stage"].astype(np.int32),
            microbatch=column["microbatch"].astype(np.int32),
            layer=np.full(len(rows.rank), NONE, np.int32),
            step=np.searchsorted(numbers, column["step"]).astype(np.int32),
            cost=cost,
            joint=rows.joint.astype(np.int32),
            pred_offset=np.concatenate([[0], np.cumsum(degree)]).astype(np.int64),
            preds=edges[:, 1].astype(np.int32),
            joint_group=group_of,
            groups=groups,
            costs=costs,
            streams=streams,
            num_ranks=len(ranks),
        )

    whole = program(edges)
    reached = _reached(whole)
    if reached.all():
        return whole, 0
    kept = edges[reached[edges[:, 0]]]
    whole = program(kept)
    # Calls that ranks made in different orders: no order of their streams suits all.
    unordered = ~_reached(whole) & (rows.joint != NONE)
    stream = np.where(unordered, NONE, stream).astype(np.int16)
    return program(kept), len(edges) - len(kept) + int(unordered.sum())


def _reached(program: Program) -> npt.NDArray[np.bool_]:
    """Return which rows do not wait for themselves around a cycle."""
    reached = np.zeros(len(program.rank), bool)
    reached[program.units[1]] = True
    return reached


def _costs(ranks: Sequence[RankOps], rows: _Rows) -> tuple[npt.NDArray[np.int32], tuple[Cost, ...]]:
    """Return the cost of each row and the table: an entry a name and size, its median time."""
    keys: list[tuple[str, float, bool]] = []
    for position, i in zip(rows.rank.tolist(), rows.op.tolist(), strict=True):
        call = None if i < 0 else ranks[position].calls[i]
        if i < 0:
            keys.append((POSTED, 0.0, False))
        elif call is None:
            keys.append((ranks[position].names[i].removeprefix("PP:"), 0.0, False))
        else:
            message = call.operation in ("send", "recv")
            keys.append(("send_recv" if message else call.operation, call.bytes, True))
    table = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    cost = np.array([table[key] for key in keys], np.int32)
    length = rows.end - rows.start
    order = np.argsort(cost, kind="stable")
    ends = np.searchsorted(cost[order], np.arange(len(table) + 1))
    costs: list[Cost] = []
    for (name, size, is_flow), first, last in zip(table, ends[:-1], ends[1:], strict=True):
        seconds = float(np.median(length[order[first:last]])) / TICKS_PER_SECOND
        costs.append(Flow(name, size, seconds=seconds) if is_flow else Work(name, seconds=seconds))
    return cost, tuple(costs)


def _groups(rows: _Rows, calls: Matched) -> tuple[npt.NDArray[np.int32], Groups]:
    """Return the group of each joint op, the ranks that have a member, and all groups."""
    sets: dict[tuple[int, ...], int] = {}
    group_of = [sets.setdefault(members, len(sets)) for members in _member_ranks(rows, calls)]
    offset = np.cumsum([0, *map(len, sets)]).astype(np.int64)
    flat = np.array([rank for some in sets for rank in some], np.int32)
    return np.array(group_of, np.int32), Groups(offset, flat)


def _member_ranks(rows: _Rows, calls: Matched) -> Iterator[tuple[int, ...]]:
    yield from (tuple(sorted(position for position, _ in members)) for members in calls.members)
    alone = np.flatnonzero(rows.joint >= len(calls.members))
    order = alone[np.argsort(rows.joint[alone])]
    yield from ((rank,) for rank in rows.rank[order].tolist())
