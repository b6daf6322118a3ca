"""What lies on the host: optimizer states and kept activations, and the copies to and from there.

The optimizer (ZeRO-Offload: Ren et al., 2021, arXiv 2101.06840): when a rank's gradients are
summed, those that it updates are copied to the host, updated there, and the weights copied back
before the next forward, one after the other. Activations: what a layer keeps is copied away behind
its forward and back ahead of its backward, each way on a stream of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from simulator.describe.scenario import Scenario
from simulator.lower.segments import (
    AHEAD,
    BRANCH,
    COMPUTE,
    FETCH,
    HOST,
    OFFLOAD,
    Segment,
)
from simulator.lower.sharding import before, following, held_bytes, own_share, pair, regathered
from simulator.lower.tensors import Tensors
from simulator.program import ACTION_CODE, NONE, Int32, Int64, Kernel, Memory, Work

if TYPE_CHECKING:
    from simulator.lower.pipeline import Template


def updated(
    s: Scenario, update: Work, trained: Tensors, after: tuple[Kernel, ...]
) -> list[Segment]:
    """Return the segments of an optimizer step on the host; the stages of a rank take turns.

    Args:
        s: the scenario.
        update: the step's kernels on a device; the host moves the same bytes, in its own memory.
        trained: what the rank trains, before it is divided over shards.
        after: kernels that read the new weights on the device.
    """
    count = own_share(s, (trained,))
    moved = sum(kernel.count * kernel.bytes for kernel in update.kernels)
    on_host = Kernel("update on host", 0.0, moved, "host")
    return [
        Segment(Work("gradients ready", seconds=0.0), COMPUTE),
        Segment(_copy("gradients to host", float(held_bytes(s).gradient * count)), OFFLOAD),
        Segment(Work("update on host", (on_host,)), HOST),
        Segment(_copy("weights to device", float(s.precision.weight * count)), FETCH),
        *regathered(s, trained),
        Segment(Work("weights ready", after), COMPUTE),
    ]


def _copy(name: str, size: float, alloc: float = 0.0, free: float = 0.0) -> Work:
    kernel = Kernel(name, 0.0, size, "copy")
    return Work(name, (kernel,), None, Memory(activations=alloc), Memory(activations=free))


def activations(
    forward: list[Segment], backward: list[Segment]
) -> tuple[list[Segment], list[Segment]]:
    """Return the passes of a layer whose kept activations lie on the host in between."""
    works = [x.cost for x in forward if isinstance(x.cost, Work)]
    kept = sum(work.alloc.activations - work.free.activations for work in works)
    if not kept:
        return forward, backward
    away = Segment(_copy("activations to host", kept, free=kept), OFFLOAD, place=BRANCH)
    back = Segment(_copy("activations to device", kept, alloc=kept), FETCH, place=AHEAD)
    return [*forward, away], [back, *backward]


LEAST_AHEAD = 2
"""Layers that are there at least while copies run: one that computes and one that is copied."""


def waits(t: Template, s: Scenario) -> Int32:
    """Return (pairs, 2): an op of a pipeline replica, and what it waits for because of copies.

    With d layers of a stage that copy nothing, 2 at least:

    - What follows the (d - 1)th forward pass through a layer after the one that a copy away
      belongs to waits for that copy, so that d layers are there at most.
    - A copy back waits for its copy away, and until the dth pass before its own in backward has
      been computed, or what comes before the action; a layer's first work waits for it.
    """
    order = np.argsort(t.rank, kind="stable")
    columns = (t.rank, t.step, t.action, t.stage, t.microbatch, t.layer)
    rank, step, action, stage, microbatch, layer = (x[order] for x in columns)
    stream = t.stream[order]
    works = np.flatnonzero(stream == COMPUTE)
    passing = layer != NONE  # an update belongs to no layer
    away = np.flatnonzero((stream == OFFLOAD) & passing)
    back = np.flatnonzero((stream == FETCH) & passing)
    if not len(back):
        return np.zeros((0, 2), np.int32)
    whole = np.stack([rank, step, action, stage, microbatch])
    starts = np.flatnonzero(np.append(True, (whole[:, 1:] != whole[:, :-1]).any(axis=0)))
    ahead = _layers_ahead(s)[stage]
    forward, backward = (
        _ends(works[passing[works] & (action[works] == ACTION_CODE[kind])], (*whole, layer))
        for kind in "FB"
    )
    until = np.searchsorted(forward, away) - 1 + ahead[away] - 1  # passes, by number
    since = np.searchsorted(backward, back) - ahead[back]
    found = np.concatenate([
        pair(following(works, _at(forward, until, len(stream)) + 1), away),
        pair(back, np.maximum(before(works, before(starts, back)), _at(backward, since, NONE))),
        pair(following(works, back), back),
        _matched(back, away, (layer, microbatch, stage, step, rank)),
    ])  # fmt: skip
    found = found[(found != NONE).all(axis=1)]
    found = found[rank[found[:, 0]] == rank[found[:, 1]]]
    rows: Int32 = order[found].astype(np.int32)
    return rows


def _layers_ahead(s: Scenario) -> Int64:
    """Return how many layers of each stage are there at most while others are on the host."""
    layers = np.array(s.layers_per_stage, np.int64)
    if s.plan.offload_layers is None:
        return np.full_like(layers, LEAST_AHEAD)
    return np.maximum(layers - s.plan.offload_layers, LEAST_AHEAD)


def _ends(works: Int64, keys: Sequence[npt.NDArray[np.integer[Any]]]) -> Int64:
    """Return the last work of each pass through a layer, in order."""
    mine = np.stack([key[works] for key in keys])
    last: Int64 = works[np.append((mine[:, 1:] != mine[:, :-1]).any(axis=0), True)]
    return last


def _at(ends: Int64, numbers: Int64, otherwise: int) -> Int64:
    """Return the ends of passes by number, or something else where there is no such pass."""
    is_there = (numbers >= 0) & (numbers < len(ends))
    found: Int64 = np.append(ends, otherwise)[np.where(is_there, numbers, len(ends))]
    return found


def _matched(back: Int64, away: Int64, keys: Sequence[npt.NDArray[np.integer[Any]]]) -> Int64:
    """Return each copy back with the copy away of the same layer and microbatch."""
    last, first = (rows[np.lexsort([key[rows] for key in keys])] for rows in (back, away))
    return pair(last, first)
