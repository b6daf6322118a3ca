"""Sample a scenario's step under its jitter, follow critical paths, replay without each cause."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from simulator.budget import require
from simulator.describe.jitter import Jitter
from simulator.engine import Folding, run, run_side_by_side
from simulator.errors import DescriptionError
from simulator.jitter.causes import causes
from simulator.jitter.draw import BLOCK, Draws, disturbed, drawn, pauses_of
from simulator.jitter.paths import Delays, Paths, step_windows
from simulator.jitter.result import Jittered
from simulator.pauses import Pauses
from simulator.pool import cores, mapped
from simulator.program import Int64, Program
from simulator.report.result import Result
from simulator.traffic import Traffic

CELLS = 20_000_000
"""Ops of all samples that run side by side, each of 40 bytes."""

MANY = 400_000_000
"""Ops of all samples from which processes share them: some seconds."""


class Sampled(NamedTuple):
    """What becomes of some samples."""

    steps: Int64
    """Ticks of their steps."""
    delays: Delays | None
    without: dict[str, Int64]
    """Ticks of the same steps, replayed without one disturbance."""


def study(
    result: Result,
    *,
    engine: str = "compiled",
    samples: int | None = None,
    cells: int = CELLS,
    jobs: int | None = None,
) -> Jittered:
    """Return the steps of a scenario under its jitter, and what they owe to each disturbance.

    Every sample is run with all disturbances, and again without each of them: all else is as it
    was drawn, so that the difference is what that one costs.

    Args:
        result: of the scenario that nothing disturbs.
        engine: one of `simulator.engine.ENGINES`; all give the same.
        samples: how many, in place of `jitter.samples`; one where nothing is drawn.
        cells: ops that run side by side; it moves no number.
        jobs: processes that share the samples; it moves no number. As many as there are cores,
            where there is much to do, when absent.

    Raises:
        DescriptionError: when the scenario has no jitter, or is too large.
    """
    jitter = jitter_of(result, samples)
    parts = _sampled(result, jitter, engine, cells, jobs, explained=True)
    every = [part.delays for part in parts if part.delays is not None]
    without = {
        name: np.concatenate([part.without[name] for part in parts]) for name in parts[0].without
    }
    return Jittered(result, jitter, Delays.of(every), without)


def step_ticks(
    result: Result, *, engine: str = "compiled", samples: int | None = None, jobs: int | None = None
) -> Int64:
    """Return the ticks of a scenario's step in each sample, as `study` finds them, and no more."""
    jitter = jitter_of(result, samples)
    parts = _sampled(result, jitter, engine, CELLS, jobs, explained=False)
    return np.concatenate([part.steps for part in parts])


def jitter_of(result: Result, samples: int | None) -> Jitter:
    """Return the jitter of a result's scenario, with another number of samples where stated.

    Raises:
        DescriptionError: when it has none.
    """
    scenario = result.scenario
    if scenario is None or scenario.jitter is None:
        raise DescriptionError(
            "there is no [jitter] table, which says what disturbs the step; as jitter.op_cv = 0.05"
        )
    jitter = scenario.jitter if samples is None else replace(scenario.jitter, samples=samples)
    return jitter if jitter.is_random else replace(jitter, samples=1)


def _sampled(
    result: Result, jitter: Jitter, engine: str, cells: int, jobs: int | None, *, explained: bool
) -> list[Sampled]:
    """Return what becomes of all samples, in order: parts of whole blocks, one for each process."""
    size, count = len(result.tiled), jitter.samples
    if jobs is None:
        runs = 1 + len(causes(jitter)) if explained else 1
        jobs = cores() if size * count * runs > MANY else 1
    jobs = max(1, min(jobs, -(-count // BLOCK)))
    batch = max(1, cells // jobs // max(1, size))
    require(
        40.0 * size * min(batch, count, BLOCK) * jobs,
        f"running {size:,} ops under jitter" + f" in {jobs} processes" * (jobs > 1),
        'set run.detail = "stage", or simulate fewer steps',
    )
    each = -(-count // (BLOCK * jobs)) * BLOCK
    ranges = [range(first, min(first + each, count)) for first in range(0, count, each)]
    one = partial(_some, result, jitter, engine, batch, explained)
    return list(mapped(one, ranges, jobs))


def _some(
    result: Result, jitter: Jitter, engine: str, batch: int, explained: bool, samples: range
) -> Sampled:
    """Return what becomes of some samples, so many of them side by side."""
    program = result.tiled
    base, traffic = undisturbed(result)
    paths = Paths(result, len(samples)) if explained else None
    replays = {name: replace(jitter, **change) for name, change in causes(jitter).items()}
    steps: list[Int64] = []
    without: dict[str, list[Int64]] = {name: [] for name in replays if explained}
    for draws in drawn(program, jitter, samples, batch):
        some = _Batch(program, base, traffic, draws, engine)
        start, end = some.times(jitter)
        steps.append(_lengths(program, end, draws.samples))
        if paths is not None:
            paths.add(start, end, draws.samples)
        for name, ticks in without.items():
            ticks.append(_lengths(program, some.times(replays[name])[1], draws.samples))
    return Sampled(
        np.concatenate(steps),
        None if paths is None else paths.done(),
        {name: np.concatenate(ticks) for name, ticks in without.items()},
    )


def _lengths(program: Program, end: Int64, samples: int) -> Int64:
    begin, finish = step_windows(program, end, samples)
    return finish - begin


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
