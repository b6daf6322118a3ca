"""Device memory over time, from when ops start and end on the timeline."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from simulator.program import Int64, Program, Work
from simulator.timeline import Timeline

Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class MemoryTimeline:
    """Activation bytes of all ranks as steps: after `time[i]`, rank `rank[i]` holds `bytes[i]`."""

    rank: npt.NDArray[np.int32]
    time: Int64
    bytes: Float64
    """Activations alive; what is alive all the time is `Program.static_bytes`."""
    peak: Float64
    """Most activation bytes at any time, by rank."""

    def of_rank(self, rank: int) -> tuple[Int64, Float64]:
        """Return the times and bytes of one rank."""
        begin, end = np.searchsorted(self.rank, [rank, rank + 1])
        return self.time[begin:end], self.bytes[begin:end]


def memory_over_time(program: Program, timeline: Timeline) -> MemoryTimeline:
    """Return the activations alive over time; at equal times releases come before allocations."""
    work = [c if isinstance(c, Work) else Work("") for c in program.costs]
    alloc = np.array([w.alloc_bytes for w in work])[program.cost]
    free = np.array([w.free_bytes for w in work])[program.cost]
    up, down = np.flatnonzero(alloc), np.flatnonzero(free)
    rank = np.concatenate([program.rank[down], program.rank[up]])
    time = np.concatenate([timeline.end[down], timeline.start[up]])
    delta = np.concatenate([-free[down], alloc[up]])
    order = np.lexsort((time, rank))  # stable: releases, listed first, stay first at equal times
    rank, time, delta = rank[order], time[order], delta[order]
    total = np.cumsum(delta)
    present, first = np.unique(rank, return_index=True)
    before = np.concatenate([[0.0], total])[first]
    alive = total - np.repeat(before, np.diff(np.append(first, len(rank))))
    peak = np.zeros(program.num_ranks)
    if len(present):
        peak[present] = np.maximum.reduceat(alive, first)
    return MemoryTimeline(rank, time, alive, np.maximum(peak, 0.0))
