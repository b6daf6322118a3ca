"""One pipeline replica as columns: action lists expanded by the bodies of their stages.

Array arithmetic throughout: the cost of lowering grows with actions, not with ops.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from simulator.budget import require
from simulator.errors import ScheduleError
from simulator.lower.bodies import SCOPES, Body, StageBodies
from simulator.lower.grid import (
    BACKWARD,
    FORWARD,
    OPT,
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    SEND_B,
    SEND_F,
    Grid,
)
from simulator.lower.segments import DP, OFFLOAD, PIPELINE, REDUCE, TIED
from simulator.program import ACTION_CODE, NONE, Int16, Int32, Int64, ranges

PP = SCOPES.index("pp")


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
    more: Int32 = field(default_factory=lambda: np.zeros((0, 2), np.int32))
    """(pairs, 2): an op, and another one that it waits for."""

    def __len__(self) -> int:
        return len(self.rank)


def expand(grid: Grid, bodies: tuple[StageBodies, ...], message: int) -> Template:
    """Return the ops of one step: every action replaced by the body of its stage and kind.

    Args:
        grid: complete action lists, with sends and receives.
        bodies: by stage.
        message: number of the cost of one send of activations or gradients between stages.

    Raises:
        ScheduleError: when the bodies do not cover an action.
    """
    shared, number = _body_numbers(grid, bodies)
    lengths = np.array([len(b) for b in shared] + [1], np.int64)  # the last is one send or receive
    length = lengths[number]
    first = np.concatenate([[0], np.cumsum(length)])
    action = np.repeat(np.arange(len(number)), length)

    what = f"a step of {int(first[-1]):,} ops on each replica"
    require(200.0 * float(first[-1]), what, "take fewer microbatches, or a coarser run.detail")

    start = np.concatenate([[0], np.cumsum(lengths)])
    source = ranges(start[number], length)
    message_row = {"cost": message, "stream": 0, "layer": NONE, "need": 0}

    def column(name: str) -> Int32:
        parts = [getattr(b, name) for b in shared]
        whole: Int32 = np.concatenate([*parts, [message_row[name]]]).astype(np.int32)
        by_op: Int32 = whole[source]
        return by_op

    streams, lanes = grid.lanes
    stream, is_message = column("stream"), grid.is_message[action]
    scope = np.where(stream < OFFLOAD, stream, 0)  # these streams carry their scopes' numbers
    scope = np.where(is_message, PP, scope).astype(np.int8)
    stream[is_message] = lanes[action[is_message]]
    need = column("need")
    pred = np.where(need > 0, np.arange(first[-1]) - need, NONE)
    entries = np.array([b.entry for b in shared] + [0], np.int64)[number]
    begins = (first[:-1] + entries)[length > 0]
    exits = first[:-1] + np.array([b.exit for b in shared] + [0], np.int64)[number]
    pred[begins] = _entries(grid, exits, first, stream)[length > 0]
    joint, joint_scope, joint_ranks = _joints(grid, action, scope)
    return Template(
        rank=grid.rank[action],
        stream=stream.astype(np.int16),
        action=grid.kind[action].astype(np.int8),
        stage=grid.stage[action],
        microbatch=grid.microbatch[action],
        layer=column("layer"),
        step=np.zeros(first[-1], np.int32),
        cost=column("cost"),
        pred=pred.astype(np.int32),
        joint=joint,
        joint_scope=joint_scope,
        joint_ranks=joint_ranks,
        streams=streams,
        num_ranks=grid.num_ranks,
    )


def _body_numbers(grid: Grid, bodies: tuple[StageBodies, ...]) -> tuple[list[Body], Int64]:
    """Return the distinct bodies, and for each action the number of its own."""
    shared: list[Body] = []
    table = np.full((len(ACTION_CODE), len(bodies)), NONE, np.int64)
    ends = []
    for stage, b in enumerate(bodies):
        kinds = (
            (FORWARD, b.forward),
            (BACKWARD, b.backward),
            (REDUCE_GRAD, b.reduce),
            (OPT, b.optimizer),
        )
        for kind, one in kinds:
            table[kind, stage] = len(shared)
            shared.append(one)
        ends.append((len(shared), len(shared) + 1))
        shared += [b.first, b.last]
    table[[SEND_F, RECV_F, SEND_B, RECV_B]] = len(shared)
    number = table[grid.kind, grid.stage]
    if (number == NONE).any():
        bad = int(np.argmax(number == NONE))
        raise ScheduleError(f"{grid.spell(bad)} cannot be lowered: B is not split into I and W")
    # The first forward of a stage with a REDUCE_GRAD, and the last backward, which reduces on the
    # way, may differ from the others.
    reduced = grid.stage[grid.kind == REDUCE_GRAD]
    opening, closing = np.array(ends, np.int64).reshape(-1, 2)[reduced].T
    number[grid.first_of(FORWARD)[reduced]] = opening
    number[grid.last_of(BACKWARD)[reduced]] = closing
    return shared, number


def _entries(grid: Grid, exits: Int64, first: Int64, stream: Int32) -> Int64:
    """Return for each action the op that its first op waits for, or NONE.

    REDUCE_GRAD follows the stage's last bucket of gradients, OPT whatever of the two came last.
    """
    waits = grid.waits
    entry = np.where(waits == NONE, NONE, exits[waits])
    tail = first[1:] - 1
    filled = first[1:] > first[:-1]
    backward = grid.last_of(BACKWARD)
    bucketed = np.isin(stream[tail[backward]], (DP, REDUCE))
    done = np.where(backward == NONE, NONE, np.where(bucketed, tail[backward], exits[backward]))
    for kind in (REDUCE_GRAD, OPT):
        actions = np.flatnonzero(grid.kind == kind)
        stage = grid.stage[actions]
        entry[actions] = done[stage]
        done[stage[filled[actions]]] = tail[actions[filled[actions]]]
    return entry


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
    joint[others] = base + np.arange(len(others))
    # the first op of the whole pipeline on each rank meets the first ones of the others, and so on
    whole = np.flatnonzero(scope == PIPELINE)
    by_rank = grid.rank[action[whole]]
    turn = np.arange(len(whole)) - np.searchsorted(by_rank, by_rank)
    joint[whole] = base + len(others) + turn
    meetings = int(turn.max(initial=-1)) + 1
    joint_scope = np.concatenate(
        [
            np.full(len(ranks), PP),
            np.full(base - len(ranks), TIED),
            scope[others],
            np.full(meetings, PIPELINE),
        ]
    )
    ends = np.array([[grid.home[0], grid.home[-1]]], np.int32)[: base - len(ranks)]
    own = grid.rank[action[others]]
    span = np.array([[0, grid.num_ranks - 1]] * meetings, np.int32).reshape(-1, 2)
    all_ranks = np.concatenate([ranks, ends, np.stack([own, own], axis=1), span])
    return joint, joint_scope.astype(np.int8), all_ranks.astype(np.int32)


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

    same = ("rank", "stream", "action", "stage", "microbatch", "layer", "cost")
    columns: dict[str, Any] = {name: np.tile(getattr(one, name), num_steps) for name in same}
    return replace(
        one,
        **columns,
        step=step,
        pred=tiled(one.pred, ops),
        joint=tiled(one.joint, joints),
        joint_scope=np.tile(one.joint_scope, num_steps),
        joint_ranks=np.tile(one.joint_ranks, (num_steps, 1)),
    )
