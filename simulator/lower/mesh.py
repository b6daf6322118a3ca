"""The mesh: ranks arranged by the axes of a plan, consecutive ranks along the innermost one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from simulator.describe.plan import AXES, Plan

IntArray = npt.NDArray[np.int64]
Ranks = TypeVar("Ranks", int, IntArray)


@dataclass(frozen=True, slots=True)
class Mesh:
    """Degrees and strides of the axes; a rank is the sum of coordinate times stride."""

    dp: int
    pp: int
    tp: int
    strides: Mapping[str, int]
    """Distance in rank between neighbours along each axis of `AXES`."""
    shards: int = 1
    """Consecutive replicas that divide states among them; dp x cp is a multiple."""
    cp: int = 1
    ep: int = 1
    etp: int = 1

    @classmethod
    def of(cls, plan: Plan) -> Mesh:
        """Return the mesh of a plan."""
        stride = 1
        strides: dict[str, int] = dict.fromkeys(AXES, 0)
        for axis in reversed(plan.order):
            strides[axis] = stride
            stride *= getattr(plan, axis)
        return cls(
            plan.dp, plan.pp, plan.tp, strides, plan.shards, plan.cp, plan.ep, plan.etp
        )  # fmt: skip

    @property
    def world_size(self) -> int:
        """Ranks of the mesh."""
        return self.dp * self.cp * self.pp * self.tp

    @property
    def replicas(self) -> int:
        """Ranks that hold the same weights: those along dp and cp."""
        return self.dp * self.cp

    @property
    def tiles(self) -> int:
        """Pipelines, counted along dp, cp and tp, tp innermost."""
        return self.replicas * self.tp

    def ranks_of_tiles(self, tiles: IntArray, pp: IntArray | int) -> IntArray:
        """Return the rank at a place of a pipeline of each tile; arrays broadcast."""
        replica, tp = np.divmod(tiles, self.tp)
        dp, cp = np.divmod(replica, self.cp)
        return self.rank(dp=dp, cp=cp, pp=pp, tp=tp)

    def rank(self, **at: IntArray | int) -> IntArray:
        """Return the rank at coordinates by axis; arrays broadcast."""
        return np.asarray(sum(index * self.strides[axis] for axis, index in at.items()), np.int64)

    def coordinates(self, rank: Ranks) -> dict[str, Ranks]:
        """Return the coordinates of a rank, or of an array of ranks, by axis."""
        return {
            axis: rank // max(self.strides[axis], 1) % getattr(self, axis) for axis in AXES
        }  # fmt: skip
