"""What a run begins with after a failure: each rank reads the state that it holds."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from simulator.describe.optimizer import OPTIMIZERS
from simulator.describe.scenario import Scenario
from simulator.lower.bodies import SCOPES
from simulator.lower.mesh import Mesh
from simulator.lower.optimizers import saved_state_bytes
from simulator.lower.pipeline import Template
from simulator.lower.places import layout
from simulator.lower.save import added, devices_of, joined, shared_seconds
from simulator.lower.trainable import stage_params, stage_tensors, stages
from simulator.program import Cost, Flow, Kernel, Work

STREAM = "restore"


class Held(NamedTuple):
    """State that a rank at one place of the pipeline holds."""

    bytes: float
    read: float
    """Seconds of reading it at its even share of storage and network, all ranks at once."""


def held_state(s: Scenario) -> list[Held]:
    """Return what each rank of a pipeline reads back.

    That is what parameters are updated from, as a checkpoint has it: a shard of it where a plan
    shards it, else all of the rank's stages, though replicas read the same.
    """
    save, found = s.checkpoint, layout(s)
    assert save is not None  # callers ask where there is one
    storage, readers = s.cluster.storage[save.storage], devices_of(s, Mesh.of(s.plan).tiles)
    every = [_state(s, stage) for stage in stages(s)]
    sizes = [sum(every[stage] for stage in held) for held in found.stages]
    return [Held(size, shared_seconds(s, storage, size, readers)) for size in sizes]


def _state(s: Scenario, stage: Any) -> float:
    """Return the bytes of state of a stage that one rank holds."""
    plan, trained, rule = s.plan, stage_tensors(s, stage), OPTIMIZERS[s.run.optimizer]
    each = (s.precision.master or s.precision.weight) + rule.state_bytes
    still = s.precision.weight * (stage_params(s, stage) - trained.params)
    dense = each * (trained.params - trained.experts) - saved_state_bytes(s.run.optimizer, trained)
    experts = each * trained.experts / (max(plan.edp, 1) if plan.zero else 1)
    return float(dense / plan.shards + experts + still / (plan.shards if plan.zero == 3 else 1))


def restore(t: Template, s: Scenario, costs: tuple[Cost, ...]) -> tuple[Template, tuple[Cost, ...]]:
    """Return the ops of a run that begins with reading the state back, and the costs of all.

    All that a rank begins with waits for that, on whatever stream: warm-up, work, gathers.
    """
    save = s.checkpoint
    if save is None or not save.restore:
        return t, costs
    path: list[Cost] = []
    flows = s.run.network == "fluid"
    for held in held_state(s):
        path.append(
            Flow("read", held.bytes, storage=save.storage)
            if flows
            else Work("restore", seconds=held.read)
        )
        path.append(load_work(held))
    ranks = t.num_ranks
    rows = (len(t) + np.arange(2 * ranks)).reshape(ranks, 2)
    waits = [(rows[:, 1], rows[:, 0])]
    lane = t.rank.astype(np.int64) * (len(t.streams) + 1) + t.stream
    _, first = np.unique(lane, return_index=True)  # of each stream of a rank
    waits.append((first, rows[t.rank[first], 1]))
    begins = first[np.unique(t.rank[first], return_index=True)[1]]
    whole = added(
        t, (STREAM,), rows=rows.size, waits=waits, rank=np.repeat(np.arange(ranks), 2),
        stream=np.full(rows.size, len(t.streams)), step=np.zeros(rows.size),
        cost=len(costs) + np.arange(rows.size), listed=t.listed[np.repeat(begins, 2)],
        **({"joint": _alone(t, ranks)} if flows else {}),
    )  # fmt: skip
    if flows:
        whole = joined(whole, [SCOPES.index("storage")] * ranks, [(r, r) for r in range(ranks)])
    return whole, (*costs, *path)


def load_work(held: Held) -> Work:
    """Return the copy of a state from a host to its device."""
    return Work("load", (Kernel("load", 0.0, held.bytes, "copy"),))


def _alone(t: Template, ranks: int) -> Any:
    """Return the joint op of each of the two rows of a rank: a new one, and none."""
    joint = np.full((ranks, 2), -1)
    joint[:, 0] = len(t.joint_scope) + np.arange(ranks)
    return joint.ravel()
