"""What a plan's schedule is made for, of schedules that are made to measure."""

from __future__ import annotations

from collections.abc import Iterator

from simulator.describe.plan import Plan
from simulator.describe.run import Run
from simulator.errors import DescriptionError
from simulator.schedules.rows import SCHEDULES
from simulator.schedules.table import schedule_of
from simulator.schedules.times import Target


def target_of(plan: Plan, run: Run) -> Target | None:
    """Return what the schedule is made for, or None where it is the same for all times.

    Unless a norm or an overflow of all ranks is waited for, ranks are measured one by one: where
    they make several steps each begins the next one when it is done.
    """
    if "target" not in schedule_of(plan.schedule).takes:
        return None
    plain = Target()
    waits = (run.clip_grad or run.scales_loss) and not plan.post_validation
    return Target(
        plain.times if plan.schedule_times is None else plan.schedule_times.times,
        plain.memory if plan.schedule_memory is None else plan.schedule_memory,
        plain.kept if plan.schedule_kept is None else plan.schedule_kept,
        synchronous=waits or run.num_steps == 1,
    )


def target_problems(plan: Plan) -> Iterator[str]:
    """Say which times and memory to make a known schedule for have no effect or no sense."""
    if "target" not in schedule_of(plan.schedule).takes:
        takers = ", ".join(name for name, s in SCHEDULES.items() if "target" in s.takes)
        for field in ("schedule_times", "schedule_memory", "schedule_kept"):
            if getattr(plan, field) is not None:
                yield (
                    f"plan.{field} is for schedules made to measure, {takers}, not {plan.schedule}"
                )
        return
    memory = plan.schedule_memory
    if memory is not None and memory * plan.pp < 1:
        yield (
            f"plan.schedule_memory {memory:g} x plan.pp {plan.pp} = {memory * plan.pp:g} holds not "
            f"one microbatch; it must be at least {1 / plan.pp:.3g}"
        )
    if plan.schedule_times is not None:
        try:
            plan.schedule_times.times.by_stage(plan.num_stages)
        except DescriptionError as error:
            yield from (f"plan.schedule_times.{problem}" for problem in error.problems)
