"""The table of schedules by name, and the sizes that each one takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from simulator.budget import require
from simulator.errors import DescriptionError, suggestion
from simulator.schedules.action import Actions
from simulator.schedules.basic import (
    gpipe,
    interleaved_1f1b,
    interleaved_complaint,
    looped_bfs,
    naive,
    one_f_one_b,
    pipe_dream,
)
from simulator.schedules.check import check_actions
from simulator.schedules.formulas import DRAINED, Bubble, Kept, by_rank
from simulator.schedules.two_passes import (
    dual_pipe,
    dual_pipe_complaint,
    dual_pipe_is_exact,
    dual_pipe_v,
    dual_pipe_v_complaint,
    zbv_zero_bubble,
)
from simulator.schedules.zero_bubble import interleaved_zero_bubble, zb_h1, zb_h2


class Times(NamedTuple):
    """Seconds of one microbatch on each stage, and of a message between stages."""

    forward: float | tuple[float, ...] = 1.0
    """One number for all stages alike, or one for each stage; so the next two."""
    input_grad: float | tuple[float, ...] = 1.0
    weight_grad: float | tuple[float, ...] = 1.0
    message: float = 0.0


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
    """Options of the function: `group` (microbatches of a round), `times` (a `Times`)."""
    complaint: Callable[[int, int, int, int | None], str | None] | None = None
    """Why (ranks, microbatches, chunks, group) cannot be made, or None where it can."""
    bubble: Bubble | None = None
    """Idle seconds, between its first and last action, of the rank that idles most, for equal
    stages and free messages; where ranks end at different times, of the last rank's end."""
    kept: Kept | None = None
    """Most stage activations that each rank keeps."""
    note: str = ""
    """What a reader of its results must know."""


SCHEDULES: dict[str, Schedule] = {
    "naive": Schedule(
        naive,
        bubble=Bubble("m(p-1)(F+B)", lambda c: c.m * (c.p - 1) * (c.f + c.b)),
        kept=by_rank("1", lambda c, r: 1),
    ),
    "GPipe": Schedule(gpipe, bubble=DRAINED, kept=by_rank("m", lambda c, r: c.m)),
    "1F1B": Schedule(
        one_f_one_b,
        bubble=DRAINED,
        kept=by_rank("min(p-r, m)", lambda c, r: min(c.p - r, c.m)),
    ),
    "PipeDream": Schedule(
        pipe_dream,
        kept=by_rank("min(p-r, m)", lambda c, r: min(c.p - r, c.m)),
        note="changes semantics: weights are updated after every microbatch, whose backward uses "
        "the version of the weights that its forward used",
    ),
    "Interleaved1F1B": Schedule(
        interleaved_1f1b,
        chunks=(2, None),
        takes=("group",),
        complaint=interleaved_complaint,
        bubble=Bubble(DRAINED.text, DRAINED.value, "m a multiple of p", lambda c: c.m % c.p == 0),
        kept=by_rank(
            "min(2(p-r-1)+(v-1)p+1, vm)",
            lambda c, r: min(2 * (c.p - r - 1) + (c.v - 1) * c.p + 1, c.v * c.m),
            "m a multiple of p",
            lambda c: c.m % c.p == 0,
        ),
    ),
    "LoopedBFS": Schedule(
        looped_bfs,
        chunks=(2, None),
        bubble=Bubble(DRAINED.text, DRAINED.value, "m >= p", lambda c: c.m >= c.p),
        kept=by_rank("vm", lambda c, r: c.v * c.m),
    ),
    "ZB-H1": Schedule(
        zb_h1,
        bubble=Bubble(
            "(p-1)(F+I-W)",
            lambda c: (c.p - 1) * (c.f + c.i - c.w),
            "m >= p and F+I >= W",
            lambda c: c.m >= c.p and c.f + c.i >= c.w,
        ),
        kept=by_rank("min(p, m)", lambda c, r: min(c.p, c.m)),
    ),
    "ZB-H2": Schedule(
        zb_h2,
        bubble=Bubble(
            "(p-1)(F+I-2W)",
            lambda c: (c.p - 1) * (c.f + c.i - 2 * c.w),
            "m >= 2p-1 and F+I >= 2W",
            lambda c: c.m >= 2 * c.p - 1 and c.f + c.i >= 2 * c.w,
        ),
        kept=by_rank("min(2p-1, m)", lambda c, r: min(2 * c.p - 1, c.m)),
    ),
    "InterleavedZeroBubble": Schedule(
        interleaved_zero_bubble,
        chunks=(2, None),
        complaint=interleaved_complaint,
        bubble=Bubble(
            "(p-1)(F+I-W)",
            lambda c: (c.p - 1) * (c.f + c.i - c.w),
            "m a multiple of p and F+I >= W",
            lambda c: c.m % c.p == 0 and c.f + c.i >= c.w,
        ),
        kept=by_rank("vp", lambda c, r: c.v * c.p, "m a multiple of p", lambda c: c.m % c.p == 0),
    ),
    "ZBVZeroBubble": Schedule(
        zbv_zero_bubble,
        chunks=(2, 2),
        bubble=Bubble(
            "0", lambda c: 0.0, "m >= 2p-1 and F = I = W",
            lambda c: c.m >= 2 * c.p - 1 and c.f == c.i == c.w,
        ),
        kept=by_rank("2p", lambda c, r: 2 * c.p, "m >= 2p-1", lambda c: c.m >= 2 * c.p - 1),
    ),
    "DualPipe": Schedule(
        dual_pipe,
        chunks=(2, 2),
        copies=2,
        complaint=dual_pipe_complaint,
        bubble=Bubble(
            "(p/2-1)(F&B+B-3W)",
            lambda c: (c.p / 2 - 1) * (c.pair + c.b - 3 * c.w),
            "F = I >= W and B <= F&B <= F+B",
            dual_pipe_is_exact,
        ),
        kept=by_rank("p+1", lambda c, r: c.p + 1),
    ),
    "DualPipeV": Schedule(
        dual_pipe_v,
        chunks=(2, 2),
        complaint=dual_pipe_v_complaint,
        bubble=Bubble(
            "(p-1)(F&B+B-3W)",
            lambda c: (c.p - 1) * (c.pair + c.b - 3 * c.w),
            "F = I >= W and B <= F&B <= F+B",
            dual_pipe_is_exact,
        ),
        kept=by_rank("2p+1", lambda c, r: 2 * c.p + 1),
    ),
}  # fmt: skip
"""All schedules, as torch.distributed.pipelining names them; add a function and a row for one."""


