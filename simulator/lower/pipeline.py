"""One pipeline replica as columns: action lists expanded by the bodies of their stages.

Array arithmetic throughout: the cost of lowering grows with actions, not with ops.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.errors import ScheduleError
from simulator.lower.bodies import DP, SCOPES, STREAMS, Body, CostTable, StageBodies
from simulator.program import ACTION_CODE, ACTIONS, NONE, Flow, Int16, Int32, Int64
from simulator.schedules import Action, Actions

PP = SCOPES.index("pp")

FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD = (ACTION_CODE[kind] for kind in ("F", "B", "I", "W"))
SEND_F, RECV_F, SEND_B, RECV_B = (
    ACTION_CODE[kind] for kind in ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
)
MESSAGES = {SEND_F: "send F", RECV_F: "recv F", SEND_B: "send B", RECV_B: "recv B"}
"""Names of the streams of messages, to which the distance of the peer is added."""

REDUCE_GRAD, OPT = ACTION_CODE["REDUCE_GRAD"], ACTION_CODE["OPT"]


class Grid(NamedTuple):
    """Action lists as columns, ranks one after the other."""

    rank: Int32
    stage: Int32
    kind: Int32
    microbatch: Int32
    home: Int32
    """Pipeline rank of each stage."""
    num_ranks: int
    num_microbatches: int


@dataclass(frozen=True, slots=True)
class Template:
    """The ops of one pipeline replica; ranks are pipeline ranks, joint ops are not yet joined."""

    rank: Int32
    stream: Int16
    action: npt.NDArray[np.int8]
    stage: Int16
    microbatch: Int32
    layer: Int16
    step: Int32
    cost: Int32
    pred: Int32
    """The one predecessor of each op besides its stream, or NONE."""
    scope: npt.NDArray[np.int8]
    joint: Int32
    """Number of the joint op within the replica, or NONE."""
    joint_scope: npt.NDArray[np.int8]
    joint_ranks: npt.NDArray[np.int32]
    """(joint ops, 2): the pipeline ranks that a joint op joins, the same twice where it is one."""
    streams: tuple[str, ...]
    num_ranks: int

    def __len__(self) -> int:
        return len(self.rank)


def to_grid(actions: Actions) -> Grid:
    """Return action lists as columns."""
    rows = [
        (rank, a.stage, ACTION_CODE[a.kind], a.microbatch)
        for rank, row in enumerate(actions)
        for a in row
    ]
    rank, stage, kind, microbatch = np.array(rows, np.int32).reshape(-1, 4).T
    home = np.full(int(stage.max(initial=-1)) + 1, NONE, np.int32)
    home[stage] = rank
    num_microbatches = int(microbatch.max(initial=-1)) + 1
    return Grid(rank, stage, kind, microbatch, home, len(actions), num_microbatches)


def expand(grid: Grid, bodies: list[StageBodies], message: Flow, table: CostTable) -> Template:
    """Return the ops of one step: every action replaced by the body of its stage and kind.

    Args:
        grid: complete action lists, with sends and receives.
        bodies: by stage.
        message: cost of one send of activations or gradients between stages.
        table: where the costs of the bodies are numbered.
    """
    shared, number = _body_numbers(grid, bodies)
    lengths = np.array([len(b) for b in shared] + [1], np.int64)  # the last is one send or receive
    length = lengths[number]
    first = np.concatenate([[0], np.cumsum(length)])
    action = np.repeat(np.arange(len(number)), length)
    within = np.arange(first[-1]) - first[action]

    start = np.concatenate([[0], np.cumsum(lengths)])
    source = start[number[action]] + within
    streams, lanes = _lanes(grid)
    message_row = {"cost": table.number(message), "stream": 0, "layer": NONE, "need": 0}

    def column(name: str) -> Int32:
        parts = [getattr(b, name) for b in shared]
        whole: Int32 = np.concatenate([*parts, [message_row[name]]]).astype(np.int32)
        by_op: Int32 = whole[source]
        return by_op

    stream = column("stream")
    is_message = number[action] == len(shared)
    stream[is_message] = lanes[action[is_message]]

    exits = first[:-1] + np.array([b.exit for b in shared] + [0], np.int64)[number]
    entry = _entries(grid, exits, first, stream)
    need = column("need")
    pred = np.where(need > 0, np.arange(first[-1]) - need, NONE)
    begins = first[:-1][length > 0]
    pred[begins] = entry[length > 0]

    scope = np.where(is_message, PP, np.where(stream < len(STREAMS), stream, 0))
    joint, joint_scope, joint_ranks = _joints(grid, action, scope)
    return Template(
        rank=grid.rank[action],
        stream=stream.astype(np.int16),
        action=grid.kind[action].astype(np.int8),
        stage=grid.stage[action].astype(np.int16),
        microbatch=grid.microbatch[action],
        layer=column("layer").astype(np.int16),
        step=np.zeros(first[-1], np.int32),
        cost=column("cost"),
        pred=pred.astype(np.int32),
        scope=scope.astype(np.int8),
        joint=joint,
        joint_scope=joint_scope,
        joint_ranks=joint_ranks,
        streams=streams,
        num_ranks=grid.num_ranks,
    )


def _body_numbers(grid: Grid, bodies: list[StageBodies]) -> tuple[list[Body], Int64]:
    """Return the distinct bodies, and for each action the number of its own."""
    shared: list[Body] = []
    table = np.full((len(ACTION_CODE), len(bodies)), NONE, np.int64)
    last = []
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
        last.append(len(shared))
        shared.append(b.last)
    table[[SEND_F, RECV_F, SEND_B, RECV_B]] = len(shared)
    number = table[grid.kind, grid.stage]
    if (number == NONE).any():
        bad = int(np.argmax(number == NONE))
        raise ScheduleError(f"{_spell(grid, bad)} cannot be lowered: B is not split into I and W")
    # The last backward of a stage with a REDUCE_GRAD is the one that reduces along the way.
    final = np.full(len(bodies), NONE, np.int64)
    backward = np.flatnonzero(grid.kind == BACKWARD)
    final[grid.stage[backward]] = backward
    for stage in grid.stage[grid.kind == REDUCE_GRAD]:
        number[final[stage]] = last[stage]
    return shared, number


def _lanes(grid: Grid) -> tuple[tuple[str, ...], Int32]:
    """Return all streams, and for each send or receive its own: by direction, pass and peer."""
    kind, stage = grid.kind, grid.stage
    up, down = np.isin(kind, (SEND_F, RECV_B)), np.isin(kind, (SEND_B, RECV_F))
    towards = up.astype(np.int32) - down
    peer_stage = np.clip(stage + towards, 0, len(grid.home) - 1)
    hop = (grid.home[peer_stage] - grid.rank) % max(grid.num_ranks, 1)
    hop = np.where(hop > grid.num_ranks // 2, hop - grid.num_ranks, hop)
    streams, lanes = list(STREAMS), np.zeros(len(kind), np.int32)
    for code, name in MESSAGES.items():
        mine = kind == code
        for distance in np.unique(hop[mine]):
            lanes[mine & (hop == distance)] = len(streams)
            streams.append(f"{name} {distance:+d}")
    return tuple(streams), lanes


def _entries(grid: Grid, exits: Int64, first: Int64, stream: npt.NDArray[np.int32]) -> Int64:
    """Return for each action the op that its first op waits for, or NONE."""
    stages, microbatches = len(grid.home), grid.num_microbatches
    done = np.full((len(ACTION_CODE), stages + 2, microbatches + 1), NONE, np.int64)
    done[grid.kind, grid.stage + 1, grid.microbatch] = exits  # NONE is the last microbatch row
    kind, stage, m = grid.kind, grid.stage, grid.microbatch

    def exit_of(code: int, offset: int) -> Int64:
        column: Int64 = done[code, stage + 1 + offset, m]
        return column

    def local(offset: int) -> npt.NDArray[np.bool_]:
        same: npt.NDArray[np.bool_] = grid.home[np.clip(stage + offset, 0, stages - 1)] == grid.rank
        return same

    entry = np.full(len(kind), NONE, np.int64)
    for code, receive, offset, edge in (
        (FORWARD, RECV_F, -1, 0),
        (BACKWARD, RECV_B, 1, stages - 1),
        (INPUT_GRAD, RECV_B, 1, stages - 1),
    ):
        mine = (kind == code) & (stage != edge)
        arrived = exit_of(receive, 0)
        handed = exit_of(code, offset)
        if code == INPUT_GRAD:  # the stage after may do its backward whole
            handed = np.maximum(handed, exit_of(BACKWARD, offset))
        source = np.where(arrived != NONE, arrived, np.where(local(offset), handed, NONE))
        entry[mine] = source[mine]
    backward = np.maximum(exit_of(BACKWARD, 0), exit_of(INPUT_GRAD, 0))
    for code, source in (
        (SEND_F, exit_of(FORWARD, 0)),
        (SEND_B, backward),
        (WEIGHT_GRAD, exit_of(INPUT_GRAD, 0)),
    ):
        entry[kind == code] = source[kind == code]
    _after_reductions(grid, exits, first, stream, entry)
    return entry


def _after_reductions(
    grid: Grid, exits: Int64, first: Int64, stream: npt.NDArray[np.int32], entry: Int64
) -> None:
    """Let REDUCE_GRAD follow the stage's last bucket, and OPT whatever of the two came last."""
    tail = np.maximum(first[1:] - 1, 0)
    filled = first[1:] > first[:-1]
    backward, reduction, update = (
        np.flatnonzero(grid.kind == k) for k in (BACKWARD, REDUCE_GRAD, OPT)
    )
    done = np.full(len(grid.home), NONE, np.int64)
    done[grid.stage[backward]] = exits[backward]  # the last backward of each stage stays
    bucketed = backward[filled[backward] & (stream[tail[backward]] == DP)]
    done[grid.stage[bucketed]] = tail[bucketed]
    entry[reduction] = done[grid.stage[reduction]]
    tied = reduction[filled[reduction]]
    done[grid.stage[tied]] = tail[tied]
    entry[update] = done[grid.stage[update]]


