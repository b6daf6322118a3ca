"""The best checkpoint interval by simulation, beside what Young's and Daly's rules say."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from simulator.errors import DescriptionError
from simulator.operate.draw import happenings
from simulator.operate.interval import daly, young
from simulator.operate.job import job, mtbf, saving
from simulator.operate.result import Operated
from simulator.operate.run import first_steps, run_all

POINTS, WIDEST = 17, 4.0
"""Intervals tried, from a `WIDEST`-th of the starting point to as many times it."""

MISFIT = 0.1
"""Of the range of what is lost, how far off the curve may be at the worst interval."""

MOST_SAMPLES = 200
"""Samples taken for each: all meet the same failures, so few do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """Goodput by checkpoint interval."""

    seconds: tuple[float, ...]
    """Intervals tried; the training of whole steps."""
    steps: tuple[int, ...]
    goodput: tuple[float, ...]
    """Mean over samples; every interval meets the same failures."""
    best: float
    """Where a curve through them is highest, or the best of them where none fits."""
    is_smooth: bool
    young: float
    daly: float


def best_interval(o: Operated) -> Best:
    """Find the interval of the highest mean goodput.

    Goodput is flat around its best and noisy, so the highest value alone would say little: through
    what is lost at the intervals tried goes a / t + b + c t, the form that the loss has to first
    order, by least squares, and the best is sqrt(a / c). Intervals are tried around the highest
    value found on a wide grid. Where the form does not fit, as beside a kink at the time of an
    asynchronous write, the best of those tried is taken.

    Raises:
        DescriptionError: when nothing fails, or a checkpoint takes no time.
    """
    s, ops, cluster = o.scenario, o.operations, o.scenario.cluster
    between = mtbf(ops, cluster.world_size, cluster.num_nodes)
    save = saving(s, ops)
    if between == float("inf") or not save.write:
        raise DescriptionError(
            "no interval is best: "
            + ("nothing fails" if save.write else "a checkpoint takes no time")
        )
    seeds = o.seeds[:MOST_SAMPLES]
    breaks = happenings(ops, cluster.world_size, cluster.num_nodes, seeds)
    seen: dict[int, float] = {}

    def goodput(steps: int) -> float:
        if steps not in seen:
            described = job(s, ops, o.step_times_s, steps * o.step_time_s)
            out = run_all(described, breaks, first_steps(described, seeds))
            seen[steps] = float(out.ticks[:, 0].mean() / described.duration)
        return seen[steps]

    def around(middle: float, widest: float) -> list[int]:
        grid = middle * np.geomspace(1 / widest, widest, POINTS) / o.step_time_s
        return sorted({max(1, round(x)) for x in grid.tolist()})

    start = young(max(save.blocked, 0.001 * save.write), between)
    wide = around(start, WIDEST)
    middle = max(wide, key=goodput) * o.step_time_s
    steps = around(middle, 2.0)
    if ops.checkpoint.asynchronous:  # none can follow sooner without waiting
        steps = sorted({*steps, math.ceil(save.write / o.step_time_s)})
    t = np.array(steps) * o.step_time_s
    lost = 1 - np.array([goodput(n) for n in steps])
    best, is_smooth = float(t[np.argmin(lost)]), False
    if len(steps) >= 5:
        form = np.stack([1 / t, np.ones_like(t), t], axis=1)
        a, b, c = np.linalg.lstsq(form, lost)[0]
        off = np.abs(form @ [a, b, c] - lost).max()
        if a > 0 and c > 0 and off < MISFIT * np.ptp(lost):
            best, is_smooth = float(np.clip(np.sqrt(a / c), t[0], t[-1])), True
    tried = sorted({*wide, *steps})
    return Best(
        seconds=tuple(n * o.step_time_s for n in tried),
        steps=tuple(tried),
        goodput=tuple(goodput(n) for n in tried),
        best=best,
        is_smooth=is_smooth,
        young=young(save.blocked, between),
        daly=daly(save.blocked, between),
    )
