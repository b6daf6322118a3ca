"""When work ends that stands still from time to time."""

from __future__ import annotations


def resumed(start: int, ticks: int, period: int, duration: int, phase: int) -> int:
    """Return when work of some ticks ends that stands still `duration` ticks in each `period`.

    Pauses begin at `phase`, a period before it, a period after it and so on. Work that ends as a
    pause begins is not held by it. Count the ticks in which work goes on, from `phase` to the
    start; add those of the work: w. It ends when w of them have gone by, after as many pauses as
    there are stretches of work begun.
    """
    if ticks == 0:
        return start
    cycle = (start - phase) // period
    into = start - phase - cycle * period
    w = cycle * (period - duration) + max(0, into - duration) + ticks
    return phase + w + ((w - 1) // (period - duration) + 1) * duration