def _joints(
    grid: Grid, action: Int64, scope: npt.NDArray[np.int64]
) -> tuple[Int32, npt.NDArray[np.int8], npt.NDArray[np.int32]]:
    """Number the joint ops of the replica; a send and its receive get the same number."""
    stages, microbatches = len(grid.home), max(grid.num_microbatches, 1)
    kind, rank = grid.kind[action], grid.rank[action]
    stage = grid.stage[action].astype(np.int64)
    # A message is known by the stage it leaves, its microbatch and its direction.
    backward = np.isin(kind, (SEND_B, RECV_B))
    leaves = stage + np.where(kind == RECV_F, -1, 0) + np.where(kind == RECV_B, 1, 0)
    message = (backward * (stages + 2) + leaves) * microbatches + grid.microbatch[action]
    first_free = 2 * (stages + 2) * microbatches
    key = np.where(scope == PP, message, first_free + 1 + np.arange(len(action)))
    key = np.where(scope == SCOPES.index("tied"), first_free, key)
    joint = np.full(len(action), NONE, np.int32)
    members = np.flatnonzero(scope > 0)
    if not len(members):
        return joint, np.zeros(0, np.int8), np.zeros((0, 2), np.int32)
    _, representative, inverse = np.unique(key[members], return_index=True, return_inverse=True)
    joint[members] = inverse
    chosen = members[representative]
    ranks = np.stack([rank[chosen], rank[chosen]], axis=1).astype(np.int32)
    is_message = scope[chosen] == PP
    source = np.clip(leaves[chosen], 0, stages - 1)
    target = np.clip(source + np.where(backward[chosen], -1, 1), 0, stages - 1)
    ranks[is_message] = grid.home[np.stack([source, target], axis=1)[is_message]]
    ranks[scope[chosen] == SCOPES.index("tied")] = (grid.home[0], grid.home[-1])
    return joint, scope[chosen].astype(np.int8), ranks


def repeat_steps(one: Template, num_steps: int) -> Template:
    """Return the ops of several optimizer steps, one after the other in every stream."""
    if num_steps == 1:
        return one
    ops, joints = len(one), len(one.joint_scope)
    step = np.repeat(np.arange(num_steps, dtype=np.int32), ops)

    def tiled(column: npt.NDArray[np.int32], size: int) -> Int32:
        many = np.tile(column, num_steps)
        return np.where(many == NONE, NONE, many + step * size).astype(np.int32)

    same = ("rank", "stream", "action", "stage", "microbatch", "layer", "cost", "scope")
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


def _spell(grid: Grid, index: int) -> str:
    stage, kind, m = (int(column[index]) for column in (grid.stage, grid.kind, grid.microbatch))
    return str(Action(stage, ACTIONS[kind], m))


@lru_cache(maxsize=64)
def cached_grid(actions: Actions) -> Grid:
    """Return action lists as columns, remembered: plans of a sweep share them."""
    return to_grid(actions)