def _filled(ranks: int, microbatches: int, chunks: int) -> float:
    """Return the bubble fraction of a pipeline that waits only for its first microbatch.

    (p-1)/(v m + p-1) for m >= p; with fewer, a chunk waits for the first microbatch to come round.
    """
    work = chunks * microbatches
    return 1 - work / (chunks * max(microbatches, ranks) + min(microbatches, ranks) - 1)


BUBBLE_FRACTION: Mapping[str, Callable[[int, int, int], float]] = dict.fromkeys(
    ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS"), _filled
)
"""Bubble fraction for equal stages and free messages, of schedules where it falls with m,
from (ranks, microbatches, chunks)."""


def schedule_name(name: str) -> str:
    """Return the registered spelling of a schedule's name, whatever its case.

    Raises:
        DescriptionError: when there is none.
    """
    if name in SCHEDULES:
        return name
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
    times: Times | None = None,
) -> Actions:
    """Return the checked action lists of a registered schedule, without communication.

    Args:
        name: of the schedule, whatever its case.
        ranks: of the pipeline.
        microbatches: of one step.
        chunks: stages of each rank; the fewest that the schedule takes when absent.
        group: microbatches of a round, of schedules that go in rounds.
        times: of the stages, of schedules that are made to measure.

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
    times = times if "times" in schedule.takes else None
    return lists_of(schedule, ranks, microbatches, chunks, group, times)


@lru_cache(maxsize=64)
def lists_of(
    schedule: Schedule, ranks: int, microbatches: int, chunks: int,
    group: int | None = None, times: Times | None = None,
) -> Actions:  # fmt: skip
    """Return the checked action lists of a schedule in a size that it takes."""
    what = f"a schedule of {microbatches:,} microbatches on {ranks * chunks} stages"
    require(1500.0 * ranks * chunks * microbatches, what, "take fewer, larger microbatches")
    varies = schedule.chunks[0] != schedule.chunks[1]
    size = (ranks, microbatches, chunks) if varies else (ranks, microbatches)
    options = {"group": group, "times": times}
    actions = schedule.make(*size, **{key: options[key] for key in schedule.takes})
    check_actions(actions)
    return actions
