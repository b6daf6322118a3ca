"""Device memory over time, from when ops start and end on the timeline."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from simulator.program import NONE, Int64, Program
from simulator.timeline import Timeline

Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class MemoryTimeline:
    """What comes and goes: activations, gathered weights, gradients in full.

    What is alive all the time is `Program.static_bytes`.

    At equal times releases come before allocations.
    """

    program: Program
    timeline: Timeline

    @cached_property
    def moved(self) -> tuple[Float64, Float64]:
        """Bytes that each row of the program allocates at its start and frees at its end."""
        costs = self.program.costs
        alloc = np.array([cost.alloc_bytes for cost in costs], np.float64)[self.program.cost]
        free = np.array([cost.free_bytes for cost in costs], np.float64)[self.program.cost]
        return alloc, free

    @cached_property
    def peak(self) -> Float64:
        """Most bytes at any time, by rank."""
        ranks = self.program.tile_ranks
        peak = np.zeros(self.program.num_ranks)
        alloc, free = self.moved
        rows = np.flatnonzero((alloc != 0) | (free != 0))
        rows = rows[np.argsort(self.program.rank[rows], kind="stable")]
        rank, stream = self.program.rank[rows], self.program.stream[rows]
        first = np.flatnonzero(np.append(True, rank[1:] != rank[:-1]))[: len(rows)]
        one_stream = np.ones(len(ranks), bool)
        other = (stream == NONE) | (stream != np.repeat(stream[first], _runs(first, len(rows))))
        one_stream[rank[other]] = False
        if len(rows):
            # In one stream the rows of a rank run in order, whenever they do: peaks need no times.
            before = np.concatenate([[0.0], np.cumsum(alloc[rows] - free[rows])])[:-1]
            alive = before - np.repeat(before[first], _runs(first, len(rows))) + alloc[rows]
            peak[ranks[rank[first]]] = np.maximum.reduceat(alive, first)[:, None]
        column = self._column
        for mixed in np.flatnonzero(~one_stream).tolist():
            highest = [self._of(mixed, c)[1].max(initial=0.0) for c in range(column.max() + 1)]
            peak[ranks[mixed]] = np.array(highest)[column]
        return np.maximum(peak, 0.0)

    def of_rank(self, rank: int) -> tuple[Int64, Float64]:
        """Return times, and the bytes that are alive from each of them on, of one rank."""
        at, tile = (int(x[0]) for x in np.nonzero(self.program.tile_ranks == rank))
        return self._of(at, int(self._column[tile]))

    @property
    def _column(self) -> Int64:
        """Column of the timeline of each tile."""
        column = self.timeline.column_of_tile
        return np.zeros(self.program.num_tiles, np.int64) if column is None else column

    def _of(self, at: int, column: int) -> tuple[Int64, Float64]:
        """Return `of_rank` of a rank within the tile, on the tiles of a column."""
        start, end = self.timeline.columns
        rows = np.flatnonzero(self.program.rank == at)
        alloc, free = (moved[rows] for moved in self.moved)
        up, down = rows[alloc != 0], rows[free != 0]
        time = np.concatenate([end[down, column], start[up, column]])
        delta = np.concatenate([-free[free != 0], alloc[alloc != 0]])
        order = np.argsort(time, kind="stable")  # releases, listed first, stay first
        return time[order], np.cumsum(delta[order])


def _runs(first: Int64, length: int) -> Int64:
    """Return the lengths of runs that begin at `first` and end with the whole."""
    return np.diff(np.append(first, length))


def memory_over_time(program: Program, timeline: Timeline) -> MemoryTimeline:
    """Return the activations alive over time."""
    return MemoryTimeline(program, timeline)
