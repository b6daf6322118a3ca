"""A checkpoint: every rank copies its part of the state to its host, which writes it to storage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.describe.optimizer import OPTIMIZERS
from simulator.describe.placement import PLACEMENTS
from simulator.describe.scenario import Scenario
from simulator.describe.storage import Reading
from simulator.lower.bodies import SCOPES
from simulator.lower.data import STORAGE
from simulator.lower.mesh import Mesh
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
    read: float
    """Seconds of reading it back, likewise."""


def parts_of(s: Scenario) -> list[Part]:
    """Return what each rank of a pipeline saves: an even part, or the whole of what it holds.

    Saved is what parameters are updated from, each one once: the fp32 master copy, or the weight
    where there is none, and the optimizer's states; of what is not trained the weight alone.
    """
    save, found, every = s.checkpoint, layout(s), [_state(s, stage) for stage in stages(s)]
    assert save is not None  # callers ask where there is one
    storage = s.cluster.storage[save.storage]
    writers = _writers(s)
    on_node = int(np.bincount(writers // s.cluster.ranks_per_node).max())
    nics = [node.nic for node in s.cluster.kinds]
    adapters = min(nic.count * nic.bandwidth * nic.efficiency for nic in nics)
    adapter = min(nic.bandwidth * nic.efficiency for nic in nics)
    out = []
    for held in found.stages:
        size = sum(every[stage] for stage in held) / found.copies
        what = Reading(size, 1, on_node, len(writers), random=False)
        read = storage.transfer_seconds(what, adapters, adapter)
        there = replace(storage, bandwidth=storage.write_bandwidth or storage.bandwidth, iops=None)
        out.append(Part(size, there.transfer_seconds(what, adapters, adapter), read))
    return out


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


def _writers(s: Scenario) -> npt.NDArray[np.int64]:
    """Return the devices of all ranks that write."""
    save, mesh = s.checkpoint, Mesh.of(s.plan)
    assert save is not None
    tiles = np.arange(mesh.tiles if save.sharded else mesh.tp)
    ranks = mesh.ranks_of_tiles(tiles[None, :], np.arange(mesh.pp)[:, None]).ravel()
    placed = s.plan.placement
    if isinstance(placed, str):
        found: npt.NDArray[np.int64] = np.asarray(PLACEMENTS[placed](ranks, s.cluster), np.int64)
        return found
    return np.array(placed, np.int64)[ranks]


def save_state(
    t: Template, s: Scenario, costs: tuple[Cost, ...]
) -> tuple[Template, tuple[Cost, ...]]:
    """Return the ops of a run with a checkpoint between two of its steps, and the costs of all.

    A rank's snapshot waits for its update, its write for the snapshot; it computes the next step
    after the snapshot, or after the write unless that is asynchronous.
    """
    save = s.checkpoint
    if save is None:
        return t, costs
    step = s.run.num_steps - 1 if save.before_step is None else save.before_step
    works = np.flatnonzero(t.stream == COMPUTE)
    before, after = (
        [works[(t.rank[works] == rank) & (t.step[works] == at)] for rank in range(t.num_ranks)]
        for at in (step - 1, step)
    )
    updates, begins = np.array([w[-1] for w in before]), np.array([w[0] for w in after])
    snapshots = len(t) + 2 * np.arange(t.num_ranks)
    writes = snapshots + 1
    waits = [(snapshots, updates), (writes, snapshots), (begins, snapshots)]
    if not save.asynchronous:
        waits.append((begins, writes))
    pairs = np.concatenate([np.stack(pair, axis=1) for pair in waits])
    path = _costs(s)
    flows, count = isinstance(path[1], Flow), 2 * t.num_ranks
    none = np.full(count, NONE, np.int32)
    joint = none.copy()
    if flows:
        joint[1::2] = len(t.joint_scope) + np.arange(t.num_ranks)
    ranks = np.repeat(np.arange(t.num_ranks, dtype=np.int32), 2)
    columns: dict[str, Any] = {
        "rank": ranks,
        "stream": (len(t.streams) + np.tile([0, 1], t.num_ranks)).astype(np.int16),
        "action": np.full(count, ACTION_CODE["OPT"], np.int8),
        "stage": none, "microbatch": none, "layer": none, "joint": joint, "pred": none,
        "step": np.full(count, step, np.int32),
        "cost": (len(costs) + np.arange(count)).astype(np.int32),
        "listed": t.listed[np.repeat(begins, 2)],
    }  # fmt: skip
    longer: dict[str, Any] = {
        name: np.concatenate([getattr(t, name), new]) for name, new in columns.items()
    }
    whole = replace(t, **longer, streams=(*t.streams, *STREAMS),
                    more=np.concatenate([t.more, pairs.astype(np.int32)]))  # fmt: skip
    if flows:
        scope = STORAGE if save.sharded else SCOPES.index("dp")
        own = ranks[::2]
        whole = replace(
            whole,
            joint_scope=np.append(whole.joint_scope, np.full(len(own), scope, np.int8)),
            joint_ranks=np.concatenate([whole.joint_ranks, np.stack([own, own], axis=1)]),
        )
    return whole, (*costs, *path)


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
