"""From one pipeline replica to all ranks: columns tiled, joint ops linked by index arithmetic."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from simulator.lower.bodies import SCOPES
from simulator.lower.mesh import Mesh
from simulator.lower.pipeline import Template
from simulator.program import NONE, Cost, Groups, Int32, Int64, Program

T = TypeVar("T", bound=np.generic)

TP, DP = SCOPES.index("tp"), SCOPES.index("dp")


def replicate(
    one: Template, mesh: Mesh, costs: tuple[Cost, ...], static_bytes: npt.NDArray[np.float64]
) -> Program:
    """Return the Program of all replicas of a pipeline.

    Args:
        one: ops of one replica; its ranks are coordinates along pp.
        mesh: where the replicas lie; each pair of (dp, tp) coordinates is one replica.
        costs: the cost table of the ops.
        static_bytes: memory alive all the time, by pipeline rank.
    """
    replicas = mesh.dp * mesh.tp
    dp, tp = np.divmod(np.arange(replicas, dtype=np.int64), mesh.tp)
    ops = len(one)
    by_stage = mesh.rank(dp[:, None], np.arange(one.num_ranks)[None, :], tp[:, None])
    shift = np.arange(replicas, dtype=np.int64)[:, None]

    def tiled(column: npt.NDArray[T]) -> npt.NDArray[T]:
        return np.tile(column, replicas)

    pred = np.where(one.pred == NONE, NONE, one.pred + shift * ops).astype(np.int32).ravel()
    joint, joint_group, groups = _joined(one, mesh, by_stage, dp, tp)
    static = np.zeros(mesh.world_size)
    static[by_stage] = static_bytes
    return Program(
        rank=by_stage.astype(np.int32)[:, one.rank].ravel(),
        stream=tiled(one.stream),
        action=tiled(one.action),
        stage=tiled(one.stage),
        microbatch=tiled(one.microbatch),
        layer=tiled(one.layer),
        step=tiled(one.step),
        cost=tiled(one.cost),
        joint=joint,
        pred_offset=np.concatenate([[0], np.cumsum(pred != NONE)]).astype(np.int64),
        preds=pred[pred != NONE],
        joint_group=joint_group,
        groups=groups,
        costs=costs,
        streams=one.streams,
        num_ranks=mesh.world_size,
        static_bytes=static,
    )


def _joined(
    one: Template, mesh: Mesh, by_stage: Int64, dp: Int64, tp: Int64
) -> tuple[Int32, Int32, Groups]:
    """Return the joint number of every op, the group of every joint op, and the groups.

    Joint ops of one scope are numbered (number within the replica, instance): replicas that a
    scope joins share an instance, the others count on.
    """
    replicas = len(dp)
    scopes = (
        (TP, dp, mesh.dp),  # one instance for each dp coordinate: all tp ranks together
        (DP, tp, mesh.tp),
        *((s, np.arange(replicas), replicas) for s in range(len(SCOPES)) if s not in (0, TP, DP)),
    )
    number = np.full((replicas, len(one)), NONE, np.int64)
    joint_group, sizes, members = [], [], []
    joints = groups = 0
    for scope, instance, instances in scopes:
        mine = np.flatnonzero(one.joint_scope == scope)
        if not len(mine):
            continue
        local = np.full(len(one.joint_scope) + 1, NONE, np.int64)
        local[mine] = np.arange(len(mine))
        of_op = np.append(local, NONE)[one.joint]
        at = np.flatnonzero(of_op != NONE)
        number[:, at] = joints + of_op[at] * instances + instance[:, None]
        joints += len(mine) * instances

        ranks, group = np.unique(one.joint_ranks[mine], axis=0, return_inverse=True)
        group = group.reshape(-1)
        joint_group.append((groups + group[:, None] * instances + np.arange(instances)).ravel())
        sets = _member_ranks(scope, ranks, mesh, by_stage)
        members.append(sets.ravel())
        sizes.append(np.full(len(sets), sets.shape[1]))
        groups += len(sets)
    nothing = np.zeros(0, np.int64)
    offset = np.concatenate([[0], np.cumsum(np.concatenate([*sizes, nothing]))]).astype(np.int64)
    return (
        number.ravel().astype(np.int32),
        np.concatenate([*joint_group, nothing]).astype(np.int32),
        Groups(offset, np.concatenate([*members, nothing]).astype(np.int32)),
    )


def _member_ranks(scope: int, ranks: Int32, mesh: Mesh, by_stage: Int64) -> Int64:
    """Return the ranks of each group of a scope, a row a group, instances innermost."""
    if scope == TP:
        return (
            by_stage.reshape(mesh.dp, mesh.tp, -1)[:, :, ranks[:, 0]]
            .transpose(2, 0, 1)
            .reshape(-1, mesh.tp)
        )
    if scope == DP:
        return (
            by_stage.reshape(mesh.dp, mesh.tp, -1)[:, :, ranks[:, 0]]
            .transpose(2, 1, 0)
            .reshape(-1, mesh.dp)
        )
    return by_stage[:, ranks].transpose(1, 0, 2).reshape(-1, ranks.shape[1])
