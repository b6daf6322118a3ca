"""What evaluations and logging keep training from, each time and in the long run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from simulator.describe.between import due
from simulator.describe.scenario import Scenario
from simulator.units import format_seconds, to_seconds

if TYPE_CHECKING:
    from simulator.report.result import Result


@dataclass(frozen=True, slots=True, kw_only=True)
class BetweenUse:
    """What is done between steps, and what it costs."""

    every: int
    """Steps from one to the next."""
    count: int
    """How often it was done in the steps that were simulated."""
    each_s: float
    """How much longer the steps after the first take for it than without any, mean of them."""
    long_run_share: float
    """Share of the time of training that it takes where it is done in every so many steps."""


def between_use(result: Result, every: int | None, plain_s: float | None) -> BetweenUse | None:
    """Return what something that is done in every so many steps costs; None where there is none.

    `plain_s` are seconds from the first step's end to the last one's without it.
    """
    if every is None or plain_s is None:
        return None
    ends = result.step_ends
    count = len(due(every, len(ends)))
    each = (to_seconds(int(ends[-1] - ends[0])) - plain_s) / count
    step = plain_s / (len(ends) - 1)
    return BetweenUse(
        every=every, count=count, each_s=each, long_run_share=each / (each + every * step)
    )


def evaluation_use(result: Result, s: Scenario) -> BetweenUse | None:
    """Return what evaluations cost, if there are any."""
    every = None if s.evaluation is None else s.evaluation.every
    return between_use(result, every, result.without_evaluation_s)


def log_use(result: Result, s: Scenario) -> BetweenUse | None:
    """Return what logging costs, if there is any."""
    every = (s.run.log_every or 1) if s.run.log_time else None
    return between_use(result, every, result.without_log_s)


def between_lines(result: Result, s: Scenario) -> list[str]:
    """Return the lines of the report on what is done between steps."""
    summary, out = result.summary, []
    if s.evaluation is not None and summary.evaluation is not None:
        what = f"{s.evaluation.batches} batches of {s.plan.microbatch_size} on each replica"
        out.append(f"  evaluation  {what}: {_cost(summary.evaluation)}")
    if summary.logging is not None:
        out.append(f"  logging     {_cost(summary.logging)}")
    return out


def _cost(use: BetweenUse) -> str:
    how_often = "every step" if use.every == 1 else f"every {use.every:,} steps"
    return (
        f"training is {format_seconds(use.each_s)} longer for each, {use.long_run_share:.2%} of it "
        f"when done {how_often}"
    )


def between_notes(result: Result) -> tuple[str, ...]:
    """Return a warning when the last step has something in it that most steps have not."""
    s = result.scenario
    if s is None or (result.without_evaluation_s is None and result.without_log_s is None):
        return ()  # a summary for nothing costs a sweep a quarter of its time
    uses = {"an evaluation": result.summary.evaluation, "logging": result.summary.logging}
    return tuple(
        f"the step that is reported has {name} before it, as one in {use.every:,} has"
        for name, use in uses.items()
        if use is not None and use.every > 1 and s.run.num_steps - 1 in due(
            use.every, s.run.num_steps)
    )  # fmt: skip


def between_assumptions(s: Scenario) -> list[str]:
    """Return what was assumed of what is done between steps."""
    out = []
    if s.evaluation is not None:
        loads = "the same loader brings their samples" if s.data else "their samples are there"
        out.append(
            "evaluations are forwards of plan.microbatch_size samples, with dropout as in "
            f"training, in rounds of as many as the pipeline has ranks; {loads}; they keep "
            "nothing, so that they need less memory than a step"
        )
    if s.run.log_time:
        out.append("a host that logs waits for its rank's step, and its rank for it")
    return out
