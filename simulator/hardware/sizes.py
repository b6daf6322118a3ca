"""Samples of differing sizes: what each batch of each loader takes, drawn before anything runs.

`default_rng([seed, replica, k])` draws the samples of the loaders of a replica, of its k-th rank
that loads, batch after batch; ranks of tp and cp load the same. A batch has the bytes of its
samples: its read takes as long as these do at the rate of storage, or as its number of reads does,
and its transform in proportion to them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from simulator.describe.data import Data
from simulator.describe.scenario import Scenario
from simulator.describe.storage import Storage
from simulator.hardware.storage import rate, weight
from simulator.hardware.wiring import Floats
from simulator.lower.data import Batch, batch_of, transfer_of
from simulator.program import STORED, Flow, Int64, Program
from simulator.traffic import Traffic
from simulator.units import TICKS_PER_SECOND


def differ(data: Data | None) -> bool:
    """Return whether samples have sizes of their own."""
    return data is not None and bool(data.sizes or data.size_cv)


class Batches(NamedTuple):
    """Rows of a program for each batch of the loaders of a tile, and sizes of the batches."""

    rows: dict[str, Int64]
    """By what happens to a batch, those of every loader one after the other."""
    factor: Floats
    """(batches, tiles): bytes over the mean of a batch."""


def of_sizes(
    program: Program, ticks: Int64, traffic: Traffic | None, s: Scenario
) -> tuple[Int64, Traffic | None]:
    """Return (rows, tiles) ticks and traffic of a run whose samples differ in size."""
    assert s.data is not None  # callers ask where there are some
    batches = drawn(program, s)
    storage, batch = s.cluster.storage[s.data.storage], batch_of(s)
    read, request = _seconds(storage, batch, batches.factor, s)
    wide = np.repeat(ticks.reshape(len(program.rank), -1), 1, axis=1)
    if wide.shape[1] != program.num_tiles:
        wide = np.repeat(wide, program.num_tiles, axis=1)
    times = {"request": request, "transform": batch.transform * batches.factor}
    if traffic is None:
        times["read"] = read
    for name, seconds in times.items():
        if name in batches.rows:
            wide[batches.rows[name]] = np.rint(seconds * TICKS_PER_SECOND).astype(np.int64)
    if traffic is not None and "read" in batches.rows:
        traffic = _with_sizes(program, traffic, batches, s)
    return wide, traffic


def drawn(program: Program, s: Scenario) -> Batches:
    """Return the batches of a program's loaders and the sizes that they draw."""
    data, tiles = s.data, program.num_tiles
    assert data is not None
    names = np.array([_stage(cost) for cost in program.costs])[program.cost]
    lanes = [n for n, name in enumerate(program.streams)
             if name.split(" ")[0] in ("worker", "storage")]  # fmt: skip
    loading = np.isin(program.stream, lanes)
    rows = {name: np.flatnonzero(loading & (names == name))
            for name in ("request", "read", "transform")}  # fmt: skip
    rows = {name: found for name, found in rows.items() if len(found)}
    rank = program.rank[rows["transform"]]
    factor = np.empty((len(rank), tiles))
    shared = s.plan.cp * s.plan.tp  # tiles count along dp, cp and tp
    for k, loader in enumerate(np.unique(rank).tolist()):
        mine = np.flatnonzero(rank == loader)
        for replica in range(tiles // shared):
            rng = np.random.default_rng([data.seed, replica, k])
            sizes = _samples(data, rng, len(mine) * s.plan.microbatch_size)
            mean = sizes.reshape(len(mine), -1).mean(axis=1)
            factor[mine, replica * shared : (replica + 1) * shared] = mean[:, None]
    return Batches(rows, factor)


def _stage(cost: object) -> str:
    """Return what happens to a batch by a cost's name: reads have several."""
    name = str(getattr(cost, "name", ""))
    return "read" if name in STORED else name


def _samples(data: Data, rng: np.random.Generator, count: int) -> Floats:
    """Return the sizes of samples over their mean."""
    if data.sizes:
        table: Floats = np.array(data.sizes) / np.mean(data.sizes)
        return table[rng.integers(len(table), size=count)]
    variance = math.log1p(data.size_cv**2)
    numbers: Floats = np.exp(math.sqrt(variance) * rng.standard_normal(count) - variance / 2)
    return numbers


def _seconds(storage: Storage, batch: Batch, factor: Floats, s: Scenario) -> tuple[Floats, Floats]:
    """Return the seconds of the read and of the request of batches of some sizes.

    A read is bound by its bytes, or by its number of reads, which stays what it is.
    """
    what = batch.what
    by_bytes = transfer_of(s, what._replace(reads=0))
    by_reads = transfer_of(s, what._replace(bytes=0.0))
    read = np.maximum(by_bytes * factor, by_reads)
    limit = storage.request_bandwidth
    longer = np.maximum(0.0, what.bytes * factor / limit - read) if limit else 0.0
    return read, np.broadcast_to(what.reads * storage.latency + longer, factor.shape)


def _with_sizes(program: Program, traffic: Traffic, batches: Batches, s: Scenario) -> Traffic:
    """Return traffic in which each read is a demand of its own, of the bytes of its batch."""
    rows, count = batches.rows["read"], len(traffic.size)
    joint, (reads, tiles) = program.joint[rows], batches.factor.shape
    base = traffic.demand[joint][:, :tiles].ravel()  # a joint op of storage is alone on its tile
    factor, cluster = batches.factor.ravel(), s.cluster
    first, length = traffic.offset[base], np.diff(traffic.offset)[base]
    at = np.concatenate([np.arange(a, a + n) for a, n in zip(first, length, strict=True)])
    coefficient = traffic.coefficient[at]
    flow = program.costs[int(program.cost[rows[0]])]
    assert isinstance(flow, Flow)
    storage = cluster.storage[flow.storage]
    own = [replace(flow, bytes=flow.bytes * x) for x in factor.tolist()]
    begins = np.concatenate([[0], np.cumsum(length)])[:-1]
    coefficient[begins] = [weight(one, storage) for one in own]  # storage is the first link of each
    demand = traffic.demand.copy()
    none = None if traffic.arriving is None else np.zeros(reads * tiles)
    demand[joint, :tiles] = count + np.arange(reads * tiles).reshape(reads, tiles)
    links = traffic.links[: traffic.offset[-1]]
    return replace(
        traffic,
        offset=np.concatenate([traffic.offset, traffic.offset[-1] + np.cumsum(length)]),
        links=np.concatenate([links, traffic.links[at]]),
        coefficient=np.concatenate([traffic.coefficient[: traffic.offset[-1]], coefficient]),
        size=np.concatenate([traffic.size, traffic.size[base] * factor]),
        limit=np.concatenate([traffic.limit, [rate(one, cluster) for one in own]]),
        demand=demand,
        arriving=None if none is None else np.concatenate([traffic.arriving, none]),
    )
