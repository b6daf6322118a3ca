"""The figure of the roofline: the operators of a step under the roofs of their device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from simulator.report import palette
from simulator.report.breakdown import WORK
from simulator.report.labels import SIZE, Box, Labels, along, apart, name_dot
from simulator.report.palette import COLOURS, INK, text_width
from simulator.report.roofline import Point, Roofline, roofline
from simulator.units import format_rate

if TYPE_CHECKING:
    from simulator.report.result import Result

ROOM, TALL = 6.4, 4.4
"""Inches of the axes."""

NEAR = 0.13
"""Decades within which operators of one pass are drawn as one."""

LABELLED = 0.01
"""Share of the time of kernels from which an operator has a label."""

NAMES_SHOWN = (2, 1)
"""Operators that a label names; fewer where there is no room for more."""


class Mark(NamedTuple):
    """Operators that are drawn as one."""

    names: tuple[str, ...]
    category: str
    intensity: float
    rate: float
    share: float
    """Of the time of all kernels."""

    def label(self, most: int) -> str:
        """Return its first names and its share."""
        more = f" + {len(self.names) - most}" if len(self.names) > most else ""
        return f"{', '.join(self.names[:most])}{more}: {self.share:.0%}"


def roofline_figure(result: Result, path: str | Path | None = None) -> Figure:
    """Draw attained FLOP/s of operators over their FLOPs a byte, under the roofs of the device.

    Raises:
        DescriptionError: when there are no kernels, or the figure cannot be saved.
    """
    palette.check_path(path)
    drawn = roofline(result)
    marks = marks_of(drawn)
    handles = [
        Line2D([], [], ls="", marker="o", ms=7, color=COLOURS[c], mec=INK, mew=0.4, label=c)
        for c in WORK
        if any(mark.category == c for mark in marks)
    ]
    handles += [
        Line2D([], [], color=INK, lw=1.4, label="sustained"),
        Line2D([], [], color=INK, lw=1.0, ls=(0, (4, 2)), label="datasheet"),
    ]
    with palette.style():
        figure, (ax,) = palette.sheet(
            ROOM, [TALL], titles=_titles(result, drawn), handles=handles, labels=["100 TFLOP/s"],
            right=0.2 + max(text_width(name, SIZE) for name, _ in _roof_names(drawn)) / 72,
        )  # fmt: skip
        _axes(ax, drawn, marks)
        _draw_marks(ax, marks, _draw_roofs(ax, drawn))
    return palette.save(figure, path)


def marks_of(drawn: Roofline) -> list[Mark]:
    """Return what is drawn as one, those that take longest first."""
    groups: list[list[Point]] = []
    for point in drawn.points:
        near = (group for group in groups if _near(point, group[0]))
        group = next(near, None)
        if group is None:
            groups.append([point])
        else:
            group.append(point)
    marks = [_mark(group, drawn.seconds) for group in groups]
    return sorted(marks, key=lambda mark: -mark.share)


def _near(a: Point, b: Point) -> bool:
    apart = max(abs(math.log10(a.intensity / b.intensity)), abs(math.log10(a.rate / b.rate)))
    return a.category == b.category and apart < NEAR


def _mark(group: Sequence[Point], total: float) -> Mark:
    flops, moved, seconds = (
        sum(getattr(p, name) for p in group) for name in ("flops", "bytes", "seconds")
    )
    names = tuple(p.name for p in group)
    return Mark(names, group[0].category, flops / moved, flops / seconds, seconds / total)


def _titles(result: Result, drawn: Roofline) -> list[str]:
    by_bound: dict[str, float] = {}
    for p in drawn.points:
        by_bound[p.bound] = by_bound.get(p.bound, 0.0) + p.seconds / drawn.seconds
    moving = sum(seconds for _, seconds in drawn.moving) / drawn.seconds
    bounds = ", ".join(
        f"{share:.0%} bound by {'gaps between kernels' if bound == 'launch' else bound}"
        for bound, share in sorted(by_bound.items(), key=lambda item: -item[1])
        if share >= 0.005
    )
    if moving >= 0.005:
        bounds += f", {moving:.0%} moves bytes without computing (not drawn)"
    every = result.tiled.num_ranks
    where = f"{drawn.device.name}" + (
        f", {drawn.ranks} of {every} ranks" if drawn.ranks < every else ""
    )
    name = result.scenario.name if result.scenario else result.title
    return [
        f"{name}: roofline",
        f"{where}; time of kernels: {bounds}",
        "areas of dots and numbers: share of the time of kernels; at rates below a roof a shape "
        "fills the device badly, or the gap before a kernel counts",
    ]


def _axes(ax: Axes, drawn: Roofline, marks: Sequence[Mark]) -> None:
    """Set the range: all operators, the ridge, and some room."""
    low = min(mark.intensity for mark in marks)
    high = max(drawn.ridge, *(mark.intensity for mark in marks))
    slow = min(mark.rate for mark in marks)
    ax.set(
        xscale="log", yscale="log",
        xlim=(low / 2.5, high * 30), ylim=(slow / 3, drawn.roofs[0].peak * 3.5),
        xlabel="arithmetic intensity (FLOPs a byte of device memory)",
    )  # fmt: skip
    ax.set_title("attained FLOP/s", loc="left", fontsize=9, pad=3)
    ax.yaxis.set_major_locator(LogLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_rate(value, "FLOP")))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))
    ax.grid(color="#ececec", lw=0.6)
    ax.set_axisbelow(True)


def _draw_roofs(ax: Axes, drawn: Roofline) -> Labels:
    """Draw the roofs and name them right of the axes; return the paper, with what they take."""
    (x0, x1), device = ax.get_xlim(), drawn.device
    taken: list[Box] = []
    for of, rate, look in (
        ("peak", device.memory_bandwidth, {"lw": 1.0, "ls": (0, (4, 2))}),
        ("sustained", device.memory_bandwidth * device.memory_efficiency, {"lw": 1.4}),
    ):  # fmt: skip
        for k, roof in enumerate(drawn.roofs):
            top = getattr(roof, of)
            line = [(top / rate, top), (x1, top)]
            if not k:
                line.insert(0, (x0, rate * x0))
            ax.plot(*zip(*line, strict=True), color=INK, zorder=2, gid=of, **look)
            points = [_paper(ax, *point) for point in line]
            for a, b in pairwise(points):
                taken += along(a, b, 3.0)
    names = sorted(_roof_names(drawn), key=lambda name: name[1])
    wanted = [_paper(ax, x1, rate)[1] for _, rate in names]
    for (name, _), y in zip(names, apart(wanted, 1.25 * SIZE, 4, 72 * TALL - 4), strict=True):
        ax.annotate(name, (1, y / (72 * TALL)), (4, 0), xycoords="axes fraction", size=SIZE,
                    textcoords="offset points", va="center_baseline", gid="roof")  # fmt: skip
    peak, sustained = (
        format_rate(rate, "B")
        for rate in (device.memory_bandwidth, device.memory_bandwidth * device.memory_efficiency)
    )
    text, x = f"memory {peak}, sustained {sustained}", 1.3 * x0
    a, b = (_paper(ax, at, device.memory_bandwidth * at) for at in (x, 10 * x))
    angle = math.atan2(b[1] - a[1], b[0] - a[0])
    ax.annotate(text, (x, device.memory_bandwidth * x), (-2, 3), textcoords="offset points",
                rotation=math.degrees(angle), rotation_mode="anchor", va="bottom", size=SIZE,
                gid="roof")  # fmt: skip
    long, up = text_width(text, SIZE), 3 + SIZE / 2
    first = (a[0] - up * math.sin(angle), a[1] + up * math.cos(angle))
    last = (first[0] + long * math.cos(angle), first[1] + long * math.sin(angle))
    paper = Box(2, 2, 72 * ROOM - 2, 72 * TALL - 2)
    return Labels(paper, taken, [], list(along(first, last, 1.3 * SIZE)))


def _roof_names(drawn: Roofline) -> list[tuple[str, float]]:
    """Return the name and the rate of each roof of arithmetic."""
    names = []
    for roof in drawn.roofs:
        names.append((f"{roof.dtype} {format_rate(roof.peak, 'FLOP')}", roof.peak))
        if roof.sustained < roof.peak:
            names.append((f"sustained {format_rate(roof.sustained, 'FLOP')}", roof.sustained))
    return names


def _paper(ax: Axes, x: float, y: float) -> tuple[float, float]:
    """Return where a point of the axes lies, in points from its lower left."""
    (x0, x1), (y0, y1) = ax.get_xlim(), ax.get_ylim()
    return (
        72 * ROOM * math.log(x / x0) / math.log(x1 / x0),
        72 * TALL * math.log(y / y0) / math.log(y1 / y0),
    )


def _radius(mark: Mark) -> float:
    """Return the radius of a dot in points."""
    return max(2.0, 15.0 * math.sqrt(mark.share))


def _draw_marks(ax: Axes, marks: Sequence[Mark], labels: Labels) -> None:
    """Draw dots, and labels where they hide nothing, with a line to their dot."""
    at = [_paper(ax, mark.intensity, mark.rate) for mark in marks]
    for mark, (x, y) in zip(marks, at, strict=True):
        r = _radius(mark)
        labels.dots.append(Box(x - r, y - r, x + r, y + r))
        ax.plot([mark.intensity], [mark.rate], ls="", marker="o", ms=2 * r, mec=INK, mew=0.4,
                color=COLOURS[mark.category], alpha=0.9, zorder=3, gid=mark.category)  # fmt: skip
    for mark, place in zip(marks, at, strict=True):
        if mark.share >= LABELLED:
            dot = ((mark.intensity, mark.rate), place, _radius(mark), labels)
            any(name_dot(ax, mark.label(most), *dot) for most in NAMES_SHOWN)  # as long as fits
