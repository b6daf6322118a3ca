"""What the papers say of a schedule, beside what its simulation shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from simulator.schedules import SCHEDULES, Case, schedule_of
from simulator.units import to_seconds

if TYPE_CHECKING:
    from simulator.report.result import Result


def schedules_text() -> str:
    """Return the names of all schedules, each with what it is, its bubble and its memory."""
    width = max(map(len, SCHEDULES)) + 2
    lines = []
    for name, schedule in SCHEDULES.items():
        about = (schedule.make.__doc__ or "").strip().partition("\n")[0]
        lines.append(f"{name:<{width}}{about}")
        forms = [("bubble", schedule.bubble), ("kept", schedule.kept)]
        said = "; ".join(f"{word} {form}" for word, form in forms if form)
        lines += [f"{'':<{width}}{said}"] if said else []
    legend = (
        "p ranks, m microbatches, v stages of a rank r; of one stage: seconds F, I, W, B = I + W "
        "and F&B of a pair;\nbubble: idle seconds of the rank that idles most; kept: activations "
        "of one stage for one microbatch"
    )
    return "\n".join([*lines, "", legend])


def forms_text(
    result: Result, name: str, size: tuple[int, int, int | None], times: Mapping[str, float | None]
) -> str:
    """Return lines on the bubble and the memory that a schedule's paper states, and on its note.

    Args:
        result: of `simulate_schedule`.
        name: of the schedule.
        size: ranks, microbatches and chunks.
        times: `forward`, `backward`, `input_grad` and `pair` as `simulate_schedule` takes them.
    """
    schedule = schedule_of(name)
    ranks, microbatches, chunks = size
    chunks = chunks or schedule.chunks[0]
    stages = chunks / schedule.copies  # of a rank, among which it divides its times
    forward, backward = times["forward"] or 0.0, times["backward"] or 0.0
    first, pair = times.get("input_grad"), times.get("pair")
    first = backward / 2 if first is None else first
    case = Case(
        ranks, microbatches, chunks, forward / stages, first / stages, (backward - first) / stages,
        None if pair is None else pair / stages,
    )  # fmt: skip
    lines = []
    if bubble := schedule.bubble:
        held = f"{bubble.value(case):g} s" if bubble.holds(case) else "not in this case"
        lines.append(
            f"idle of the rank that idles most: {_most_idle(result, bubble.to_the_end):g} s; "
            f"paper: {bubble} with free messages: {held}"
        )
    if kept := schedule.kept:
        held = "not in this case"
        if kept.holds(case):
            held = " ".join(map(str, kept.value(case)))
        lines.append(f"activations of one stage kept by rank, paper: {kept}: {held}")
    if schedule.note:
        lines.append(f"note: {schedule.note}")
    return "".join(f"\n{line}" for line in lines)


def _most_idle(result: Result, to_the_end: bool) -> float:
    """Return the idle seconds of the rank that idles most: between its own ends, or all ranks'."""
    p, t = result.program, result.timeline
    ops = np.flatnonzero((p.stream == p.streams.index("compute")) & (t.end > t.start))
    first = np.full(p.num_ranks, t.makespan, np.int64)
    last, busy = np.zeros(p.num_ranks, np.int64), np.zeros(p.num_ranks, np.int64)
    np.minimum.at(first, p.rank[ops], t.start[ops])
    np.maximum.at(last, p.rank[ops], t.end[ops])
    np.add.at(busy, p.rank[ops], t.end[ops] - t.start[ops])
    span = last.max() if to_the_end else last - first
    return to_seconds(int((span - busy).max()))
