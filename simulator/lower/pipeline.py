"""One pipeline replica as columns: action lists expanded by the bodies of their stages.

Array arithmetic throughout: the cost of lowering grows with actions, not with ops.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.budget import require
from simulator.errors import ScheduleError
from simulator.lower.bodies import SCOPES, Body, StageBodies
from simulator.lower.grid import (
    BACKWARD,
    COMPLETING,
    FORWARD,
    INPUT_GRAD,
    MESSAGES,
    OPT,
    REDUCE_GRAD,
    WEIGHT_GRAD,
    Grid,
)
from simulator.lower.pairs import as_one, together
from simulator.lower.segments import DP, EDP, OFFLOAD, PIPELINE, REDUCE, TIED
from simulator.program import ACTION_CODE, NONE, Int16, Int32, Int64, ranges

PP = SCOPES.index("pp")

SUMS = (DP, REDUCE, EDP)
"""Streams on which gradients are summed over ranks that hold the same weights."""

ACROSS_COPIES = (DP, EDP)
"""Of them those whose sums are taken over both ranks that hold a stage, where there are two."""


@dataclass(frozen=True, slots=True)
class Template:
    """The ops of one pipeline replica; ranks are pipeline ranks, joint ops are not yet joined."""

    rank: Int32
    stream: Int16
    action: npt.NDArray[np.int8]
    stage: Int32
    microbatch: Int32
    layer: Int32
    step: Int32
    cost: Int32
    pred: Int32
    """The one predecessor of most ops besides their streams, or NONE."""
    joint: Int32
    """Number of the joint op within the replica, or NONE."""
    joint_scope: npt.NDArray[np.int8]
    joint_ranks: npt.NDArray[np.int32]
    """(joint ops, 2): the pipeline ranks that a joint op joins, the same twice where it is one."""
    streams: tuple[str, ...]
    num_ranks: int
    listed: Int32 = field(default_factory=lambda: np.zeros(0, np.int32))
    """Number in its step's lists of the action that each op comes from, of a pair the first."""
    more: Int32 = field(default_factory=lambda: np.zeros((0, 2), np.int32))
    """(pairs, 2): an op, and another one that it waits for."""

    def __len__(self) -> int:
        return len(self.rank)


def expand(
    grid: Grid, bodies: tuple[StageBodies, ...], message: int, *, at_once: bool = False
) -> Template:
    """Return the ops of one step: every action replaced by the body of its stage and kind.

    Args:
        grid: complete action lists, with sends and receives.
        bodies: by place: a stage on a rank, ordered by rank and then by stage.
        message: number of the cost of one send of activations or gradients between stages.
        at_once: whether the actions of a pair begin together and end together.

    Raises:
        ScheduleError: when the bodies do not cover an action.
    """
    shared, number = _body_numbers(grid, bodies)
    number = _paired(grid, shared, number, at_once)
    lengths = np.array([len(b) for b in shared], np.int64)
    length = lengths[number]
    first = np.concatenate([[0], np.cumsum(length)])
    listed = np.repeat(np.arange(len(number)), length)

    what = f"a step of {int(first[-1]):,} ops on each replica"
    require(200.0 * float(first[-1]), what, "take fewer microbatches, or a coarser run.detail")

    start = np.concatenate([[0], np.cumsum(lengths)])
    source = ranges(start[number], length)

    def column(name: str) -> Int32:
        whole: Int32 = np.concatenate([getattr(b, name) for b in shared]).astype(np.int32)
        by_op: Int32 = whole[source]
        return by_op

    ends = _ends(grid, shared, number, first)
    action = listed
    if grid.paired.any():
        action = listed + np.concatenate([_half(b) for b in shared])[source]
    streams, lanes = grid.lanes
    stream, is_message = column("stream"), grid.is_message[action]
    scope = np.where(stream < OFFLOAD, stream, 0)  # these streams carry their scopes' numbers
    scope = np.where(is_message, PP, scope).astype(np.int8)
    stream[is_message] = lanes[action[is_message]]
    cost = column("cost")
    cost[is_message] = message
    need = column("need")
    pred = np.where(need > 0, np.arange(first[-1]) - need, NONE)
    waits = _entries(grid, ends, stream)
    also = grid.paired[:-1] & (ends.entry[1:] == ends.entry[:-1])  # of a pair that begins at once
    also = np.concatenate([[False], also])
    pred[ends.entry[ends.filled & ~also]] = waits[ends.filled & ~also]
    more = np.stack([ends.entry[also], waits[also]], axis=1)
    apart = _sums_apart(grid, ends, stream, action)
    joint, joint_scope, joint_ranks = _joints(grid, action, scope)
    return Template(
        rank=grid.rank[action],
        stream=stream.astype(np.int16),
        action=grid.kind[action].astype(np.int8),
        stage=grid.stage[action],
        microbatch=grid.microbatch[action],
        layer=column("layer"),
        step=np.zeros(first[-1], np.int32),
        cost=cost,
        pred=pred.astype(np.int32),
        joint=joint,
        joint_scope=joint_scope,
        joint_ranks=joint_ranks,
        streams=streams,
        num_ranks=grid.num_ranks,
        listed=listed.astype(np.int32),
        more=np.concatenate([more[more[:, 1] != NONE], apart]).astype(np.int32),
    )


