"""Schedules by name, and the sizes that each one takes."""

from __future__ import annotations

from functools import lru_cache

from simulator.budget import require
from simulator.errors import DescriptionError, suggestion
from simulator.schedules.action import Actions
from simulator.schedules.check import check_actions
from simulator.schedules.deadlock import check_progress
from simulator.schedules.rows import SCHEDULES
from simulator.schedules.schedule import Schedule
from simulator.schedules.times import Target
from simulator.schedules.user import check_size, file_schedule, is_file


def schedule_name(name: str) -> str:
    """Return the registered spelling of a schedule's name, whatever its case, or a file's path.

    Raises:
        DescriptionError: when there is none, or what is wrong with the CSV file.
        DeadlockError: when the lists of the file wait for each other.
    """
    if name in SCHEDULES:
        return name
    if is_file(name):
        file_schedule(name)
        return name
    by_lower = {known.lower(): known for known in SCHEDULES}
    if name.lower() not in by_lower:
        raise DescriptionError(
            f"schedule {name!r} is not one of {', '.join(SCHEDULES)}{suggestion(name, SCHEDULES)}; "
            "a file of lists ends in .csv"
        )
    return by_lower[name.lower()]


def schedule_of(name: str) -> Schedule:
    """Return what is known of a schedule, by a name in any case or the path of a CSV file.

    Raises:
        DescriptionError: when there is none, or what is wrong with the file.
        DeadlockError: when the lists of the file wait for each other.
    """
    known = SCHEDULES.get(name)
    if known is not None:
        return known
    return file_schedule(name) if is_file(name) else SCHEDULES[schedule_name(name)]


def copies_of(name: str) -> int:
    """Return how many ranks hold each stage of a schedule; 1 where there is no such schedule."""
    try:
        return schedule_of(name).copies
    except DescriptionError:
        return 1


def size_complaint(
    name: str, ranks: int, microbatches: int, chunks: int, group: int | None = None
) -> str | None:
    """Return why a registered schedule cannot be made in a size, or None where it can."""
    schedule = schedule_of(name)
    least, most = schedule.chunks
    if chunks < least or (most is not None and chunks > most):
        return f"{name} {_wanted(least, most, chunks)}"
    if group is not None and "group" not in schedule.takes:
        takers = ", ".join(known for known, s in SCHEDULES.items() if "group" in s.takes)
        return f"{name} has no rounds of {group} microbatches; microbatch_group is for {takers}"
    if schedule.size not in (None, (ranks, microbatches)):
        held_ranks, held = schedule.size
        return (
            f"{name} is of {held_ranks} ranks and {held} microbatches, not of {ranks} and "
            f"{microbatches}"
        )
    if schedule.complaint is None:
        return None
    complaint = schedule.complaint(ranks, microbatches, chunks, group)
    return f"{name} {complaint}" if complaint else None


def _wanted(least: int, most: int | None, chunks: int) -> str:
    if most == 1:
        takers = ", ".join(name for name, s in SCHEDULES.items() if s.chunks[1] is None)
        return f"takes one chunk a rank, not {chunks}; use {takers}"
    if most is None:
        return f"needs at least {least} chunks a rank, not {chunks}; with one chunk use 1F1B"
    return f"takes {least} chunks a rank, not {chunks}"


def actions_of(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    *,
    group: int | None = None,
    target: Target | None = None,
) -> Actions:
    """Return the checked action lists of a registered schedule, without communication.

    Args:
        name: of the schedule, whatever its case.
        ranks: of the pipeline.
        microbatches: of one step.
        chunks: stages of each rank; the fewest that the schedule takes when absent.
        group: microbatches of a round, of schedules that go in rounds.
        target: times and memory, of schedules that are made to measure; `Target()` when absent.

    Raises:
        DescriptionError: when there is no such schedule, not of this size, or it is too large for
            this machine.
    """
    name = schedule_name(name)
    schedule = schedule_of(name)
    chunks = schedule.chunks[0] if chunks is None else chunks
    complaint = size_complaint(name, ranks, microbatches, chunks, group)
    if complaint:
        raise DescriptionError(complaint)
    target = target if "target" in schedule.takes else None
    return lists_of(schedule, ranks, microbatches, chunks, group, target)


@lru_cache(maxsize=64)
def lists_of(
    schedule: Schedule, ranks: int, microbatches: int, chunks: int,
    group: int | None = None, target: Target | None = None,
) -> Actions:  # fmt: skip
    """Return the checked action lists of a schedule in a size that it takes."""
    what = f"a schedule of {microbatches:,} microbatches on {ranks * chunks} stages"
    require(1500.0 * ranks * chunks * microbatches, what, "take fewer, larger microbatches")
    varies = schedule.chunks[0] != schedule.chunks[1]
    size = (ranks, microbatches, chunks) if varies else (ranks, microbatches)
    options = {"group": group, "target": target or Target()}
    actions = schedule.make(*size, **{key: options[key] for key in schedule.takes})
    check_actions(actions)
    if schedule.foreign:
        check_size(actions, ranks, microbatches, ranks * chunks // schedule.copies)
        check_progress(actions)
    return actions
