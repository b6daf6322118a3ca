"""Device memory over time, from when ops start and end on the timeline."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from simulator.program import ALLOCATED, NONE, Int64, Memory, Program
from simulator.timeline import Timeline

Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class MemoryTimeline:
    """What comes and goes: activations, transients, gathered weights, gradients in full.

    What is alive all the time is `Program.static_bytes`.

    At equal times releases come before allocations.
    """

    program: Program
    timeline: Timeline
    parts: tuple[str, ...] = ALLOCATED
    """What of it is counted, fields of `Memory`."""

    @cached_property
    def moved(self) -> tuple[Float64, Float64]:
        """Bytes that each row of the program allocates at its start and frees at its end."""
        costs, counted = self.program.costs, [part in self.parts for part in Memory._fields]
        alloc = np.array([cost.alloc for cost in costs], np.float64).reshape(-1, len(counted))
        free = np.array([cost.free for cost in costs], np.float64).reshape(-1, len(counted))
        return (alloc @ counted)[self.program.cost], (free @ counted)[self.program.cost]

    def only(self, *parts: str) -> MemoryTimeline:
        """Return the same, counting some parts only."""
        return replace(self, parts=parts)

    @cached_property
    def spread(self) -> Float64:
        """Most bytes at any time, by rank, with holes between them that serve nothing."""
        holed = any(cost.alloc.holes for cost in self.program.costs)
        return self.only(*Memory._fields).peak if holed else self.peak

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

    def at_peak(self, rank: int) -> Peak:
        """Return what one rank holds when it holds most, the first time in its last step."""
        at, tile = (int(x[0]) for x in np.nonzero(self.program.tile_ranks == rank))
        column = int(self._column[tile])
        p, (start, end) = self.program, self.timeline.columns
        time, held = self._of(at, column)
        if not len(time):
            return Peak(0, Memory(), (), NONE)
        rows = np.flatnonzero((p.rank == at) & (p.step == p.step.max()))
        window = time >= start[rows, column].min()
        tick = int(time[window][np.argmax(held[window])])
        mine = np.flatnonzero(p.rank == at)
        begun, ended = mine[start[mine, column] <= tick], mine[end[mine, column] <= tick]
        parts, balance = [], {}
        for part in Memory._fields:
            alloc, free = self.only(part).moved
            parts.append(float(alloc[begun].sum() - free[ended].sum()))
            if part == "activations":
                balance = _by_microbatch(p, (begun, alloc), (ended, free))
        running = begun[(end[begun, column] > tick) & (p.stream[begun] == COMPUTE)]
        kept = tuple(key for key, size in sorted(balance.items()) if size > 0.5)
        return Peak(tick, Memory(*parts), kept, int(running[0]) if len(running) else NONE)

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


COMPUTE = 0
"""Number of the compute stream."""


@dataclass(frozen=True, slots=True)
class Peak:
    """What a rank holds at one time, beside what it holds all the time."""

    tick: int
    memory: Memory
    kept: tuple[tuple[int, int], ...]
    """(stage, microbatch) of all of which activations are alive."""
    row: int
    """Row of the program that is computing then, or NONE."""


def _by_microbatch(
    p: Program, up: tuple[Int64, Float64], down: tuple[Int64, Float64]
) -> dict[tuple[int, int], float]:
    """Return the bytes that rows have brought and not yet taken, by step, stage and microbatch."""
    balance: dict[tuple[int, int], float] = {}
    for sign, (rows, size) in ((1.0, up), (-1.0, down)):
        rows = rows[size[rows] != 0]
        keys = zip(p.stage[rows].tolist(), p.microbatch[rows].tolist(), strict=True)
        for key, moved in zip(keys, size[rows].tolist(), strict=True):
            balance[key] = balance.get(key, 0.0) + sign * moved
    return balance


def _runs(first: Int64, length: int) -> Int64:
    """Return the lengths of runs that begin at `first` and end with the whole."""
    return np.diff(np.append(first, length))


def memory_over_time(program: Program, timeline: Timeline) -> MemoryTimeline:
    """Return what comes and goes in memory over time."""
    return MemoryTimeline(program, timeline)
