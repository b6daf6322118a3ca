"""The table of schedules by name, and the sizes that each one takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import count

from simulator.budget import require
from simulator.errors import DescriptionError, suggestion
from simulator.schedules.action import Actions
from simulator.schedules.basic import gpipe, interleaved_1f1b, naive, one_f_one_b, rounds_of
from simulator.schedules.check import check_actions

PLAIN: dict[str, Callable[[int, int], Actions]] = {
    "naive": naive,
    "GPipe": gpipe,
    "1F1B": one_f_one_b,
}
"""Schedules of one stage a rank, by name: functions of (stages, microbatches)."""

CHUNKED: dict[str, Callable[[int, int, int], Actions]] = {"Interleaved1F1B": interleaved_1f1b}
"""Schedules of several stages a rank, by name: functions of (ranks, microbatches, chunks)."""

SCHEDULES: Mapping[str, Callable[..., Actions]] = PLAIN | CHUNKED
"""All schedules, as torch.distributed.pipelining names them; add a function to add one."""


def _filled(ranks: int, microbatches: int, chunks: int) -> float:
    """Return the bubble fraction of a pipeline that waits only for its first microbatch.

    (p-1)/(v m + p-1) for m >= p; with fewer, a chunk waits for the first microbatch to come round.
    """
    work = chunks * microbatches
    return 1 - work / (chunks * max(microbatches, ranks) + min(microbatches, ranks) - 1)


BUBBLE_FRACTION = dict.fromkeys(("GPipe", "1F1B", "Interleaved1F1B"), _filled)
"""Bubble fraction for equal stages and free messages, of schedules where it falls with m,
from (ranks, microbatches, chunks)."""


def schedule_name(name: str) -> str:
    """Return the registered spelling of a schedule's name, whatever its case.

    Raises:
        DescriptionError: when there is none.
    """
    by_lower = {known.lower(): known for known in SCHEDULES}
    if name.lower() not in by_lower:
        raise DescriptionError(
            f"schedule {name!r} is not one of {', '.join(SCHEDULES)}{suggestion(name, SCHEDULES)}"
        )
    return by_lower[name.lower()]


def size_complaint(name: str, ranks: int, microbatches: int, chunks: int) -> str | None:
    """Return why a registered schedule cannot be made in a size, or None where it can."""
    if name not in CHUNKED:
        takers = ", ".join(CHUNKED)
        return f"{name} takes one chunk a rank, not {chunks}; use {takers}" if chunks > 1 else None
    if chunks < 2:
        return f"{name} needs at least 2 chunks a rank, not {chunks}; with one chunk use 1F1B"
    rounds = rounds_of(ranks, microbatches)
    if microbatches % rounds == 0:
        return None
    below, above = (
        next(m for m in count(microbatches, step) if m % rounds_of(ranks, m) == 0)
        for step in (-1, 1)
    )
    return (
        f"{name} takes {microbatches} microbatches through {ranks} ranks in {microbatches} // "
        f"{ranks} = {rounds} rounds, which do not divide them; {below} or {above} would do"
    )


@lru_cache(maxsize=64)
def actions_of(name: str, ranks: int, microbatches: int, chunks: int = 1) -> Actions:
    """Return the checked action lists of a registered schedule, without communication.

    Raises:
        DescriptionError: when there is no such schedule, not of this size, or it is too large for
            this machine.
    """
    name = schedule_name(name)
    complaint = size_complaint(name, ranks, microbatches, chunks)
    if complaint:
        raise DescriptionError(complaint)
    what = f"a schedule of {microbatches:,} microbatches on {ranks * chunks} stages"
    require(1500.0 * ranks * chunks * microbatches, what, "take fewer, larger microbatches")
    size = (ranks, microbatches, chunks) if name in CHUNKED else (ranks, microbatches)
    actions = SCHEDULES[name](*size)
    check_actions(actions)
    return actions
