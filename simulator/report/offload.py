"""What lies in the memory of hosts, and what was assumed of the copies to and from there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from simulator.describe.plan import Plan
from simulator.describe.scenario import Scenario
from simulator.hardware.host import host_share
from simulator.lower.segments import FETCH, OFFLOAD
from simulator.program import NONE
from simulator.units import format_bytes

if TYPE_CHECKING:
    from simulator.report.result import Result


def offloads(plan: Plan) -> bool:
    """Return whether anything lies on hosts."""
    return plan.offload_optimizer or plan.offload_activations


def activations_on_host(result: Result, at: int) -> npt.NDArray[np.float64]:
    """Return the most bytes of activations on the host of a rank of the tile, by tile.

    They are there from the start of the copy away to the end of the copy back.
    """
    p, (start, end) = result.tiled, result.times.columns
    mine = (p.rank == at) & (p.layer != NONE)
    away, back = (np.flatnonzero(mine & (p.stream == stream)) for stream in (OFFLOAD, FETCH))
    alloc, free = (np.array([getattr(c, name).activations for c in p.costs])
                   for name in ("alloc", "free"))  # fmt: skip
    delta = np.concatenate([-alloc[p.cost[back]], free[p.cost[away]]])
    time = np.concatenate([end[back], start[away]])
    order = np.argsort(time, axis=0, kind="stable")  # what leaves, listed first, stays first
    most = np.cumsum(delta[order], axis=0).max(axis=0, initial=0.0)
    column = result.times.column_of_tile
    by_tile: npt.NDArray[np.float64] = most[0 if column is None else column]
    return by_tile


def offload_assumptions(s: Scenario) -> list[str]:
    """Return what was assumed of copies to and from the host, and of updates there."""
    if not offloads(s.plan):
        return []
    share = host_share(s.cluster.node, s.cluster.ranks_per_node)
    out = [
        "copies to and from the host run from pinned memory at "
        f"{format_bytes(share.copy)}/s for each device and direction, as if all devices "
        "of the node that are in use copied at once, beside all other traffic and each other"
    ]
    if s.plan.offload_optimizer:
        out.append(
            "the optimizer runs on the host, held back by its memory alone "
            f"({format_bytes(share.update)}/s for each rank); gradients go there when all are "
            "summed (and clipped), the update begins when they are there and weights come back "
            "when it has ended, a stage of a rank after the other, beside nothing; gradients keep "
            "their memory on the device"
        )
    if s.plan.offload_activations:
        count = s.plan.offload_layers
        out.append(
            "each layer keeps its activations on the host: a forward waits for the last copy away "
            "but one, a copy back begins when the backward of the layer after its own does; what "
            "embedding and head keep stays"
            if count is None
            else f"the first {count} layers of each stage keep their activations on the host: as "
            "many layers as a stage has besides (2 at least) have theirs on the device at once; "
            "what embedding and head keep stays"
        )
    return out
