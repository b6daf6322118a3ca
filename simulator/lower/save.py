"""Checkpoints: every rank copies its part of the state to its host, which writes it to storage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.describe.optimizer import OPTIMIZERS
from simulator.describe.placement import PLACEMENTS
from simulator.describe.scenario import Scenario
from simulator.describe.storage import Reading, Storage
from simulator.lower.bodies import SCOPES
from simulator.lower.data import STORAGE
from simulator.lower.mesh import Mesh
from simulator.lower.operators import FP32
from simulator.lower.optimizers import saved_state_bytes
from simulator.lower.pipeline import Template
from simulator.lower.places import layout
from simulator.lower.segments import COMPUTE
from simulator.lower.trainable import stage_params, stage_tensors, stages
from simulator.program import ACTION_CODE, NONE, Cost, Flow, Kernel, Work

STREAMS = ("snapshot", "write")


class Part(NamedTuple):
    """What a rank at one place of the pipeline saves."""

    bytes: float
    write: float
    """Seconds at its even share of storage and network, with all others that write."""


def parts_of(s: Scenario) -> list[Part]:
    """Return what each rank of a pipeline saves: an even part, or the whole of what it holds.

    Saved is what parameters are updated from, each one once: the fp32 master copy, or the weight
    where there is none, and the optimizer's states; of what is not trained the weight alone.
    """
    save, found, every = s.checkpoint, layout(s), [_state(s, stage) for stage in stages(s)]
    assert save is not None  # callers ask where there is one
    storage, mesh = s.cluster.storage[save.storage], Mesh.of(s.plan)
    there = replace(storage, bandwidth=storage.write_bandwidth or storage.bandwidth, iops=None)
    writers = devices_of(s, mesh.tiles if save.sharded else mesh.tp)
    sizes = [sum(every[stage] for stage in held) / found.copies for held in found.stages]
    return [Part(size, shared_seconds(s, there, size, writers)) for size in sizes]


def shared_seconds(
    s: Scenario, storage: Storage, size: float, users: npt.NDArray[np.int64]
) -> float:
    """Return the seconds of one long read of a size, of as many as there are devices that use
    storage at once, at its even share of that and of the network.
    """
    nics = [node.nic for node in s.cluster.kinds]
    adapters = min(nic.count * nic.bandwidth * nic.efficiency for nic in nics)
    adapter = min(nic.bandwidth * nic.efficiency for nic in nics)
    on_node = int(np.bincount(users // s.cluster.ranks_per_node).max())
    what = Reading(size, 1, on_node, len(users), random=False)
    return storage.transfer_seconds(what, adapters, adapter)


def _state(s: Scenario, stage: Any) -> float:
    """Return the bytes of state of a stage that one rank saves."""
    save, trained, rule = s.checkpoint, stage_tensors(s, stage), OPTIMIZERS[s.run.optimizer]
    assert save is not None
    each = (s.precision.master or s.precision.weight) + rule.state_bytes
    still = s.precision.weight * (stage_params(s, stage) - trained.params)
    dense = each * (trained.params - trained.experts) - saved_state_bytes(s.run.optimizer, trained)
    if not save.sharded:
        return float(dense + still + each * trained.experts)
    return float((dense + still) / s.plan.replicas + each * trained.experts / max(s.plan.edp, 1))


def devices_of(s: Scenario, tiles: int) -> npt.NDArray[np.int64]:
    """Return the devices of all ranks of the first so many pipelines."""
    mesh = Mesh.of(s.plan)
    ranks = mesh.ranks_of_tiles(np.arange(tiles)[None, :], np.arange(mesh.pp)[:, None]).ravel()
    placed = s.plan.placement
    if isinstance(placed, str):
        found: npt.NDArray[np.int64] = np.asarray(PLACEMENTS[placed](ranks, s.cluster), np.int64)
        return found
    return np.array(placed, np.int64)[ranks]


def steps_of(s: Scenario) -> list[int]:
    """Return the steps before which a checkpoint is taken."""
    save, count = s.checkpoint, s.run.num_steps
    assert save is not None
    if save.every is not None:
        return list(range(save.every, count, save.every))
    return [count - 1 if save.before_step is None else save.before_step]


def save_state(
    t: Template, s: Scenario, costs: tuple[Cost, ...]
) -> tuple[Template, tuple[Cost, ...]]:
    """Return the ops of a run with checkpoints between its steps, and the costs of all.

    A rank's snapshot waits for its update and until the checkpoint before is complete, its write
    for the snapshot, and the barrier for all writes; it computes the next step after the snapshot,
    or when the checkpoint is complete unless that is asynchronous.
    """
    save = s.checkpoint
    if save is None:
        return t, costs
    meets = save.barrier and s.plan.world_size > 1
    parts = ("snapshot", "write", "barrier")[: 2 + meets]
    steps, ranks, each = steps_of(s), t.num_ranks, len(parts)
    works = np.flatnonzero(t.stream == COMPUTE)
    own = [works[t.rank[works] == rank] for rank in range(ranks)]
    updates, begins = (
        np.array([[mine[np.searchsorted(t.step[mine], at) - before] for mine in own]
                  for at in steps])
        for before in (1, 0)
    )  # fmt: skip
    rows = (len(t) + np.arange(len(steps) * ranks * each)).reshape(len(steps), ranks, each)
    done = rows[:, :, -1]
    waits = [(rows[:, :, 0], updates), (rows[1:, :, 0], done[:-1]), (begins, rows[:, :, 0])]
    waits += [(rows[:, :, k], rows[:, :, k - 1]) for k in range(1, each)]
    if not save.asynchronous:
        waits.append((begins, done))
    path = _costs(s)
    flow = isinstance(path[1], Flow)  # of writes
    cost = np.full(rows.shape, len(costs) + len(path))
    cost[:, :, :2] = len(costs) + np.arange(2 * ranks).reshape(ranks, 2)
    joint = np.full(rows.shape, NONE)
    scopes: list[int] = []
    ends: list[tuple[int, int]] = []
    for turn in range(len(steps)):
        if flow:
            joint[turn, :, 1] = len(t.joint_scope) + len(scopes) + np.arange(ranks)
            scopes += [STORAGE if save.sharded else SCOPES.index("dp")] * ranks
            ends += [(rank, rank) for rank in range(ranks)]
        if meets:
            joint[turn, :, 2] = len(t.joint_scope) + len(scopes)
            scopes.append(SCOPES.index("world"))
            ends.append((0, ranks - 1))
    whole = added(
        t, STREAMS, rows=rows.size, waits=waits,
        rank=np.broadcast_to(np.arange(ranks)[:, None], rows.shape).ravel(),
        stream=len(t.streams) + np.tile([0, 1, 1][:each], len(steps) * ranks),
        step=np.repeat(steps, ranks * each), cost=cost.ravel(), joint=joint.ravel(),
        listed=t.listed[np.repeat(begins.ravel(), each)],
    )  # fmt: skip
    whole = joined(whole, scopes, ends)
    return whole, (*costs, *path, *[Flow("all_reduce", float(FP32))] * meets)


def joined(t: Template, scopes: list[int], ends: list[tuple[int, int]]) -> Template:
    """Return the same with joint ops more, of these scopes and pairs of pipeline ranks."""
    return replace(
        t,
        joint_scope=np.append(t.joint_scope, np.array(scopes, np.int8)),
        joint_ranks=np.concatenate([t.joint_ranks, np.array(ends, np.int32).reshape(-1, 2)]),
    )


def added(
    t: Template,
    streams: tuple[str, ...],
    *,
    rows: int,
    waits: list[tuple[Any, Any]],
    **columns: Any,
) -> Template:
    """Return the same with some rows more, on streams more, of no stage, layer or microbatch.

    `waits` are pairs of arrays: rows, and what each of them waits for.
    """
    none = np.full(rows, NONE, np.int32)
    columns = {
        "action": np.full(rows, ACTION_CODE["OPT"]), "stage": none, "microbatch": none,
        "layer": none, "joint": none, "pred": none, **columns,
    }  # fmt: skip
    longer: dict[str, Any] = {}
    for name, new in columns.items():
        old = getattr(t, name)
        longer[name] = np.concatenate([old, np.asarray(new).astype(old.dtype)])
    pairs = [np.stack([np.ravel(x) for x in pair], axis=1).astype(np.int32) for pair in waits]
    return replace(
        t, **longer, streams=(*t.streams, *streams), more=np.concatenate([t.more, *pairs])
    )


def _costs(s: Scenario) -> list[Cost]:
    """Return the costs of the snapshot and the write of each rank of a pipeline, in turn.

    Where flows share links a write is one of them; so is one for which other ranks wait.
    """
    save, out = s.checkpoint, list[Cost]()
    assert save is not None
    for part in parts_of(s):
        out.append(Work("snapshot", (Kernel("snapshot", 0.0, part.bytes, "copy"),)))
        if s.run.network == "fluid":
            out.append(Flow("write", part.bytes, storage=save.storage))
        elif save.sharded:
            out.append(Work("write", seconds=part.write))
        else:
            out.append(Flow("write", part.bytes, seconds=part.write, storage=save.storage))
    return out
