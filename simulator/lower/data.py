"""The data path: batches are requested, read, transformed, pinned and copied ahead of forwards.

A batch of a loader is a microbatch. Each rank that holds the first stage loads its own, on streams
beside its others: `worker w` has batches w, w + workers, ... one after the other, as torch's
DataLoader deals them out; `storage` has the rank's reads, first come first served; `pin` copies
what is ready to pinned memory, in order; `copy` brings it to the device. A batch is requested when
the one that many before it has left the loader, workers x prefetch_factor of them, and copied
when the forward before the one before its own has ended: into the second of two buffers.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from simulator.describe.data import cached_share, sample_of
from simulator.describe.placement import PLACEMENTS
from simulator.describe.scenario import Scenario
from simulator.describe.storage import Reading
from simulator.lower.bodies import SCOPES
from simulator.lower.mesh import Mesh
from simulator.lower.pipeline import Template
from simulator.lower.places import layout
from simulator.lower.segments import COMPUTE
from simulator.program import ACTION_CODE, NONE, Cost, Flow, Int32, Int64, Kernel, Work

PAGEABLE = 0.4
"""Rate of copies from pageable over that from pinned memory: 2.3 of 5.7 GB/s on one machine, 5.4 of
12 on another (Harris, How to Optimize Data Transfers in CUDA C/C++, NVIDIA, 2012)."""

BUFFERS = 2
"""Batches of a rank on its device at once: the one in use and the next."""

STAGES = ("request", "read", "transform", "pin", "copy")
"""What happens to a batch, in order."""

READ = STAGES.index("read")
STORAGE = SCOPES.index("storage")


class Loaders(NamedTuple):
    """How many ranks load at once."""

    in_all: int
    on_node: int
    """Of the node that has most."""


def loaders(s: Scenario) -> Loaders:
    """Return how many ranks load: those that hold the first stage."""
    first = [rank for rank, stages in enumerate(layout(s).stages) if 0 in stages]
    mesh = Mesh.of(s.plan)
    ranks = mesh.ranks_of_tiles(np.arange(mesh.tiles)[None, :], np.array(first)[:, None]).ravel()
    placed = s.plan.placement
    device = (
        PLACEMENTS[placed](ranks, s.cluster)
        if isinstance(placed, str)
        else np.array(placed, np.int64)[ranks]
    )
    return Loaders(len(ranks), int(np.bincount(device // s.cluster.ranks_per_node).max()))


class Batch(NamedTuple):
    """Seconds and bytes of one batch of a loader."""

    request: float
    """What a worker waits for storage beside the read itself."""
    read: float
    """At the rank's share of storage and network."""
    transform: float
    """Of one worker, slower where workers are more than cores."""
    bytes: float
    """To the device."""
    what: Reading
    """What is read."""

    @property
    def cycle(self) -> float:
        """Seconds that a batch keeps a worker busy when no other is in its way."""
        return self.request + self.read + self.transform


def batch_of(s: Scenario) -> Batch:
    """Return what one batch of a loader of a scenario with a data path takes."""
    data, sample, count = s.data, sample_of(s), s.plan.microbatch_size
    assert data is not None
    storage, ranks = s.cluster.storage[data.storage], loaders(s)
    missed = count * (1 - cached_share(s))
    reads = math.ceil(missed) if data.shuffle else int(missed > 0)
    what = Reading(missed * sample.bytes, reads, ranks.on_node, ranks.in_all, data.shuffle)
    read = transfer_of(s, what)
    return Batch(
        storage.request_seconds(what, read), read, count * sample.seconds * core_share(s),
        count * sample.device_bytes, what,
    )  # fmt: skip


def transfer_of(s: Scenario, what: Reading) -> float:
    """Return the seconds of a read of a scenario's loader at its even share, its latency apart."""
    assert s.data is not None
    nics = [node.nic for node in s.cluster.kinds]
    return s.cluster.storage[s.data.storage].transfer_seconds(
        what, min(nic.count * nic.bandwidth * nic.efficiency for nic in nics),
        min(nic.bandwidth * nic.efficiency for nic in nics),
    )  # fmt: skip


