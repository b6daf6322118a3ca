"""Operate a scenario over days: draw what breaks, run every sample, keep what became of it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np

from simulator.api import simulate
from simulator.describe.operations import Checkpoint, Operations
from simulator.describe.scenario import Scenario
from simulator.errors import DescriptionError
from simulator.jitter.run import step_ticks
from simulator.operate.draw import Happenings, failures, happenings
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
from simulator.pool import cores, mapped
from simulator.program import Int64
from simulator.report.result import Result
from simulator.report.save import SaveUse
from simulator.units import TICKS_PER_SECOND

MOST_CHECKPOINTS = 10**9
"""Of all samples together; the compiled engine takes some 20 ns for each."""

MANY = 10**8
"""Checkpoints and failures of all samples from which processes share these: some seconds."""

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
    jobs: int | None = None,
) -> Operated:
    """Run a scenario's operations over days, in as many samples as seeds.

    Args:
        scenario: with an `operations` table; its step is simulated unless that states a step time.
        days: how long, in place of what the scenario says.
        seeds: samples, from the scenario's `operations.seed` on.
        engine: both give the same numbers; `reference` is SimPy's and slow.
        jobs: processes that share the samples, which moves no number. As many as there are cores,
            where there is much to do, when absent.

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
    result = simulate(_between_checkpoints(scenario)) if ops.step_time is None else None
    more = 0.0 if result is None else _between_steps(scenario)
    steps = tuple(one + more for one in _step_times(ops, result, jobs))
    saved = None if ops.checkpoint.is_stated else _one_checkpoint(scenario)
    if saved is not None:
        ops = replace(ops, checkpoint=_with_times(ops.checkpoint, scenario, saved))
    described = job(scenario, ops, steps)
    cluster = scenario.cluster
    size = cluster.world_size, cluster.num_nodes
    work = _saves(described, seeds) + failures(ops, *size, seeds)
    jobs = jobs or (cores() if work > MANY or engine == "reference" else 1)
    every = range(ops.seed, ops.seed + seeds)
    share = -(-seeds // jobs)
    some = partial(_samples, described, ops, size, engine)
    parts = list(mapped(some, [every[at : at + share] for at in range(0, seeds, share)], jobs))
    outcome = Outcome(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
    return Operated(scenario, ops, described, steps, every, outcome, result, saved)


def _between_checkpoints(s: Scenario) -> Scenario:
    """Return a scenario of steps alone; what comes between them is counted apart."""
    jitter = s.jitter
    if jitter is not None and s.data is None:
        jitter = replace(jitter, host_cv=0.0)  # of checkpoints alone
    quiet = replace(s.run, log_time=0.0, log_every=None)
    return replace(s, checkpoint=None, evaluation=None, run=quiet, jitter=jitter, operations=None)


def _between_steps(s: Scenario) -> float:
    """Return the seconds that evaluations and logging add to a step on average."""
    if s.evaluation is None and not s.run.log_time:
        return 0.0
    summary = simulate(replace(s, checkpoint=None, jitter=None, operations=None)).summary
    uses = summary.evaluation, summary.logging
    return sum(use.each_s / use.every for use in uses if use is not None)


def _one_checkpoint(s: Scenario) -> SaveUse:
    """Return what a checkpoint takes that no other one is in the way of, and what a restore."""
    assert s.checkpoint is not None  # checked by the scenario
    save = replace(s.checkpoint, every=None, restore=True)
    alone = replace(_between_checkpoints(s), checkpoint=save, jitter=None)
    use = simulate(alone).summary.checkpoint
    assert use is not None
    return use


def _with_times(c: Checkpoint, s: Scenario, saved: SaveUse) -> Checkpoint:
    """Return a checkpoint that takes what a simulated one did, where nothing else is stated."""
    assert s.checkpoint is not None
    is_asynchronous = s.checkpoint.asynchronous
    times: dict[str, Any] = {"state": c.state or saved.state_bytes}
    times["write_time"] = saved.write_s if is_asynchronous else max(0.0, saved.blocked_s)
    if c.restore_time is None and c.read_bandwidth is None:
        times["restore_time"] = saved.restore_s
    if is_asynchronous and c.snapshot_time is None and c.snapshot_bandwidth is None:
        times["snapshot_time"] = max(0.0, saved.blocked_s)
    return replace(c, asynchronous=is_asynchronous, **times)


def _step_times(ops: Operations, result: Result | None, jobs: int | None) -> tuple[float, ...]:
    """Return the seconds of steps with nothing wrong, stated, simulated, or under jitter."""
    if result is None:
        assert ops.step_time is not None
        return (ops.step_time,)
    assert result.scenario is not None
    if result.scenario.jitter is None:
        return (result.step_time_s,)
    return tuple((step_ticks(result, jobs=jobs) / TICKS_PER_SECOND).tolist())


def _samples(
    job: Job, ops: Operations, size: tuple[int, int], engine: EngineName, seeds: range
) -> Outcome:
    """Return what becomes of a job on so many devices and nodes in the samples of some seeds."""
    return ENGINES[engine](job, happenings(ops, *size, seeds), first_steps(job, seeds))


def first_steps(job: Job, seeds: range) -> Int64:
    """Return which of the times of steps each sample begins with, so that they differ."""
    return np.array(seeds, np.int64) % len(job.steps)


def _saves(job: Job, seeds: int) -> float:
    """Return how many checkpoints there are in all samples at most.

    Raises:
        DescriptionError: when they would take more than minutes.
    """
    step = sum(job.steps) / len(job.steps)
    saves = job.duration / (job.interval * step + job.blocked) * seeds
    if saves > MOST_CHECKPOINTS:
        raise DescriptionError(
            f"operations.checkpoint.interval: {saves:.3g} checkpoints in {seeds:,} samples are too "
            f"many (at most {MOST_CHECKPOINTS:.0e}); take fewer --seeds or --days, or a longer one"
        )
    return saves


def run_all(job: Job, breaks: Happenings, first: Int64 | None = None) -> Outcome:
    """Return what becomes of a job in every sample, by the compiled engine.

    Args:
        job: what runs.
        breaks: what happens to it.
        first: which of the times of steps each sample begins with; the first one when absent.
    """
    from simulator.kernels.operations import operate_days

    out = _empty(len(breaks.offset) - 1, job)
    numbers = (
        job.duration, job.interval, job.blocked, job.drain, job.restore, job.restart,
        job.rescheduling, job.spares,
    )  # fmt: skip
    slow = job.names.index(SLOW_NODE) if SLOW_NODE in job.names else len(job.names)
    work = len(breaks.tick) + len(out.ticks) * (job.duration // (min(job.steps) * job.interval) + 1)
    first = np.zeros(len(out.ticks), np.int64) if first is None else first
    operate_days(
        10 * work, *breaks, first, numbers, job.asynchronous, *job.columns, slow, PHASES, *out,
    )  # fmt: skip
    return out


def run_all_reference(job: Job, breaks: Happenings, first: Int64 | None = None) -> Outcome:
    """Return the same by SimPy's processes."""
    from simulator.operate.reference import run_reference

    out = _empty(len(breaks.offset) - 1, job)
    for k in range(len(out.ticks)):
        sample = run_reference(job, breaks.of(k), 0 if first is None else int(first[k]))
        out.ticks[k] = sample.ticks
        out.interruptions[k] = sample.interruptions
        out.progress[k] = sample.steps, sample.shares, sample.checkpoints
    return out


ENGINES = {"compiled": run_all, "reference": run_all_reference}


def _empty(samples: int, job: Job) -> Outcome:
    def zeros(columns: int) -> Int64:
        return np.zeros((samples, columns), np.int64)

    return Outcome(zeros(len(CATEGORIES)), zeros(len(job.names)), zeros(3))
