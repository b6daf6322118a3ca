"""What a run does between steps from time to time: evaluation, logging."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from simulator.describe.fields import Count, validate
from simulator.schedules import schedule_of
from simulator.schedules.layout import layout_of

if TYPE_CHECKING:
    from simulator.describe.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Passes forward over held-out samples, in which nothing is learned."""

    batches: Count
    """Microbatches of each replica."""
    every: Count
    """Steps from one evaluation to the next, the first before this one; where so many are not
    simulated, one is before the last of them, as in every so many."""

    def __post_init__(self) -> None:
        validate(self)


def due(every: int, num_steps: int) -> list[int]:
    """Return the steps before which something is done in every so many, at least before the last.

    Steps count from 0; nothing comes before the first.
    """
    return list(range(every, num_steps, every)) or [num_steps - 1]


def between_problems(s: Scenario) -> Iterator[str]:
    """Say what of evaluation and logging does not fit the rest."""
    run, plan = s.run, s.plan
    if run.log_every is not None and not run.log_time:
        yield (
            f'run.log_every {run.log_every}: logging takes run.log_time "0 s"; say how long the '
            "host takes, or leave it out"
        )
    wanted = {"evaluation": s.evaluation is not None, "run.log_time": bool(run.log_time)}
    for name in (name for name, is_there in wanted.items() if is_there):
        if run.num_steps < 2:
            yield f"{name}: is between two steps, and run.num_steps is 1; set run.num_steps = 2"
        overlapping = plan.staleness is not None or "PipeDream" in str(plan.schedule)
        if overlapping:
            why = (
                "plan.staleness" if plan.staleness is not None
                else f"plan.schedule {plan.schedule!r}"
            )  # fmt: skip
            yield f"{name}: with {why} no moment lies between two steps of all ranks; leave it out"
    if s.evaluation is None:
        return
    if plan.offload_activations:
        yield (
            "evaluation: with plan.offload_activations forwards send to the host what backward "
            "needs, which evaluation does not; leave one of them out"
        )


def copies_problem(s: Scenario) -> Iterator[str]:
    """Say that an evaluation cannot be dealt out to two ranks that hold the same stage.

    Asked of scenarios whose schedule can be made in their size.
    """
    plan = s.plan
    if s.evaluation is None:
        return
    held = layout_of(
        schedule_of(plan.schedule), plan.pp, s.num_microbatches, plan.chunks, plan.microbatch_group,
        s.target,
    )  # fmt: skip
    if held.copies > 1:
        yield (
            f"evaluation: under plan.schedule {plan.schedule!r} two ranks hold each stage, and "
            "which of them evaluates what is not modelled; take another schedule"
        )
