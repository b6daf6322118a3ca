"""Sample a scenario's step under its jitter, follow critical paths, replay without each cause."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from simulator.budget import require
from simulator.describe.jitter import Jitter
from simulator.engine import Folding, run, run_side_by_side
from simulator.errors import DescriptionError
from simulator.jitter.causes import causes
from simulator.jitter.draw import Draws, disturbed, drawn, pauses_of
from simulator.jitter.paths import Paths, step_windows
from simulator.jitter.result import Jittered
from simulator.pauses import Pauses
from simulator.program import Int64, Program
from simulator.report.result import Result
from simulator.traffic import Traffic

CELLS = 20_000_000
"""Ops of all samples that run side by side, each of 40 bytes."""


def study(
    result: Result, *, engine: str = "compiled", samples: int | None = None, cells: int = CELLS
) -> Jittered:
    """Return the steps of a scenario under its jitter, and what they owe to each disturbance.

    Every sample is run with all disturbances, and again without each of them: all else is as it
    was drawn, so that the difference is what that one costs.

    Args:
        result: of the scenario that nothing disturbs.
        engine: one of `simulator.engine.ENGINES`; all give the same.
        samples: how many, in place of `jitter.samples`; one where nothing is drawn.
        cells: ops that run side by side; it moves no number.

    Raises:
        DescriptionError: when the scenario has no jitter, or is too large.
    """
    scenario = result.scenario
    if scenario is None or scenario.jitter is None:
        raise DescriptionError(
            "there is no [jitter] table, which says what disturbs the step; as jitter.op_cv = 0.05"
        )
    jitter = scenario.jitter if samples is None else replace(scenario.jitter, samples=samples)
    if not jitter.is_random:
        jitter = replace(jitter, samples=1)
    program = result.tiled
    size = len(program)
    batch = max(1, cells // max(1, size))
    require(
        40.0 * size * min(batch, jitter.samples),
        f"running {size:,} ops under jitter",
        'set run.detail = "stage", or simulate fewer steps',
    )
    base, traffic = undisturbed(result)
    paths = Paths(result, jitter.samples)
    replays = {name: replace(jitter, **change) for name, change in causes(jitter).items()}
    steps: dict[str, list[Int64]] = {name: [] for name in replays}
    sizes = [min(batch, jitter.samples - first) for first in range(0, jitter.samples, batch)]
    for draws in drawn(program, jitter, sizes):
        batch_of = _Batch(program, base, traffic, draws, engine)
        paths.add(*batch_of.times(jitter), draws.samples)
        for name, replayed in replays.items():
            begin, finish = step_windows(program, batch_of.times(replayed)[1], draws.samples)
            steps[name].append(finish - begin)
    without = {name: np.concatenate(ticks) for name, ticks in steps.items()}
    return Jittered(result, jitter, paths.done(), without)


class _Batch(NamedTuple):
    """Some samples of a program."""

    program: Program
    base: Int64
    traffic: Traffic | None
    draws: Draws
    engine: str

    def times(self, jitter: Jitter) -> tuple[Int64, Int64]:
        """Return start and end (rows, samples x tiles) under some of what was drawn."""
        ticks = disturbed(self.program, self.base, jitter, self.draws)
        pauses = pauses_of(self.program, jitter, self.draws)
        everyone = Folding.none(self.program)
        if self.engine == "compiled" and self.traffic is None:
            return run_side_by_side(self.program, ticks, everyone, self.draws.samples, pauses)
        start, end = np.empty_like(ticks), np.empty_like(ticks)
        for columns, own in self._each(pauses):
            timeline = run(
                self.program, ticks[:, columns], self.engine, everyone, self.traffic, own
            )
            start[:, columns], end[:, columns] = timeline.columns
        return start, end

    def _each(self, pauses: Pauses | None) -> Iterator[tuple[slice, Pauses | None]]:
        """Yield the columns and the pauses of each sample."""
        tiles = self.program.num_tiles
        for sample in range(self.draws.samples):
            columns = slice(sample * tiles, (sample + 1) * tiles)
            own = pauses and replace(pauses, phase=pauses.phase[:, columns])
            yield columns, own


def undisturbed(result: Result) -> tuple[Int64, Traffic | None]:
    """Return (rows, tiles or 1) ticks of a run that nothing disturbs, and its traffic."""
    if result.moves is not None:
        return result.moves.latency, result.moves.traffic
    return durations(result), None


def durations(result: Result) -> Int64:
    """Return (rows, tiles or 1) ticks from start to end of every op."""
    start, end = result.times.columns
    column = result.times.column_of_tile
    ticks = end - start
    return ticks if ticks.shape[1] == 1 or column is None else ticks[:, column]
