"""What torch's allocator reserves beyond what is allocated at the peak, and has to give back."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.hardware.gather_pool import gather_pool_bytes
from simulator.hardware.outside import capacity, outside
from simulator.lower.gathers import gathers_apart
from simulator.lower.shapes import shapes

if TYPE_CHECKING:
    from simulator.describe.scenario import Scenario
    from simulator.report.result import Result

Float64 = npt.NDArray[np.float64]


class Reserve(NamedTuple):
    """Bytes by rank that are reserved and not allocated when most is."""

    gathers: Float64
    """Pools of the streams on which weights are gathered."""
    holes: Float64
    """Between tensors, too short for those that are made next."""
    stated: Float64
    """By `run.allocator_reserve`."""

    @property
    def total(self) -> Float64:
        """All of it."""
        return self.gathers + self.holes + self.stated


def reserve_of(result: Result) -> Reserve:
    """Return what is reserved on every rank beyond what is allocated there at the peak.

    Each pool keeps what it once needed. That of the stream that computes needs its own peak, with
    the holes of that time; shards of gradients, which have a pool of their own, count as alive all
    the time.
    """
    allocated, s = result.peak_memory_bytes, result.scenario
    holes = result.memory.spread - result.memory.peak
    if s is None:
        return Reserve(np.zeros(len(allocated)), holes, np.zeros(len(allocated)))
    gathers = np.zeros(len(allocated))
    gathers[result.tiled.tile_ranks] = np.array(gather_pool_bytes(s))[:, None]
    return Reserve(gathers, holes, allocated * (s.run.allocator_reserve - 1))


def reserve_assumption(s: Scenario) -> str:
    """Return what is taken to be reserved and not allocated."""
    stated = s.run.allocator_reserve
    also = ["a pool of weights on their way"] * gathers_apart(s)
    also += ["what the loss leaves free between its tensors"] * (shapes(s).loss == "eager")
    also += [f"{stated - 1:.4g} of that (run.allocator_reserve)"] * (stated != 1)
    if not also:
        return (
            "torch's allocator reserves no more than what is allocated at the peak "
            "(run.allocator_reserve)"
        )
    return f"torch's allocator reserves, beside what is allocated at the peak, {', '.join(also)}"


def given_back(result: Result, s: Scenario) -> Float64:
    """Return the bytes of what is reserved for which there is no room on each rank's device.

    Where a plan fits, the allocator frees as much of what it has cached and tries again.
    """
    return np.maximum(result.reserved_memory_bytes + outside(s) - capacity(s), 0.0)
