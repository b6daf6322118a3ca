"""The mesh: ranks arranged by the axes of a plan, consecutive ranks along the innermost one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from simulator.describe.plan import Plan

IntArray = npt.NDArray[np.int64]
Ranks = TypeVar("Ranks", int, IntArray)


@dataclass(frozen=True, slots=True)
class Mesh:
    """Degrees and strides of the axes; a rank is the sum of coordinate times stride."""

    dp: int
    pp: int
    tp: int
    strides: tuple[int, int, int]
    """Distance in rank between neighbours along dp, pp and tp."""
    shards: int = 1
    """Consecutive dp coordinates that divide states among them; dp is a multiple."""

    @classmethod
    def of(cls, plan: Plan) -> Mesh:
        """Return the mesh of a plan."""
        stride, strides = 1, {}
        for axis in reversed(plan.order):
            strides[axis] = stride
            stride *= getattr(plan, axis)
        apart = (strides["dp"], strides["pp"], strides["tp"])
        return cls(plan.dp, plan.pp, plan.tp, apart, plan.shards)

    @property
    def world_size(self) -> int:
        """Ranks of the mesh."""
        return self.dp * self.pp * self.tp

    def rank(self, dp: IntArray | int, pp: IntArray | int, tp: IntArray | int) -> IntArray:
        """Return the rank at coordinates; arrays broadcast."""
        by_dp, by_pp, by_tp = self.strides
        return np.asarray(dp * by_dp + pp * by_pp + tp * by_tp, np.int64)

    def coordinates(self, rank: Ranks) -> dict[str, Ranks]:
        """Return the coordinates of a rank, or of an array of ranks, by axis."""
        by_dp, by_pp, by_tp = self.strides
        return {
            "dp": rank // by_dp % self.dp,
            "pp": rank // by_pp % self.pp,
            "tp": rank // by_tp % self.tp,
        }
