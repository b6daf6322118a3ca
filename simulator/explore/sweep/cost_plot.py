"""The figure of cost over time: every point of a sweep, and those that nothing beats in both."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from simulator.errors import DescriptionError
from simulator.explore.sweep.lines import label, telling
from simulator.explore.sweep.point import SAMPLES
from simulator.explore.sweep.row import OK, Row
from simulator.explore.sweep.swept import Swept
from simulator.report import palette
from simulator.report.labels import Box, Labels, along, name_dot
from simulator.report.palette import INK, SERIES
from simulator.units import format_count

NO_PRICE = 'the figure cost needs prices: --set "cost.device_price=2.50 USD/h"'

ROOM, TALL = 6.4, 4.0
"""Inches of the axes."""

MILLION = 1e6

UNITS = (("days", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0))
"""Of time; the longest that the fastest point is above."""


@dataclass(frozen=True, slots=True)
class Priced:
    """A point of a sweep: what a run, or a million tokens, takes and costs."""

    row: Row
    seconds: float
    usd: float


TICKS = (
    (5.0, (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)), (30.0, (1.0, 2.0, 3.0, 5.0)),
    (math.inf, (1.0,)),
)  # fmt: skip
"""Parts of a decade that are marked where values span less than so much."""


def priced(rows: Iterable[Row]) -> list[Priced]:
    """Return the time and the cost of points that run and fit in memory.

    Of whole runs, where the sweep has them, else of a million tokens (samples, of images).
    """
    out = []
    for row in rows:
        usd = row.get("run_devices_usd", row.get("step_devices_usd"))
        if row["status"] != OK or not row["fits"] or usd is None:
            continue
        if "run_time_s" in row:
            out.append(Priced(row, row["run_time_s"], usd))
        else:
            seconds = MILLION / row["tokens_per_s"]
            out.append(Priced(row, seconds, usd * seconds / row["step_time_s"]))
    return out


def front(points: Iterable[Priced]) -> list[Priced]:
    """Return points than which none is both faster and cheaper, fastest first (Pareto)."""
    best: list[Priced] = []
    for point in sorted(points, key=lambda p: (p.seconds, p.usd)):
        if not best or point.usd < best[-1].usd:
            best.append(point)
    return best


def cost_figure(swept: Swept, path: str | Path | None = None) -> Figure:
    """Draw the cost of devices over time for every point of a sweep, and the front of the best.

    Raises:
        DescriptionError: when nothing runs, fits and has a price, or the file cannot be saved.
    """
    palette.check_path(path)
    points = priced(swept.rows)
    if not points:
        ran = any(row["status"] == OK and row["fits"] for row in swept.rows)
        raise DescriptionError(
            NO_PRICE if ran else "no point of the sweep runs and fits in memory, so none is drawn"
        )
    names = telling([p.row for p in points], [*swept.varied])
    groups = _groups(points, names)
    best = front(points)
    handles = [
        Line2D([], [], ls="", marker=SERIES[k][1], ms=5, color=SERIES[k][0], mec="white", mew=0.4,
               label=group)
        for k, group in enumerate(groups) if group
    ]  # fmt: skip
    handles.append(Line2D([], [], color=INK, lw=1.1, label="none is faster and cheaper"))
    out = len(swept.rows) - len(points)
    what, first = "a million tokens", points[0].row
    if "run_time_s" in first:
        what = f"{format_count(first['run_time_s'] * first['tokens_per_s'])} tokens"
    titles = [
        f"{swept.name}: cost and time of {what}",
        f"cost of devices; {len(points)} points, {len(best)} of them on the front",
    ]
    titles += [f"{out} points are refused, do not fit or have no price"] if out else []
    with palette.style():
        figure, (ax,) = palette.sheet(
            ROOM, [TALL], titles=titles, handles=handles, labels=["$1,000,000"]
        )
        unit = _axes(ax, points)
        labels = _draw(ax, groups, best, unit)
        for point in best:
            where = (point.seconds / unit, point.usd)
            name_dot(ax, label(point.row, names), where, _paper(ax, where), 3.0, labels)
    return palette.save(figure, path)


def _groups(points: Sequence[Priced], names: Sequence[str]) -> dict[str, list[Priced]]:
    """Return points by the first setting that has few values and is no size; all in one else."""
    sizes = ("devices", SAMPLES, "cluster.num_nodes", "run.global_batch_size")
    for name in names:
        found: dict[str, list[Priced]] = {}
        for point in points:
            found.setdefault(label(point.row, [name]), []).append(point)
        if 1 < len(found) <= len(SERIES) and name not in sizes:
            return found
    return {"": list(points)}


def _axes(ax: Axes, points: Sequence[Priced]) -> float:
    """Set ranges and ticks; return the seconds of the unit of time."""
    fastest = min(p.seconds for p in points)
    name, unit = next(((n, u) for n, u in UNITS if fastest >= u), UNITS[-1])
    ax.set(xscale="log", yscale="log", xlabel=f"time ({name})")
    for axis, values, write in (
        ("x", [p.seconds / unit for p in points], lambda value: f"{value:,.12g}"),
        ("y", [p.usd for p in points], lambda value: f"${value:,.12g}"),
    ):
        low, high = min(values), max(values)
        getattr(ax, f"set_{axis}lim")(low / 1.25, high * 1.4)
        one = getattr(ax, f"{axis}axis")
        subs = next(parts for most, parts in TICKS if high / low < most)
        one.set_major_locator(LogLocator(subs=subs))
        one.set_minor_locator(NullLocator())
        one.set_major_formatter(FuncFormatter(lambda value, _, write=write: write(value)))
    ax.grid(color="#ececec", lw=0.6)
    ax.set_axisbelow(True)
    return unit


def _draw(ax: Axes, groups: dict[str, list[Priced]], best: Sequence[Priced], unit: float) -> Labels:
    """Draw all points and the front; return the paper, with what they take."""
    labels = Labels(Box(2, 2, 72 * ROOM - 2, 72 * TALL - 2), [], [])
    for (group, members), (colour, marker) in zip(groups.items(), SERIES, strict=False):
        places = [(p.seconds / unit, p.usd) for p in members]
        ax.plot(*zip(*places, strict=True), ls="", marker=marker, ms=5, color=colour, mec="white",
                mew=0.4, zorder=3, gid=group or "points")  # fmt: skip
        for x, y in (_paper(ax, place) for place in places):
            labels.dots.append(Box(x - 3, y - 3, x + 3, y + 3))
    places = [(p.seconds / unit, p.usd) for p in best]
    ax.plot(*zip(*places, strict=True), color=INK, lw=1.1, drawstyle="steps-post", zorder=2,
            gid="front")  # fmt: skip
    for a, b in pairwise(_paper(ax, place) for place in places):
        labels.taken += [*along(a, (b[0], a[1]), 2.0), *along((b[0], a[1]), b, 2.0)]
    return labels


def _paper(ax: Axes, place: tuple[float, float]) -> tuple[float, float]:
    """Return where a point lies, in points from the lower left of the axes."""
    pixels = ax.transData.transform(place) - ax.get_window_extent().p0
    x, y = (72 * float(value) / ax.figure.dpi for value in pixels)
    return x, y