MESSAGE = Body(
    np.zeros(1, np.int32), np.zeros(1, np.int16), np.full(1, NONE, np.int32), np.zeros(1, np.int16),
    exit=0,
)  # fmt: skip
"""One send or receive, whose cost and stream its action says."""

NOTHING = Body(
    MESSAGE.cost[:0], MESSAGE.stream[:0], MESSAGE.layer[:0], MESSAGE.need[:0], exit=0
)  # fmt: skip


def _half(body: Body) -> Int16:
    return np.zeros(len(body), np.int16) if body.second is None else body.second.of


def _body_numbers(grid: Grid, bodies: tuple[StageBodies, ...]) -> tuple[list[Body], Int64]:
    """Return the distinct bodies, and for each action the number of its own."""
    shared: list[Body] = [MESSAGE]
    known: dict[int, int] = {}  # by identity: those of a place are often the same

    def numbered(one: Body | None) -> int:
        if one is None:
            return NONE
        if id(one) not in known:
            known[id(one)] = len(shared)
            shared.append(one)
        return known[id(one)]

    table, ends = np.full((2, len(ACTION_CODE), len(bodies)), NONE, np.int64)
    for place, b in enumerate(bodies):
        for kind, name, at_end in BODIES:
            table[kind, place] = numbered(getattr(b, name))
            ends[kind, place] = numbered(getattr(b, at_end))
    table[list(MESSAGES)] = 0
    number = table[grid.kind, grid.place]
    if (number == NONE).any():
        bad = int(np.argmax(number == NONE))
        raise ScheduleError(f"{grid.spell(bad)} cannot be lowered: nothing says what it does")
    # The first forward of a place with a REDUCE_GRAD, and what completes its gradients, which
    # reduces them on the way, may differ from the others.
    if (grid.kind[~grid.is_message] == FORWARD).all():  # of nothing else: an evaluation
        at = grid.first_of(FORWARD)
        number[at] = ends[FORWARD, grid.place[at]]
    reduced = np.flatnonzero(grid.kind == REDUCE_GRAD)
    if any(b.begin for b in bodies):
        at = grid.first_of(BACKWARD)[grid.place[reduced]]
        begin = np.array([numbered(b.begin or b.backward) for b in bodies])
        number[at] = begin[grid.place[at]]
    for at in (grid.first_of(FORWARD)[grid.place[reduced]], grid.completed[reduced]):
        number[at] = ends[grid.kind[at], grid.place[at]]
    return shared, number


BODIES = (
    (FORWARD, "forward", "first"), (BACKWARD, "backward", "last"),
    (INPUT_GRAD, "input_grad", "input_grad"), (WEIGHT_GRAD, "weight_grad", "last_weight_grad"),
    (REDUCE_GRAD, "reduce", "reduce"), (OPT, "optimizer", "optimizer"),
)  # fmt: skip
"""Kinds of action, and which body of `StageBodies` they have: usually, and at a step's end (for F:
its begin)."""


def _paired(grid: Grid, shared: list[Body], number: Int64, at_once: bool) -> Int64:
    """Return the numbers with the first action of each pair doing all, the other one nothing."""
    at = np.flatnonzero(grid.paired)
    if not len(at):
        return number
    pairs = np.stack([number[at], number[at + 1]], axis=1)
    distinct, kind = np.unique(pairs, axis=0, return_inverse=True)
    number = number.copy()
    number[at] = len(shared) + kind.reshape(-1)
    number[at + 1] = len(shared) + len(distinct)
    made = [together(shared[a], shared[b]) for a, b in distinct.tolist()]
    shared += [as_one(pair) for pair in made] if at_once else made
    shared.append(NOTHING)
    return number


