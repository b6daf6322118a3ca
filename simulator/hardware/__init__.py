"""From a Program and a cluster to ticks: the price of every op."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from simulator.describe.cluster import Cluster
from simulator.errors import DescriptionError, ProgramError
from simulator.hardware.compute import work_seconds
from simulator.hardware.network import GroupShape, flow_seconds, group_shapes, shapes_by_tile
from simulator.program import NONE, Flow, Int64, Program, Work
from simulator.units import TICKS_PER_SECOND

__all__ = ["price"]


def price(
    program: Program, cluster: Cluster | None = None, placement: Int64 | None = None
) -> Int64:
    """Return the ticks that every op takes once it has started.

    By op id for a program without tiling, else (rows, tiles), or (rows, 1) where all tiles take
    the same. Each cost is priced once, a flow once for each shape of group, work once for each kind
    of node; ops look it up.
    Without a cluster every cost must state its seconds. `placement` is the device of each rank
    (`placement.devices`); rank r is on device r when absent.

    Raises:
        DescriptionError: when the run may last longer than the clock of ticks can tell.
        ProgramError: when a cost has no stated seconds and there is no cluster.
    """
    shapes: list[GroupShape] = []
    shape_of_group = np.zeros(len(program.groups), np.int64)
    if cluster is not None:
        shapes, shape_of_group = group_shapes(program.groups, cluster, placement)
    flows = np.flatnonzero(program.joint != NONE)
    by_kind, kind = shapes_by_tile(program, shape_of_group)
    by_flow = by_kind[kind[program.joint[flows]]]
    seconds = _seconds(program, cluster, shapes, flows, by_flow)
    # No path passes a row twice, so the sum over rows bounds every time of the run.
    bound = float(seconds.max(axis=1)[program.cost].sum())
    if not bound * TICKS_PER_SECOND < 2**62:
        raise DescriptionError(
            f"the run may last {bound:.3g} s, more than the clock of whole picoseconds holds "
            f"({2**62 / TICKS_PER_SECOND:.3g} s); simulate less of it, or with shorter times"
        )
    table = np.rint(seconds * TICKS_PER_SECOND).astype(np.int64)
    if cluster is not None and cluster.is_mixed:
        ticks = table[program.cost[:, None], _kinds_of_rows(program, cluster, placement)]
    else:
        ticks = table[program.cost, 0][:, None]
    if by_flow.shape[1] > ticks.shape[1]:
        ticks = np.repeat(ticks, program.num_tiles, axis=1)
    ticks[flows] = table[program.cost[flows][:, None], by_flow]
    priced: Int64 = ticks if program.tiling is not None else ticks[:, 0]
    return priced


def _kinds_of_rows(program: Program, cluster: Cluster, placement: Int64 | None) -> Int64:
    """Return the kind of node that each row runs on, (rows, tiles), or (rows, 1) if tiles agree."""
    device = np.arange(program.num_ranks) if placement is None else placement
    kinds = np.array(cluster.kind_of_node, np.int64)[device // cluster.ranks_per_node]
    by_rank = kinds[program.tile_ranks]
    if (by_rank == by_rank[:, :1]).all():
        by_rank = by_rank[:, :1]
    return by_rank[program.rank]


def _seconds(
    program: Program,
    cluster: Cluster | None,
    shapes: list[GroupShape],
    flows: Int64,
    by_flow: Int64,
) -> npt.NDArray[np.float64]:
    """Return (costs, shapes or kinds) seconds: those of flows for the shapes that they occur with,
    those of work for each kind of node, all of them where there is one.
    """
    kinds = () if cluster is None else cluster.kinds
    width = max(1, len(shapes), len(kinds))
    seconds = np.zeros((len(program.costs), width))
    for number, cost in enumerate(program.costs):
        if cost.seconds is not None:
            seconds[number] = cost.seconds
        elif cluster is None:
            raise ProgramError(f"cost {number} ({cost.name}) states no seconds; give a cluster")
        elif isinstance(cost, Work):
            for kind, node in enumerate(kinds):
                by_bound = work_seconds(cost, node, cluster.ranks_per_node)
                seconds[number, kind:] = sum(by_bound.values())
    if cluster is not None:
        pairs = np.unique(program.cost[flows][:, None] * np.int64(width) + by_flow)
        for number, shape in zip(*(part.tolist() for part in np.divmod(pairs, width)), strict=True):
            flow = program.costs[number]
            assert isinstance(flow, Flow)  # a joint row is a flow: `check`
            seconds[number, shape] = flow_seconds(flow, shapes[shape], cluster)
    return seconds
