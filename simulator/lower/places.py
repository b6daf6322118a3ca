"""Where the stages of a scenario lie: read off the lists of its schedule."""

from __future__ import annotations

from simulator.describe.scenario import Scenario
from simulator.lower.latest import for_latest
from simulator.schedules import schedule_of
from simulator.schedules.layout import Layout, layout_of


@for_latest
def layout(s: Scenario) -> Layout:
    """Return which stages each pipeline rank of a scenario holds."""
    plan = s.plan

    def of(microbatches: int) -> Layout:
        return layout_of(
            schedule_of(plan.schedule), plan.pp, microbatches, plan.chunks, plan.microbatch_group,
            s.target,
        )  # fmt: skip

    found = of(s.num_microbatches)
    return of(microbatches_begun(s)) if found.updates else found


def microbatches_begun(s: Scenario) -> int:
    """Return the microbatches of a run without flush: its steps', and some that stay in flight."""
    return s.num_microbatches * s.run.num_steps + s.plan.pp


def is_summed(s: Scenario) -> bool:
    """Return whether several ranks hold the same weights, so that gradients are summed."""
    return s.plan.replicas > 1 or layout(s).copies > 1
