"""The table of schedules by name, and the sizes that each one takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from simulator.budget import require
from simulator.errors import DescriptionError, suggestion
from simulator.schedules.action import Actions
from simulator.schedules.automatic import zb_auto
from simulator.schedules.basic import (
    gpipe,
    interleaved_1f1b,
    interleaved_complaint,
    naive,
    one_f_one_b,
)  # fmt: skip
from simulator.schedules.check import check_actions
from simulator.schedules.times import Target
from simulator.schedules.vshape import v_half, v_min


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """What is known of a schedule: its function, the sizes it takes, and its closed forms."""

    make: Callable[..., Actions]
    """Function of (ranks, microbatches), then chunks where they vary, then `takes` by keyword."""
    chunks: tuple[int, int | None] = (1, 1)
    """Fewest and most stages of a rank; None for no most."""
    copies: int = 1
    """Ranks that hold each stage; 2 where microbatches enter from both ends."""
    takes: tuple[str, ...] = ()
    """Options of the function: `group` (microbatches of a round), `target` (a `Target`)."""
    complaint: Callable[[int, int, int, int | None], str | None] | None = None
    """Why (ranks, microbatches, chunks, group) cannot be made, or None where it can."""
    bubble: Callable[[float, float, float, int, int, int], float] | None = None
    """Idle seconds, between its first and last action, of the rank that idles most, for free
    messages and microbatches enough, from seconds of F, I and W of one stage, ranks, microbatches
    and chunks."""
    kept: Callable[[int, int, int], tuple[int, ...]] | None = None
    """Most stage activations that each rank keeps, from ranks, microbatches and chunks."""
    note: str = ""
    """What a reader of its results must know."""


def _drained(f: float, i: float, w: float, p: int, m: int, v: int) -> float:
    return (p - 1) * (f + i + w)


V_NOTE = "ordered for F = I = W of every stage; gaps stay where these differ"

SCHEDULES: dict[str, Schedule] = {
    "naive": Schedule(
        naive,
        bubble=lambda f, i, w, p, m, v: m * (p - 1) * (f + i + w),
        kept=lambda p, m, v: (1,) * p,
    ),
    "GPipe": Schedule(gpipe, bubble=_drained, kept=lambda p, m, v: (m,) * p),
    "1F1B": Schedule(
        one_f_one_b,
        bubble=_drained,
        kept=lambda p, m, v: tuple(min(p - r, m) for r in range(p)),
    ),
    "Interleaved1F1B": Schedule(
        interleaved_1f1b,
        chunks=(2, None),
        takes=("group",),
        complaint=interleaved_complaint,
        bubble=_drained,
        kept=lambda p, m, v: tuple(min(2 * (p - r - 1) + (v - 1) * p + 1, v * m) for r in range(p)),
    ),
    "ZB-auto": Schedule(
        zb_auto,
        takes=("target",),
        note="ordered by a heuristic for stated times and memory",
    ),
    "V-Half": Schedule(v_half, chunks=(2, 2), note=V_NOTE),
    "V-Min": Schedule(v_min, chunks=(2, 2), note=V_NOTE),
}
"""All schedules, as torch.distributed.pipelining names them; add a function and a row for one."""


def _filled(ranks: int, microbatches: int, chunks: int) -> float:
    """Return the bubble fraction of a pipeline that waits only for its first microbatch.

    (p-1)/(v m + p-1) for m >= p; with fewer, a chunk waits for the first microbatch to come round.
    """
    work = chunks * microbatches
    return 1 - work / (chunks * max(microbatches, ranks) + min(microbatches, ranks) - 1)


BUBBLE_FRACTION: Mapping[str, Callable[[int, int, int], float]] = dict.fromkeys(
    ("GPipe", "1F1B", "Interleaved1F1B"), _filled
)
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


def schedule_of(name: str) -> Schedule:
    """Return what is known of a schedule, whatever the case of its name.

    Raises:
        DescriptionError: when there is none.
    """
    return SCHEDULES[schedule_name(name)]


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
    schedule = SCHEDULES[name]
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
    return actions