class Ends(NamedTuple):
    """Rows of each action: what waits, what is waited for, the last; and whether it has some."""

    entry: Int64
    exit: Int64
    tail: Int64
    filled: npt.NDArray[np.bool_]


def _ends(grid: Grid, shared: list[Body], number: Int64, first: Int64) -> Ends:
    ends = np.array([(b.entry, b.exit, b.tail) for b in shared], np.int64)
    entry, leave, tail = first[:-1, None].T + ends[number].T
    filled = first[1:] > first[:-1]
    at = np.flatnonzero(grid.paired)
    if len(at):
        second = [b.second or (None, 0, 0, 0) for b in shared]
        others = np.array([(enter, out, end) for _, out, enter, end in second], np.int64)
        entry[at + 1], leave[at + 1], tail[at + 1] = first[at] + others[number[at]].T
        filled[at + 1] = True
    return Ends(entry, leave, tail, filled)


def _entries(grid: Grid, ends: Ends, stream: Int32) -> Int64:
    """Return for each action the op that its first op waits for, or NONE.

    REDUCE_GRAD follows the last bucket of the backward that completes its gradients, OPT whatever
    of the two came last.
    """
    waits = grid.waits
    entry = np.where(waits == NONE, NONE, ends.exit[waits])
    reduced = np.full((len(grid.places[0]), grid.num_microbatches + 1), NONE, np.int64)
    for kind in (REDUCE_GRAD, OPT):
        actions = np.flatnonzero(grid.kind == kind)
        backward = grid.completed[actions]
        last = np.where(backward == NONE, 0, ends.tail[backward])
        lane = stream[last]
        summed = (lane == DP) | (lane == REDUCE) | (lane == EDP)
        done = np.where(summed, last, ends.exit[backward])
        key = grid.place[actions], grid.microbatch[actions] + 1
        after = reduced[key]
        entry[actions] = np.where(
            after != NONE, after, np.where(backward != NONE, done, NONE)
        )  # fmt: skip
        reduced[key] = np.where(ends.filled[actions], ends.tail[actions], after)
    return entry


def _sums_apart(grid: Grid, ends: Ends, stream: Int32, action: Int64) -> Int64:
    """Return (pairs, 2): updates, and the last sums that they wait for on every stream.

    Where gradients of experts are summed apart from the others, either may be summed last.
    """
    updates = np.flatnonzero((grid.kind == OPT) & ends.filled & (grid.completed != NONE))
    pairs = [np.zeros((0, 2), np.int64)]
    for lane in SUMS if (stream == EDP).any() else ():
        rows = np.flatnonzero((stream == lane) & np.isin(grid.kind[action], COMPLETING))
        backward = grid.completed[updates]
        last = np.append(rows, NONE)[np.searchsorted(rows, ends.tail[backward], "right") - 1]
        own = (last != NONE) & (action[last] == backward)
        pairs.append(np.stack([ends.entry[updates[own]], last[own]], axis=1))
    return np.concatenate(pairs)


def _joints(
    grid: Grid, action: Int64, scope: npt.NDArray[np.int8]
) -> tuple[Int32, npt.NDArray[np.int8], Int32]:
    """Number the joint ops of the replica: messages, the tied reduction, others, those of all.

    Returns the number of each op, and the scope and the pipeline ranks of each joint op.
    """
    numbers, ranks = grid.messages
    tied = np.flatnonzero(scope == TIED)
    others = np.flatnonzero((scope > 0) & ~np.isin(scope, (TIED, PIPELINE, PP)))
    joint = numbers[action].astype(np.int32)
    joint[tied] = len(ranks)
    base = len(ranks) + (len(tied) > 0)
    leaders, own, meets = _meetings(grid, action[others], scope[others])
    joint[others] = base + meets
    # the first op of the whole pipeline on each rank meets the first ones of the others, and so on
    whole = np.flatnonzero(scope == PIPELINE)
    by_rank = grid.rank[action[whole]]
    turn = np.arange(len(whole)) - np.searchsorted(by_rank, by_rank)
    joint[whole] = base + len(own) + turn
    meetings = int(turn.max(initial=-1)) + 1
    joint_scope = np.concatenate(
        [
            np.full(len(ranks), PP),
            np.full(base - len(ranks), TIED),
            scope[others[leaders]],
            np.full(meetings, PIPELINE),
        ]
    )
    ends = np.array([[grid.home[0, 0], grid.home[-1, 0]]], np.int32)[: base - len(ranks)]
    span = np.array([[0, grid.num_ranks - 1]] * meetings, np.int32).reshape(-1, 2)
    all_ranks = np.concatenate([ranks, ends, own, span])
    return joint, joint_scope.astype(np.int8), all_ranks.astype(np.int32)


