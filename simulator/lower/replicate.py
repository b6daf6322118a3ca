"""From one pipeline replica to all ranks: a tiling of the replica over the other mesh axes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from simulator.budget import require
from simulator.lower.bodies import SCOPES
from simulator.lower.mesh import Mesh
from simulator.lower.pipeline import Template
from simulator.program import NONE, Cost, Groups, Int32, Int64, Program, Tiling

ALONE, ALONG_TP, ALONG_DP, ALONG_SHARD, ALONG_CP, ALONG_EP, ALONG_ETP, ALONG_EDP, ALL = range(9)
"""Partitions of the replicas: each for itself, those that differ in tp only, in dp and cp only.

Where states are sharded, along dp meet those with the same shard, along shard those whose shards
make a whole. Along ep meet those that hold the experts of a layer together, along etp those that
hold one expert, along edp those that hold the same part of the same experts; all meet all.
"""

USUAL = (ALONE, ALONG_TP, ALONG_DP)
"""Partitions that every tiling has."""

PARTITION = {
    "alone": ALONE, "tp": ALONG_TP, "dp": ALONG_DP, "tied": ALONE, "unshard": ALONG_SHARD,
    "reduce": ALONG_SHARD, "shards": ALONG_SHARD, "pipeline": ALONE, "cp": ALONG_CP,
    "ep": ALONG_EP, "etp": ALONG_ETP, "edp": ALONG_EDP, "pp": ALONE, "one_sided": ALONE,
    "storage": ALONE, "world": ALL,
}  # fmt: skip
"""Which replicas meet in a joint op, by its scope."""


def replicate(
    one: Template, mesh: Mesh, costs: tuple[Cost, ...], static_bytes: npt.NDArray[np.float64]
) -> Program:
    """Return the Program of all replicas of a pipeline.

    Args:
        one: ops of one replica; its ranks are coordinates along pp.
        mesh: where the replicas lie; each triple of (dp, cp, tp) coordinates is one replica.
        costs: the cost table of the ops.
        static_bytes: memory alive all the time, by pipeline rank.
    """
    tiles = np.arange(mesh.tiles)
    ranks = mesh.ranks_of_tiles(tiles[None, :], np.arange(one.num_ranks)[:, None])
    static = np.zeros(mesh.world_size)
    static[ranks] = static_bytes[:, None]
    partition = np.array([PARTITION[scope] for scope in SCOPES], np.int8)[one.joint_scope]
    classes = _classes(mesh)
    first_group, groups = _groups(one, mesh, ranks, classes)
    tiling = None  # one replica is the whole
    if len(tiles) > 1:
        kept = np.union1d(USUAL, partition)
        partition = np.searchsorted(kept, partition).astype(np.int8)
        tiling = Tiling(
            axes=_axes(mesh),
            ranks=ranks.astype(np.int32),
            classes=classes[kept].astype(np.int32),
        )
    row = np.concatenate([np.flatnonzero(one.pred != NONE), one.more[:, 0]])
    pred = np.concatenate([one.pred[one.pred != NONE], one.more[:, 1]])
    degree = np.bincount(row, minlength=len(one))
    return Program(
        rank=one.rank,
        stream=one.stream,
        action=one.action,
        stage=one.stage,
        microbatch=one.microbatch,
        layer=one.layer,
        step=one.step,
        cost=one.cost,
        joint=one.joint,
        pred_offset=np.concatenate([[0], np.cumsum(degree)]).astype(np.int64),
        preds=pred[np.argsort(row, kind="stable")].astype(np.int32),
        joint_group=first_group,
        groups=groups,
        costs=costs,
        streams=one.streams,
        num_ranks=mesh.world_size,
        static_bytes=static,
        tiling=tiling,
        joint_partition=partition if tiling is not None else np.zeros(0, np.int8),
    )


def _axes(mesh: Mesh) -> tuple[tuple[str, int], ...]:
    """Return the axes that replicas are counted along; replicas of shards are an axis of theirs."""
    inner = (("cp", mesh.cp), ("tp", mesh.tp)) if mesh.cp > 1 else (("tp", mesh.tp),)
    if mesh.shards in (1, mesh.replicas):
        return (("dp", mesh.dp), *inner)
    wholes = mesh.replicas // mesh.shards
    return (("dp_replicate", wholes), ("dp_shard", mesh.dp // wholes), *inner)


def _classes(mesh: Mesh) -> Int64:
    """Return (partitions, tiles): which tiles meet in the joint ops of each partition."""
    tile = np.arange(mesh.tiles)
    replica, tp = np.divmod(tile, mesh.tp)
    dp, shard = np.divmod(replica, mesh.shards)
    experts = mesh.ep * mesh.etp
    by_partition = {
        ALONE: tile,
        ALONG_TP: replica,
        ALONG_DP: shard * mesh.tp + tp,
        ALONG_SHARD: dp * mesh.tp + tp,
        ALONG_CP: replica // mesh.cp * mesh.tp + tp,
        ALONG_EP: tile // experts * mesh.etp + tile % mesh.etp,
        ALONG_ETP: tile // mesh.etp,
        ALONG_EDP: tile % experts,
        ALL: np.zeros_like(tile),
    }
    return np.stack([by_partition[number] for number in range(len(by_partition))])


def _groups(one: Template, mesh: Mesh, ranks: Int64, classes: Int64) -> tuple[Int32, Groups]:
    """Return the group of each joint op on class 0 of its partition, and all groups.

    Joint ops of one scope that join the same pipeline ranks share their groups, one a class. What
    is done along an axis is of one pipeline rank, or of the two that hold the same stage.
    """
    first_group = np.zeros(len(one.joint_scope), np.int64)
    sizes, members, count = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], 0
    kinds = 2 * one.joint_scope.astype(np.int64) + (one.joint_ranks[:, 0] != one.joint_ranks[:, 1])
    for number in np.unique(kinds).tolist():
        mine, scope, twin = np.flatnonzero(kinds == number), SCOPES[number // 2], number % 2
        key = one.joint_ranks[mine, 0] * one.num_ranks + one.joint_ranks[mine, 1]
        keys, kind = np.unique(key, return_inverse=True)
        pairs = np.stack(np.divmod(keys, one.num_ranks), axis=1)
        if scope == "world":
            sets = np.sort(ranks.reshape(1, -1))
        elif PARTITION[scope] != ALONE:
            of_tile = classes[PARTITION[scope]]
            size = len(of_tile) // (int(of_tile.max()) + 1)
            by_class = ranks[pairs[:, : 1 + twin]][:, :, np.argsort(of_tile, kind="stable")]
            sets = by_class.reshape(len(pairs), 1 + twin, -1, size).swapaxes(1, 2)
            sets = sets.reshape(-1, (1 + twin) * size)
        elif scope == "pipeline":
            sets = ranks.T
        elif scope == "storage":
            sets = ranks[pairs[:, 0]].reshape(-1, 1)
        elif scope == "one_sided":
            sets = _each_first(ranks[pairs[:, 0]].reshape(-1, mesh.replicas, mesh.tp))
        else:
            sets = ranks[pairs].transpose(0, 2, 1).reshape(-1, 2)
        first_group[mine] = count + kind.reshape(-1) * (len(sets) // len(pairs))
        count += len(sets)
        sizes.append(np.full(len(sets), sets.shape[1]))
        members.append(sets.ravel())
    offset = np.concatenate([[0], np.cumsum(np.concatenate(sizes))]).astype(np.int64)
    flat = np.concatenate(members).astype(np.int32)
    return first_group.astype(np.int32), Groups(offset, flat)


def _each_first(cube: Int64) -> Int64:
    """Return the dp group of each rank of (ranks, dp, tp), in the same order, itself first."""
    dp = cube.shape[1]
    what = f"the dp group of {dp} ranks listed for each of {cube.size:,} ranks"
    require(60.0 * cube.size * dp, what, "describe a smaller dp, or leave out plan.staleness")
    behind = np.arange(dp)[:, None] != np.arange(dp)  # all but the rank itself
    order = np.argsort(behind, axis=1, kind="stable")
    sets: Int64 = cube[:, order].transpose(0, 1, 3, 2).reshape(-1, dp)
    return sets