def core_share(s: Scenario) -> float:
    """Return how many workers of a node share each of its cores, at least 1."""
    assert s.data is not None
    workers = loaders(s).on_node * s.data.workers
    counts = [node.host.cores for node in s.cluster.kinds if node.host and node.host.cores]
    return max(1.0, workers / min(counts, default=workers))


def costs_of(s: Scenario) -> tuple[Cost, ...]:
    """Return the cost of each of `STAGES` of a batch.

    Where flows share links, a read is one of them.
    """
    batch, data = batch_of(s), s.data
    assert data is not None
    request, read = Work("request", seconds=batch.request), Work("read", seconds=batch.read)
    what = batch.what
    if s.run.network == "fluid" and what.bytes:
        name, count = "scattered_read" if what.random else "read", int(what.reads)
        flow = Flow(name, what.bytes / count, count=count, storage=data.storage)
        return (request, flow, *_after_reading(batch, data.pinned))
    return (request, read, *_after_reading(batch, data.pinned))


def _after_reading(batch: Batch, pinned: bool) -> tuple[Work, ...]:
    moved = batch.bytes if pinned else batch.bytes / PAGEABLE
    staged = (Kernel("pin", 0.0, 2 * batch.bytes, "host"),) if pinned else ()
    return (
        Work("transform", seconds=batch.transform),
        Work("pin", staged),
        Work("copy", (Kernel("copy", 0.0, moved, "copy"),)),
    )


def load(t: Template, s: Scenario, costs: tuple[Cost, ...]) -> tuple[Template, tuple[Cost, ...]]:
    """Return the ops of a run whose forwards wait for their batches, and the costs of all.

    Workers begin one after the other, evenly over the time of one batch: so batches come evenly
    from the first step on, as from workers whose batches are not all alike. They go on to load what
    steps after the last one would need, as far as the loader works ahead.
    """
    data = s.data
    if data is None:
        return t, costs
    ahead = data.workers * data.prefetch_factor if data.overlap else 0
    b = _batches(t, ahead + BUFFERS if ahead else 0)
    alone = _computed_before(t, b.first)
    beside = data.overlap and data.pinned
    late = np.flatnonzero((b.turn > 0) & (b.turn < data.workers))
    keep = np.ones((len(b.turn), len(STAGES)), bool)
    keep[:, STAGES.index("copy")] = b.beyond < BUFFERS
    number = len(t) + len(late) + np.cumsum(keep).reshape(keep.shape) - 1
    number[~keep] = NONE
    at = dict(zip(STAGES, number.T, strict=True))
    waits = [
        (at["request"], _ago(b, at["copy"], ahead) if data.overlap else alone),
        *((at[then], at[this]) for this, then in pairwise(STAGES)),
        (at["copy"], _ago(b, b.last, BUFFERS) if beside else alone),
        (b.first, at["copy"]),
    ]
    names = (*(f"worker {w}" for w in range(data.workers)), "storage", "pin", "copy")
    lane = {name: len(t.streams) + i for i, name in enumerate(names)}
    worker = len(t.streams) + b.turn % data.workers
    path = costs_of(s)
    flows = isinstance(path[READ], Flow)  # which share by themselves what they meet on
    streams = np.stack([
        worker, np.full_like(worker, lane["storage"]), worker,
        np.full_like(worker, lane["pin"]), np.full_like(worker, lane["copy"]),
    ], axis=1)  # fmt: skip
    batch, stage = np.nonzero(keep)
    of = np.concatenate([b.like[late], b.like[batch]])
    none = np.full(len(of), NONE, np.int32)
    joint = none.copy()
    if flows:
        joint[len(late) :][stage == READ] = len(t.joint_scope) + np.arange(len(b.turn))
    columns: dict[str, Any] = {
        name: getattr(t, name)[of]
        for name in ("rank", "action", "stage", "microbatch", "step", "listed")
    }
    cost = np.concatenate([b.turn[late] - 1, data.workers - 1 + stage])
    columns |= {
        "stream": np.concatenate([worker[late], streams[keep]]).astype(np.int16),
        "cost": (len(costs) + cost).astype(np.int32), "layer": none, "joint": joint, "pred": none,
    }  # fmt: skip
    longer: dict[str, Any] = {
        name: np.concatenate([getattr(t, name), new]) for name, new in columns.items()
    }
    more = np.concatenate([t.more, *(_pairs(*pair) for pair in waits)])
    part = batch_of(s).cycle / data.workers
    begins = (Work("start", seconds=part * w) for w in range(1, data.workers))
    whole = replace(t, **longer, streams=(*t.streams, *names), more=more)
    if flows:
        whole = meeting_storage(whole, t.rank[b.like])
    return whole, (*costs, *begins, *path)


