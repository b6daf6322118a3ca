"""The roofline of a run: what its kernels compute for each byte, and how fast they do it.

Arithmetic intensity is FLOPs executed over bytes moved in device memory; the attained rate is FLOPs
over the seconds that kernels hold their stream, gaps before them included. Both are sums over the
last step, of all ranks on one kind of device (Williams, Waterman and Patterson, 2009).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.describe.cluster import Device, Node
from simulator.describe.placement import kind_of_ranks
from simulator.errors import DescriptionError
from simulator.hardware.compute import BOUNDS, work_seconds
from simulator.hardware.power import clock_left
from simulator.program import ACTIONS, OFF_DEVICE, Int64, Kernel, Work
from simulator.report.breakdown import work_category

if TYPE_CHECKING:
    from simulator.report.result import Result

Bools = npt.NDArray[np.bool_]

NO_KERNELS = "the figure roofline needs kernels, and a bare schedule has none: give a scenario"

PASSES = (" wgrad", " dgrad", " grad")
"""Ends of kernels' names that say which pass they belong to."""


class Roof(NamedTuple):
    """Most FLOP/s of a precision: by the datasheet, and what large products sustain."""

    dtype: str
    peak: float
    sustained: float


@dataclass(frozen=True, slots=True)
class Point:
    """Kernels of one operator in one pass of the last step, over all ranks of the device."""

    name: str
    category: str
    """`forward`, `backward` or `optimizer`, as in the breakdown."""
    flops: float
    bytes: float
    seconds: float
    bound: str
    """What holds most of their time, one of `compute.BOUNDS`."""

    @property
    def intensity(self) -> float:
        """FLOPs for each byte."""
        return self.flops / self.bytes

    @property
    def rate(self) -> float:
        """Attained FLOP/s."""
        return self.flops / self.seconds


@dataclass(frozen=True, slots=True)
class Roofline:
    """The operators of a run on one kind of device, those that take longest first."""

    device: Device
    points: tuple[Point, ...]
    roofs: tuple[Roof, ...]
    """Of the precisions in use, highest first."""
    moving: tuple[tuple[str, float], ...]
    """Operators that compute nothing, as copies and permutations, with their seconds."""
    seconds: float
    """Of all kernels."""
    ranks: int
    """Ranks on the device."""

    @property
    def ridge(self) -> float:
        """FLOPs a byte from which on the highest roof, not memory, is the limit (datasheet)."""
        return self.roofs[0].peak / self.device.memory_bandwidth


def roofline(result: Result) -> Roofline:
    """Return the operators of the last step, on the kind of device that most ranks are on.

    Raises:
        DescriptionError: for a bare schedule, or where all work has stated seconds.
    """
    s = result.scenario
    if s is None:
        raise DescriptionError(NO_KERNELS)
    kinds = np.array(kind_of_ranks(s.plan, s.cluster), np.int64)
    kind = int(np.bincount(kinds).argmax())
    node = s.cluster.kinds[kind]
    found, products = _sums(result, node, kinds == kind)
    if not found:
        raise DescriptionError(f"{s.name}: all work has stated seconds, so there are no kernels")
    points, moving = [], []
    for (name, category), (flops, moved, *by_bound) in found.items():
        seconds = sum(by_bound)
        if not flops or not moved:
            moving.append((name, seconds))
            continue
        bound = BOUNDS[by_bound.index(max(by_bound))]
        points.append(Point(name, category, flops, moved, seconds, bound))
    roofs = sorted((_roof(node.device, *used) for used in products.items()), key=lambda r: -r.peak)
    return Roofline(
        device=node.device,
        points=tuple(sorted(points, key=lambda p: -p.seconds)),
        roofs=tuple(roofs),
        moving=tuple(sorted(moving, key=lambda m: -m[1])),
        seconds=sum(p.seconds for p in points) + sum(seconds for _, seconds in moving),
        ranks=int((kinds == kind).sum()),
    )


def _sums(
    result: Result, node: Node, mine: Bools
) -> tuple[dict[tuple[str, str], list[float]], dict[str, bool]]:
    """Return FLOPs, bytes and seconds by bound of each operator and category, on some ranks.

    And the precisions that are computed in, each with whether matrix products are.
    """
    assert result.scenario is not None  # asked before
    each = result.scenario.cluster.ranks_per_node
    runs, costs = _runs(result, mine), result.tiled.costs
    found: dict[tuple[str, str], list[float]] = {}
    products: dict[str, bool] = {}
    for number, action in np.argwhere(runs).tolist():
        times = int(runs[number, action])
        for kernel in getattr(costs[number], "kernels", ()):
            if kernel.dtype in OFF_DEVICE:
                continue
            key = _operator(kernel), work_category(ACTIONS[action])
            by_bound = work_seconds(Work("", (kernel,)), node, each)
            more = (kernel.count * kernel.flops, kernel.count * kernel.bytes, *by_bound.values())
            sums = found.get(key, [0.0] * len(more))
            found[key] = [total + times * one for total, one in zip(sums, more, strict=True)]
            if kernel.flops:
                products[kernel.dtype] = products.get(kernel.dtype, False) or bool(kernel.matmul)
    return found, products


def _runs(result: Result, mine: Bools) -> Int64:
    """Return (costs, actions): how often some ranks run each work with kernels in the last step."""
    p = result.tiled
    ranks = mine[p.tile_ranks].sum(axis=1)
    kernels = np.array([isinstance(c, Work) and c.seconds is None for c in p.costs], bool)
    rows = np.flatnonzero((p.step == p.step.max(initial=0)) & kernels[p.cost])
    runs = np.zeros((len(p.costs), len(ACTIONS)), np.int64)
    np.add.at(runs, (p.cost[rows], p.action[rows]), ranks[p.rank[rows]])
    return runs


def _operator(kernel: Kernel) -> str:
    """Return the name of a kernel without that of its pass."""
    for end in PASSES:
        if kernel.name.endswith(end):
            return kernel.name.removesuffix(end)
    return kernel.name


def _roof(device: Device, dtype: str, products: bool) -> Roof:
    """Return the roof of a precision; kernels that are no matrix product are priced at its peak."""
    peak = device.peak[dtype]
    share = device.matmul_efficiency_in.get(dtype, device.matmul_efficiency)
    share *= device.sustained_clock * clock_left(device)
    return Roof(dtype, peak, peak * share if products else peak)
