"""The two verbs of the library: simulate a scenario, simulate a bare schedule."""

from __future__ import annotations

from simulator.describe.scenario import Scenario
from simulator.engine import run
from simulator.errors import DescriptionError
from simulator.hardware import price
from simulator.lower import Actions, lower, lower_schedule
from simulator.report.result import Result
from simulator.schedules import actions_of


def simulate(scenario: Scenario, *, engine: str = "reference") -> Result:
    """Run a scenario and return its result.

    Raises:
        DescriptionError: when the scenario names a schedule that does not exist.
        ProgramError: when the program cannot run; it says which ranks and ops.
    """
    program = lower(scenario)
    timeline = run(program, price(program, scenario.cluster), engine)
    notes = pipeline_notes(scenario.plan.pp, scenario.num_microbatches)
    return Result(program, timeline, scenario, notes)


def simulate_schedule(
    schedule: str | Actions,
    *,
    stages: int | None = None,
    microbatches: int | None = None,
    forward: float = 1.0,
    backward: float = 2.0,
    latency: float = 0.0,
    engine: str = "reference",
) -> Result:
    """Run a schedule whose stages all take the same stated times.

    Args:
        schedule: a registered name with `stages` and `microbatches`, or action lists by rank.
        stages: pipeline stages, for a name.
        microbatches: microbatches of one step, for a name.
        forward: seconds of a forward of one microbatch on one stage.
        backward: seconds of its backward.
        latency: seconds of a message between neighbouring stages.
        engine: a key of `simulator.engine.ENGINES`.

    Raises:
        DescriptionError: when an argument is missing or out of range.
        ScheduleError: when action lists are not a legal schedule.
        DeadlockError: when ranks wait for each other's messages.
    """
    problems = [
        f"{name} {value:g} must be at least 0"
        for name, value in (("forward", forward), ("backward", backward), ("latency", latency))
        if not value >= 0
    ]
    for name, count in (("stages", stages), ("microbatches", microbatches)):
        if isinstance(schedule, str) and (count is None or count < 1):
            problems.append(f"{name} {count} must be at least 1")
    if problems:
        raise DescriptionError(problems)
    notes: tuple[str, ...] = ()
    if isinstance(schedule, str):
        assert stages is not None  # checked above
        assert microbatches is not None
        schedule, notes = (
            actions_of(schedule, stages, microbatches),
            pipeline_notes(stages, microbatches),
        )
    program = lower_schedule(schedule, forward=forward, backward=backward, latency=latency)
    return Result(program, run(program, price(program), engine), None, notes)


def pipeline_notes(stages: int, microbatches: int) -> tuple[str, ...]:
    """Return a warning when a pipeline has fewer microbatches than stages."""
    if microbatches >= stages:
        return ()
    now, better = ((stages - 1) / (m + stages - 1) for m in (microbatches, 4 * stages))
    return (
        f"{microbatches} microbatches on {stages} stages (M<P): bubble {now:.1%}; "
        f"use M>={4 * stages} for <={better:.1%}",
    )