def meeting_storage(t: Template, ranks: Int32) -> Template:
    """Return the same with a joint op more of each of some ranks, alone with storage."""
    return replace(
        t,
        joint_scope=np.append(t.joint_scope, np.full(len(ranks), STORAGE, np.int8)),
        joint_ranks=np.concatenate([t.joint_ranks, np.stack([ranks, ranks], axis=1)]),
    )


class Batches(NamedTuple):
    """Batches of all loaders, an entry each, one loader after the other."""

    turn: Int64
    """Which batch of its loader, from 0."""
    beyond: Int64
    """How far it is beyond the last one of the run; below 0 before."""
    first: Int64
    """First work of its forward, or NONE beyond the run."""
    last: Int64
    """Last work of it, likewise."""
    like: Int64
    """A row whose labels it has: of its forward, or of the same one a step earlier."""


def _batches(t: Template, ahead: int) -> Batches:
    """Return the batches of every forward of the first stage, and `ahead` more of each rank."""
    rows = np.flatnonzero((t.stream == COMPUTE) & (t.action == ACTION_CODE["F"]) & (t.stage == 0))
    keys = np.stack([t.rank[rows], t.step[rows], t.listed[rows]])
    order = np.lexsort(keys[::-1])  # stable: rows of a forward stay in order
    keys, rows = keys[:, order], rows[order]
    begins = np.flatnonzero(np.append(True, (np.diff(keys) != 0).any(axis=0)))
    first, last = rows[begins], rows[np.append(begins[1:], len(rows)) - 1]
    parts, rank = [], keys[0, begins]
    for of in np.unique(rank).tolist():
        mine = np.flatnonzero(rank == of)
        count = len(mine)
        turn = np.arange(count + ahead)
        inside = turn < count
        of_step = max(1, int((keys[1, begins[mine]] == keys[1, begins[mine[-1]]]).sum()))
        again = mine[np.where(inside, turn, count - of_step + (turn - count) % of_step)]
        none = np.where(inside, first[again], NONE), np.where(inside, last[again], NONE)
        parts.append((turn, turn - count, *none, first[again]))
    return Batches(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _ago(b: Batches, rows: Int64, count: int) -> Int64:
    """Return the row of the batch `count` before each, or NONE."""
    found = np.full(len(rows), NONE, np.int64)
    has = np.flatnonzero(b.turn >= count)
    found[has] = rows[has - count]
    return found


def _computed_before(t: Template, rows: Int64) -> Int64:
    """Return the work just before each row on its rank, or NONE."""
    works = np.flatnonzero(t.stream == COMPUTE)
    works = works[np.argsort(t.rank[works], kind="stable")]
    previous = np.append(NONE, works[:-1])
    previous[np.append(True, np.diff(t.rank[works]) != 0)] = NONE
    of = np.full(len(t) + 1, NONE, np.int64)  # NONE is the last
    of[works] = previous
    return of[rows]


def _pairs(ops: Int64, waits: Int64) -> Any:
    """Return (pairs, 2) of ops that wait for something."""
    return np.stack([ops, waits], axis=1)[(ops != NONE) & (waits != NONE)].astype(np.int32)
