"""From a Program and a cluster to ticks: the price of every op."""

from __future__ import annotations

import numpy as np

from simulator.describe.cluster import Cluster
from simulator.errors import ProgramError
from simulator.hardware.compute import work_seconds
from simulator.hardware.network import GroupShape, flow_seconds, group_shapes
from simulator.program import NONE, Int64, Program, Work
from simulator.units import TICKS_PER_SECOND

__all__ = ["price"]


def price(program: Program, cluster: Cluster | None = None) -> Int64:
    """Return the ticks that every op takes once it has started.

    Each cost is priced once, a flow once for each shape of group; ops look their ticks up. Without
    a cluster every cost must state its seconds.

    Raises:
        ProgramError: when a cost has no stated seconds and there is no cluster.
    """
    seconds = np.zeros((len(program.costs), 1))
    shapes: list[GroupShape] = []
    shape_of_group = np.zeros(len(program.groups), np.int64)
    if cluster is not None:
        shapes, shape_of_group = group_shapes(program.groups, cluster)
        seconds = np.zeros((len(program.costs), max(1, len(shapes))))
    for number, cost in enumerate(program.costs):
        if cost.seconds is not None:
            seconds[number] = cost.seconds
        elif cluster is None:
            raise ProgramError(f"cost {number} ({cost.name}) states no seconds; give a cluster")
        elif isinstance(cost, Work):
            seconds[number] = sum(work_seconds(cost, cluster.node.device).values())
        elif shapes:
            seconds[number] = [flow_seconds(cost, shape, cluster) for shape in shapes]
    table = np.rint(seconds * TICKS_PER_SECOND).astype(np.int64)
    shape = np.zeros(len(program), np.int64)
    joint = program.joint != NONE
    shape[joint] = shape_of_group[program.joint_group[program.joint[joint]]]
    return table[program.cost, shape]
