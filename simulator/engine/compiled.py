"""The default engine: one pass in topological order, events for programs in which ops queue."""

from __future__ import annotations

import numpy as np

from simulator.engine import events
from simulator.engine.fold import Folding
from simulator.errors import DeadlockError
from simulator.kernels.one_pass import one_pass
from simulator.lower.check import deadlock_of
from simulator.pauses import Pauses, as_arguments
from simulator.program import NONE, Int32, Int64, Program
from simulator.timeline import Timeline
from simulator.traffic import Traffic

CELLS = 50_000_000
"""Ops between two moments in which an interrupt is heard (about half a second)."""


def run(
    program: Program,
    ticks: Int64,
    folding: Folding,
    traffic: Traffic | None = None,
    pauses: Pauses | None = None,
) -> Timeline:
    """Return when every op started and ended; see `simulator.engine.run`."""
    if traffic is not None:
        return events.run(program, ticks, folding, traffic, pauses)
    ((start, end),) = run_sets(program, ticks_of_columns(ticks, folding), folding, 1, pauses)
    return timeline_of(program, folding, start, end)


def run_sets(
    program: Program, ticks: Int64, folding: Folding, sets: int, pauses: Pauses | None = None
) -> list[tuple[Int64, Int64]]:
    """Return start and end (rows, columns) of each of several sets of `run_side_by_side`."""
    start, end = run_side_by_side(program, ticks, folding, sets, pauses)
    columns = len(folding.tiles)
    cut = [slice(k * columns, (k + 1) * columns) for k in range(sets)]
    return [(start[:, one], end[:, one]) for one in cut]


def run_side_by_side(
    program: Program, ticks: Int64, folding: Folding, sets: int, pauses: Pauses | None = None
) -> tuple[Int64, Int64]:
    """Return start and end (rows, sets x columns) of several sets of durations.

    Args:
        program: what to run.
        ticks: (rows, sets x columns), or (rows, 1) that all columns share.
        folding: which tiles are run.
        sets: how many sets; nothing joins ops of two.
        pauses: when ranks stand still, with phases (ranks of a tile, sets x columns).
    """
    classes = classes_of_columns(program, folding)
    columns = len(folding.tiles)
    shift = np.repeat(np.arange(sets, dtype=np.int32) * columns, columns)
    classes = np.tile(classes, sets) + shift
    if len(program.slot) and (program.slot != NONE).any():
        return events.times(program, ticks, classes, pauses=pauses)
    return _pass(program, ticks, classes, pauses)


def _pass(
    program: Program, ticks: Int64, classes: Int32, pauses: Pauses | None
) -> tuple[Int64, Int64]:
    """Return start and end by one pass in topological order."""
    once = Pass(program, classes, pauses)
    once.run(ticks)
    return once.start, once.end


class Pass:
    """One pass in topological order, which can be made again from some op on."""

    def __init__(self, program: Program, classes: Int32, pauses: Pauses | None = None) -> None:
        offset, rows = program.units
        if len(rows) < len(program.rank):
            raise DeadlockError(deadlock_of(program))
        columns = classes.shape[1]
        self.start = np.empty((len(program.rank), columns), np.int64)
        self.end = np.empty_like(self.start)
        joint = program.joint[rows[offset[:-1]]]
        partition = np.append(program.partition, NONE)[joint]  # NONE is -1: the last one
        self._graph = (
            offset, rows, partition.astype(np.int64), program.pred_offset, program.preds,
            program.stream_previous, classes,
        )  # fmt: skip
        self._pauses = as_arguments(pauses, program, columns)

    def run(self, ticks: Int64, first: int = 0) -> None:
        """Fill `start` and `end` (rows, columns) from a unit on, all before it being right."""
        units, columns = len(self._graph[0]) - 1, self.start.shape[1]
        stride = max(1, CELLS // max(columns, 1))
        size = self.start.size * (units - first) // max(units, 1)
        for begin in range(first, units, stride):
            one_pass(
                size, begin, min(begin + stride, units), *self._graph, ticks, *self._pauses,
                self.start, self.end,
            )  # fmt: skip


def timeline_of(program: Program, folding: Folding, start: Int64, end: Int64) -> Timeline:
    """Return the timeline of (rows, columns) times."""
    if program.tiling is None:
        return Timeline(start[:, 0], end[:, 0])
    return Timeline(start, end, folding.column_of_tile)


def ticks_of_columns(ticks: Int64, folding: Folding) -> Int64:
    """Return the ticks of the tiles that are run, as (rows, columns or 1)."""
    if ticks.shape[1] == 1 or len(folding.tiles) == ticks.shape[1]:
        return np.ascontiguousarray(ticks)
    return np.ascontiguousarray(ticks[:, folding.tiles])


def classes_of_columns(program: Program, folding: Folding) -> Int32:
    """Return (partitions, columns): classes counted from 0 among the tiles that are run."""
    kept = program.classes[:, folding.tiles]
    rows = [np.unique(row, return_inverse=True)[1].reshape(-1) for row in kept]
    return np.array(rows, np.int32).reshape(len(kept), -1)
