"""Operate a scenario over days: draw what breaks, run every sample, keep what became of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from simulator.api import simulate
from simulator.describe.scenario import Scenario
from simulator.errors import DescriptionError
from simulator.operate.draw import Happenings, happenings
from simulator.operate.job import (
    CATEGORIES,
    CHECKPOINT,
    DETECTION,
    FEWER,
    LOST,
    RESCHEDULING,
    RESTART,
    RESTORE,
    SLOW,
    SLOW_NODE,
    TRAINING,
    WAITING,
    Job,
    job,
)
from simulator.operate.result import Operated, Outcome
from simulator.program import Int64

MOST_CHECKPOINTS = 10**9
"""Of all samples together; the compiled engine takes some 20 ns for each."""

EngineName = Literal["compiled", "reference"]

PHASES = np.array(
    [LOST, CHECKPOINT, CHECKPOINT, CHECKPOINT, DETECTION, WAITING, RESCHEDULING, RESTART, RESTORE,
     TRAINING, SLOW, FEWER], np.int64,
)  # fmt: skip
"""Category of each phase of `kernels.operations`, an interrupted step first; then of kept steps."""


def operate(
    scenario: Scenario,
    *,
    days: float | None = None,
    seeds: int = 1000,
    engine: EngineName = "compiled",
) -> Operated:
    """Run a scenario's operations over days, in as many samples as seeds.

    Args:
        scenario: with an `operations` table; its step is simulated unless that states a step time.
        days: how long, in place of what the scenario says.
        seeds: samples, from the scenario's `operations.seed` on.
        engine: both give the same numbers; `reference` is SimPy's and slow.

    Raises:
        DescriptionError: when the scenario does not say what fails, or says what cannot be run.
    """
    ops = scenario.operations
    if ops is None:
        raise DescriptionError(
            f"{scenario.name}: it has no [operations] table, which says what fails, how long "
            "recovery takes and when state is saved; llama-3-405b-operations has one"
        )
    if type(seeds) is not int or seeds < 1:
        raise DescriptionError(f"seeds {seeds!r} must be a whole number and at least 1")
    if days is not None:
        ops = replace(ops, days=float(days))
        scenario = replace(scenario, operations=ops)
    step, result = ops.step_time, None
    if step is None:
        result = simulate(scenario)
        step = result.step_time_s
    described = job(scenario, ops, step)
    _check_size(described, seeds)
    cluster = scenario.cluster
    every = range(ops.seed, ops.seed + seeds)
    breaks = happenings(ops, cluster.world_size, cluster.num_nodes, every)
    outcome = ENGINES[engine](described, breaks)
    return Operated(scenario, ops, described, step, every, outcome, result)


def _check_size(job: Job, seeds: int) -> None:
    """Check that it will end within minutes.

    Raises:
        DescriptionError: when there are more checkpoints than that.
    """
    saves = job.duration / (job.interval * job.step + job.blocked) * seeds
    if saves > MOST_CHECKPOINTS:
        raise DescriptionError(
            f"operations.checkpoint.interval: {saves:.3g} checkpoints in {seeds:,} samples are too "
            f"many (at most {MOST_CHECKPOINTS:.0e}); take fewer --seeds or --days, or a longer one"
        )


def run_all(job: Job, breaks: Happenings) -> Outcome:
    """Return what becomes of a job in every sample, by the compiled engine."""
    from simulator.kernels.operations import operate_days

    out = _empty(len(breaks.offset) - 1, job)
    numbers = (
        job.duration, job.step, job.slow_step, job.interval, job.blocked, job.drain, job.restore,
        job.restart, job.rescheduling, job.spares,
    )  # fmt: skip
    slow = job.names.index(SLOW_NODE) if SLOW_NODE in job.names else len(job.names)
    work = len(breaks.tick) + len(out.ticks) * (job.duration // (job.step * job.interval) + 1)
    operate_days(
        10 * work, breaks.offset, breaks.tick, breaks.what, numbers, job.asynchronous, *job.columns,
        slow, PHASES, out.ticks, out.interruptions, out.progress,
    )  # fmt: skip
    return out


def run_all_reference(job: Job, breaks: Happenings) -> Outcome:
    """Return the same by SimPy's processes."""
    from simulator.operate.reference import run_reference

    out = _empty(len(breaks.offset) - 1, job)
    for k in range(len(out.ticks)):
        sample = run_reference(job, breaks.of(k))
        out.ticks[k] = sample.ticks
        out.interruptions[k] = sample.interruptions
        out.progress[k] = sample.steps, sample.shares, sample.checkpoints
    return out


ENGINES = {"compiled": run_all, "reference": run_all_reference}


def _empty(samples: int, job: Job) -> Outcome:
    def zeros(columns: int) -> Int64:
        return np.zeros((samples, columns), np.int64)

    return Outcome(zeros(len(CATEGORIES)), zeros(len(job.names)), zeros(3))
