"""What a schedule was made for, and what a reader of its results must know."""

from __future__ import annotations

from simulator.describe.scenario import Scenario
from simulator.schedules import schedule_name, schedule_of


def schedule_assumptions(s: Scenario) -> list[str]:
    """Return what was assumed of the pipeline schedule."""
    plan = s.plan
    schedule = schedule_of(plan.schedule)
    if "target" not in schedule.takes:
        return [f"{schedule_name(plan.schedule)}: {schedule.note}"] if schedule.note else []
    target = s.target
    times = "plan.schedule_times"
    if plan.schedule_times is None:
        times = "F, I and W of one time on all stages and free messages (plan.schedule_times)"
    kept = "whole" if target.kept == 1 else f"{target.kept:.3g} of it"
    end = "of all ranks' step together" if target.synchronous else "of the slowest rank's own step"
    return [
        f"{schedule_name(plan.schedule)} is ordered by a heuristic for {times} and the least time "
        f"{end}; a rank keeps at most {target.memory * plan.pp:.4g} microbatches' activations "
        f"(plan.schedule_memory {target.memory:g}), {kept} from I to W (plan.schedule_kept)"
    ]
