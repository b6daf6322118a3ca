"""The two verbs of the library: simulate a scenario, simulate a bare schedule."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from simulator.cuts import resolved
from simulator.describe.scenario import Scenario
from simulator.engine import Folding, run
from simulator.engine.stretch import fold_slowed, run_stretched
from simulator.errors import DescriptionError
from simulator.hardware import price
from simulator.hardware.overlap import slowed
from simulator.hardware.placement import devices
from simulator.hardware.sizes import differ, of_sizes
from simulator.hardware.taken import moving, taken
from simulator.lower import Actions, lower, lower_schedule
from simulator.program import Int64, Program
from simulator.report.beside import slowed_seconds
from simulator.report.between import between_notes
from simulator.report.data import data_notes
from simulator.report.host import host_notes
from simulator.report.result import Moves, Result
from simulator.schedules import (
    BUBBLE_FRACTION,
    Target,
    Times,
    actions_of,
    check_actions,
    check_progress,
    is_file,
    read_actions,
    schedule_name,
    schedule_of,
)
from simulator.units import format_seconds, to_seconds, to_ticks


def simulate(
    scenario: Scenario,
    *,
    engine: str = "compiled",
    folded: bool = True,
    repriced: Callable[[Program, Int64], Int64] | None = None,
) -> Result:
    """Run a scenario and return its result.

    Args:
        scenario: what to simulate.
        engine: one of `simulator.engine.ENGINES`; all give the same times.
        folded: whether one rank may stand for others that provably run alike.
        repriced: ticks of every op in place of those that it is given with the program, of what is
            not there to be described: messages that take no time, stages that take the same.

    Raises:
        DescriptionError: when the scenario is too large for this machine or for the clock.
        ProgramError: when the program cannot run; it says which ranks and ops.
    """
    scenario = resolved(scenario)
    result = _simulated(scenario, engine, folded, repriced)
    if scenario.data is not None and result.breakdown.of("data").any():
        there = _simulated(replace(scenario, data=None, jitter=None), "compiled", folded, repriced)
        result = replace(result, without_data_s=there.step_time_s)
    for name, without in _without(scenario).items():
        ends = _simulated(without, "compiled", folded, repriced).step_ends
        seconds: dict[str, Any] = {name: to_seconds(int(ends[-1] - ends[0]))}
        result = replace(result, **seconds)
    own = (
        pace_notes(result), data_notes(result), between_notes(result), host_notes(result),
        _first(scenario),
    )  # fmt: skip
    return replace(result, notes=(*result.notes, *chain.from_iterable(own)))


def _without(s: Scenario) -> dict[str, Scenario]:
    """Return the scenario without each thing that it does between steps, by what a result calls its
    time then.
    """
    plain, out = replace(s, jitter=None, operations=None), dict[str, Scenario]()
    if s.checkpoint is not None:
        out["without_save_s"] = replace(plain, checkpoint=None)
    if s.evaluation is not None:
        out["without_evaluation_s"] = replace(plain, evaluation=None)
    if s.run.log_time:
        quiet = replace(s.run, log_time=0.0, log_every=None)
        out["without_log_s"] = replace(plain, run=quiet)
    return out


def _first(scenario: Scenario) -> tuple[str, ...]:
    """Return a warning when the step that is reported is the one with the warm-up."""
    if not scenario.run.warm_up or scenario.run.num_steps > 1:
        return ()
    return ("run.num_steps 1: the step is the first one, run.warm_up with it",)


def _simulated(
    scenario: Scenario,
    engine: str,
    folded: bool,
    repriced: Callable[[Program, Int64], Int64] | None,
) -> Result:
    """Return what one run of a scenario gives, with the notes that need no other run."""
    program = lower(scenario)
    placement = devices(scenario.plan, scenario.cluster)
    ticks = price(program, scenario.cluster, placement)
    if repriced is not None:
        if scenario.run.network == "fluid":
            raise DescriptionError("other prices are for flows that share no links: alpha-beta")
        ticks = repriced(program, ticks)
    traffic = None
    if scenario.run.network == "fluid":
        from simulator.hardware.contention import contended  # builds the fabric

        ticks, traffic = contended(program, ticks, scenario.cluster, placement)
        folded = False  # flows of all replicas meet on links
    if differ(scenario.data):
        ticks, traffic = of_sizes(program, ticks, traffic, scenario)
    folded = folded and engine != "reference"  # which runs every rank
    if traffic is None:
        moves = moving(program, scenario, placement)
        folding = fold_slowed(program, ticks, moves) if folded else Folding.none(program)
        timeline = run_stretched(program, ticks, moves, engine, folding)
        slower = moves is not None
    else:
        folding, shares = Folding.none(program), taken(program, scenario, placement)
        run_as = program, ticks, traffic
        slower = shares is not None
        if shares is not None:
            run_as = slowed(program, ticks, traffic, shares)
        timeline = run(run_as[0], run_as[1], engine, folding, run_as[2])
    plan = scenario.plan
    notes = pipeline_notes(plan.schedule, plan.pp, scenario.num_microbatches, plan.chunks)
    undisturbed = "the step above is the one that jitter does not disturb" * bool(scenario.jitter)
    notes = (*notes, *filter(None, [folding.reason, undisturbed]))
    on_links = Moves(traffic, ticks) if traffic is not None else None
    lost = slowed_seconds(program, ticks, timeline) if slower else 0.0
    return Result(program, timeline, scenario, notes, on_links, slowed_by_communication_s=lost)


def simulate_schedule(
    schedule: str | Actions,
    *,
    stages: int | None = None,
    microbatches: int | None = None,
    chunks: int | None = None,
    microbatch_group: int | None = None,
    forward: float = 1.0,
    backward: float = 2.0,
    input_grad: float | None = None,
    pair: float | None = None,
    latency: float = 0.0,
    memory: float | None = None,
    engine: str = "compiled",
) -> Result:
    """Run a schedule whose stages all take the same stated times.

    Args:
        schedule: a registered name with `stages` and `microbatches`, the path of a CSV file of one
            size, or action lists by rank.
        stages: pipeline stages, for a name; with `chunks`, pipeline ranks of that many stages each.
        microbatches: microbatches of one step, for a name.
        chunks: stages of each rank, for the name of a schedule that takes several; the fewest that
            it takes when absent.
        microbatch_group: microbatches of a round, for the name of a schedule that goes in rounds.
        forward: seconds of a forward of one microbatch on one stage, on all `chunks` of a rank
            together; so a schedule with chunks has the work of one without.
        backward: seconds of its backward, likewise.
        input_grad: of them the seconds of the gradient of the input, where the schedule splits the
            backward; half when absent.
        pair: seconds of a forward and a backward that run together, likewise; those of both when
            absent.
        latency: seconds of a message between neighbouring stages.
        memory: most that a rank may keep, in what 1F1B keeps on its first rank, for the name of a
            schedule that is made to measure (ZB-auto); 1 when absent. It is made for these times.
        engine: a key of `simulator.engine.ENGINES`.

    Raises:
        DescriptionError: when an argument is missing or out of range.
        ScheduleError: when action lists are not a legal schedule.
        DeadlockError: when ranks wait for each other's messages.
    """
    problems = _out_of_range(forward=forward, backward=backward, latency=latency)
    for name, seconds, most in (("input_grad", input_grad, backward), ("pair", pair, math.inf)):
        if not problems and seconds is not None and not 0 <= seconds <= most:
            least = f"at most backward {backward:g}" if name == "input_grad" else "not below 0"
            problems.append(f"{name} {seconds!r} must be at least 0 and {least}")
    if isinstance(schedule, str) and is_file(schedule):
        size = schedule_of(schedule).size
        assert size is not None  # of a file
        stages, microbatches = stages or size[0], microbatches or size[1]
    counts = [("stages", stages), ("microbatches", microbatches)]
    for name, given in (("chunks", chunks), ("microbatch_group", microbatch_group)):
        if given is not None:
            counts.append((name, given))
    for name, count in counts:
        if isinstance(schedule, str) and (type(count) is not int or count < 1):
            problems.append(f"{name} {count!r} must be a whole number and at least 1")
    if not isinstance(schedule, str) and chunks not in (None, 1):
        problems.append(f"chunks {chunks!r} is for the name of a schedule; lists hold their stages")
    if not isinstance(schedule, str) and microbatch_group is not None:
        problems.append(
            f"microbatch_group {microbatch_group!r} is for the name of a schedule with rounds"
        )
    if not isinstance(schedule, str) and memory is not None:
        problems.append(f"memory {memory!r} is for the name of a schedule that is made to measure")
    if problems:
        raise DescriptionError(problems)
    first = backward / 2 if input_grad is None else input_grad
    notes: tuple[str, ...] = ()
    stages_of_rank, title = 1.0, "schedule"
    if isinstance(schedule, str):
        assert stages is not None  # checked above
        assert microbatches is not None
        known = schedule_of(schedule)
        chunks = chunks or known.chunks[0]
        notes = pipeline_notes(schedule, stages, microbatches, chunks)
        title = Path(schedule).name if is_file(schedule) else schedule_name(schedule)
        target = stated_target(schedule, Times(forward, first, backward - first, latency), memory)
        schedule = actions_of(
            schedule, stages, microbatches, chunks, group=microbatch_group, target=target
        )
        stages_of_rank = chunks / known.copies
    else:
        schedule = read_actions(schedule)
        check_actions(schedule)
        check_progress(schedule)
    program = lower_schedule(
        schedule,
        forward=forward / stages_of_rank,
        backward=backward / stages_of_rank,
        input_grad=first / stages_of_rank,
        weight_grad=(backward - first) / stages_of_rank,
        pair=None if pair is None else pair / stages_of_rank,
        latency=latency,
    )
    timeline = run(program, price(program), engine)
    return Result(program, timeline, None, notes, actions=schedule, title=title)


def stated_target(schedule: str, times: Times, memory: float | None) -> Target | None:
    """Return what a schedule of a name is made for, or None where it is the same for all times.

    Raises:
        DescriptionError: when memory is given to a schedule that is not made to measure.
    """
    if "target" in schedule_of(schedule).takes:
        return Target(times, 1.0 if memory is None else memory)
    if memory is not None:
        raise DescriptionError(
            f"memory {memory:g} is for schedules made to measure, as ZB-auto, not {schedule}"
        )
    return None


def _out_of_range(**times: object) -> list[str]:
    """Return what is wrong with stated seconds; a schedule that takes no time says nothing."""
    problems = [
        f"{name} {value!r} must be a number, at least 0 and finite"
        for name, value in times.items()
        if isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not 0 <= value < math.inf
    ]
    if not problems and not any(to_ticks(float(times[name])) for name in ("forward", "backward")):  # type: ignore[arg-type]
        problems.append("forward and backward must not both be 0 (or below a picosecond)")
    return problems


def pace_notes(result: Result) -> tuple[str, ...]:
    """Return a warning when replicas of an asynchronous run still have paces of their own."""
    if not result.is_asynchronous:
        return ()
    first, last = (own.max(axis=0) for own in result.own_windows)
    low, high = (to_seconds(int(t)) for t in ((last - first).min(), (last - first).max()))
    if high < 1.001 * low:
        return ()
    assert result.scenario is not None  # is_asynchronous
    return (
        f"replicas are not in step: their own steps take {format_seconds(low)} to "
        f"{format_seconds(high)}, and the step is a mean of them; in more than run.num_steps = "
        f"{result.scenario.run.num_steps} steps, plan.staleness = "
        f"{result.scenario.plan.staleness} may bring all to the pace of the slowest",
    )


def pipeline_notes(
    schedule: str, stages: int, microbatches: int, chunks: int = 1
) -> tuple[str, ...]:
    """Return a warning when a pipeline has fewer microbatches than stages, and more would help."""
    formula = BUBBLE_FRACTION.get(schedule_name(schedule))
    if microbatches >= stages or formula is None:
        return ()
    now, better = (formula(stages, m, chunks) for m in (microbatches, 4 * stages))
    where = f"{stages} {'ranks' if chunks > 1 else 'stages'}"
    return (
        f"{microbatches} microbatches on {where} (M<P): bubble {now:.1%}; "
        f"use M>={4 * stages} for <={better:.1%}",
    )
