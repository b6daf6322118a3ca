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
    return layout_of(
        schedule_of(plan.schedule), plan.pp, s.num_microbatches, plan.chunks,
        plan.microbatch_group, s.target,
    )  # fmt: skip


def is_summed(s: Scenario) -> bool:
    """Return whether several ranks hold the same weights, so that gradients are summed."""
    return s.plan.replicas > 1 or layout(s).copies > 1