def _meetings(
    grid: Grid, action: Int64, scope: npt.NDArray[np.int8]
) -> tuple[Int64 | slice, Int64, Int64]:
    """Return how ops along an axis meet within the replica.

    Each is alone, but where a stage lies on two ranks: both sum its gradients, the first bucket of
    one with the first of the other, and so on. Returns one op of each meeting, the two pipeline
    ranks of each (the same twice), and the meeting of each op.
    """
    rank = grid.rank[action].astype(np.int64)
    holders, stages = grid.places
    count = np.bincount(stages, minlength=grid.num_stages)
    summed = np.zeros(0, np.int64)
    if count.max(initial=0) > 1:
        summed = np.flatnonzero(np.isin(scope, ACROSS_COPIES) & (count[grid.stage[action]] > 1))
    if not len(summed):
        return slice(None), np.stack([rank, rank], axis=1), np.arange(len(action))
    if count.max() > 2:
        raise ScheduleError(
            f"stage {int(np.argmax(count))} lies on {int(count.max())} ranks; at most 2 can hold "
            "a stage"
        )
    key = np.arange(len(action))
    place, of = grid.place[action[summed]], scope[summed]
    order = np.lexsort((of, place))
    lane = place[order] * len(SCOPES) + of[order]
    turn = np.empty(len(summed), np.int64)
    turn[order] = np.arange(len(order)) - np.searchsorted(lane, lane)
    stage = grid.stage[action[summed]].astype(np.int64)
    same = (stage * len(SCOPES) + of) * len(summed) + turn
    _, leader, meeting = np.unique(same, return_index=True, return_inverse=True)
    key[summed] = summed[leader[meeting.reshape(-1)]]
    leaders, meets = np.unique(key, return_inverse=True)
    pairs = np.zeros((grid.num_stages, 2), np.int64)
    pairs[stages[::-1], 0], pairs[stages, 1] = holders[::-1], holders  # the first, the last
    own = np.stack([rank, rank], axis=1)
    own[summed] = pairs[stage]
    return leaders, own[leaders], meets.reshape(-1)


def without_flush(one: Template, grid: Grid, microbatches: int) -> Template:
    """Return ops of steps that overlap, each of so many microbatches.

    A rank is in a step until it has updated its weights with the last microbatch of it, though
    forwards of the next one lie in between.
    """
    ends = (grid.kind == OPT) & (grid.microbatch % microbatches == microbatches - 1)
    before = np.cumsum(ends) - ends
    first = np.searchsorted(grid.rank, grid.rank)  # of the rank's list
    step = (before - before[first])[one.listed].astype(np.int32)
    return replace(one, step=step, microbatch=(one.microbatch % microbatches).astype(np.int32))


def repeat_steps(one: Template, num_steps: int) -> Template:
    """Return the ops of several optimizer steps, one after the other in every stream."""
    if num_steps == 1:
        return one
    ops, joints = len(one), len(one.joint_scope)
    what = f"a run of {num_steps:,} steps of {ops:,} ops on each replica"
    require(120.0 * num_steps * ops, what, "simulate fewer steps")
    step = np.repeat(np.arange(num_steps, dtype=np.int32), ops)

    def tiled(column: npt.NDArray[np.int32], size: int) -> Int32:
        many = np.tile(column, num_steps)
        return np.where(many == NONE, NONE, many + step * size).astype(np.int32)

    same = ("rank", "stream", "action", "stage", "microbatch", "layer", "cost", "listed")
    again = one.more + ops * np.arange(num_steps, dtype=np.int32)[:, None, None]
    columns: dict[str, Any] = {name: np.tile(getattr(one, name), num_steps) for name in same}
    return replace(
        one,
        **columns,
        step=step,
        pred=tiled(one.pred, ops),
        joint=tiled(one.joint, joints),
        joint_scope=np.tile(one.joint_scope, num_steps),
        joint_ranks=np.tile(one.joint_ranks, (num_steps, 1)),
        more=again.reshape(-1, 2),
    )
