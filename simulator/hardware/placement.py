"""Placement: the device that each rank runs on, and over how many nodes its groups then lie."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from simulator.describe.cluster import Cluster
from simulator.describe.placement import PLACEMENTS
from simulator.describe.plan import AXES, Plan
from simulator.describe.scenario import Scenario
from simulator.hardware.network import group_shapes
from simulator.hardware.wiring import Ints
from simulator.lower.mesh import Mesh
from simulator.program import Groups


def devices(plan: Plan, cluster: Cluster) -> Ints:
    """Return the device of each rank."""
    if isinstance(plan.placement, str):
        placed: Ints = PLACEMENTS[plan.placement](np.arange(cluster.world_size), cluster)
        return placed
    return np.array(plan.placement, np.int64)


class Span(NamedTuple):
    """Over how many nodes the groups along one axis of the mesh, or of experts, lie."""

    axis: str
    groups: int
    ranks: int
    """Of each group: the degree of the axis."""
    fewest: int
    """Nodes of the group that lies on the fewest."""
    most: int
    even: bool
    """Whether each group has as many ranks on one of its nodes as on another."""


def spans(s: Scenario) -> list[Span]:
    """Return the span of each axis that joins ranks, innermost first; then those of experts."""
    plan, mesh, placement = s.plan, Mesh.of(s.plan), devices(s.plan, s.cluster)
    index = np.ix_(*(np.arange(getattr(plan, axis)) for axis in AXES))
    cube = mesh.rank(**dict(zip(AXES, index, strict=True)))
    every: list[tuple[str, Ints]] = [
        (axis, np.moveaxis(cube, AXES.index(axis), -1)) for axis in reversed(plan.order)
    ]
    if plan.ep * plan.etp > 1:
        tiles = mesh.ranks_of_tiles(np.arange(mesh.tiles)[None], np.arange(plan.pp)[:, None])
        cut = tiles.reshape(plan.pp, plan.edp, plan.ep, plan.etp)
        every += [
            (axis, np.moveaxis(cut, -i, -1)) for i, axis in enumerate(("etp", "ep", "edp"), 1)
        ]
    found = []
    for axis, sets in every:
        sets = sets.reshape(-1, sets.shape[-1])
        count, degree = sets.shape
        if degree == 1:
            continue
        groups = Groups(np.arange(count + 1) * degree, sets.ravel().astype(np.int32))
        shapes, _ = group_shapes(groups, s.cluster, placement)
        nodes = [shape.nodes for shape in shapes]
        even = all(shape.nodes * shape.per_node == degree for shape in shapes)
        found.append(Span(axis, count, degree, min(nodes), max(nodes), even))
    return found
