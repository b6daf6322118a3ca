"""The figure of scaling: throughput, efficiency, where communication overtakes work, and cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from simulator.errors import DescriptionError
from simulator.explore.sweep.point import FIXED
from simulator.explore.sweep.scaling import Curve, Scaling, between, ratio
from simulator.report import palette
from simulator.report.labels import apart
from simulator.report.palette import FAINT, INK, SERIES, text_width
from simulator.units import format_count

DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.6)), (0, (6, 2, 1, 2)))
"""Of lines by how the global batch follows the devices; strong scaling first."""

MOST_LINES = 12

PANEL = 2.05
"""Inches of a panel."""

LABEL = 8.0
"""Points of a label."""

Values = list[float]


def scaling_figure(s: Scaling, path: str | Path | None = None) -> Figure:
    """Draw scaling curves, in panels over the number of devices.

    Args:
        s: the curves.
        path: file to save it as; none when absent.

    Raises:
        DescriptionError: when there are too many lines to tell apart, or the file cannot be saved.
    """
    palette.check_path(path)
    _check(s)
    panels: list[tuple[str, str, Callable[[Curve], Values]]] = [
        ("tokens a second", "log", lambda c: [row["tokens_per_s"] for row in c.rows]),
        ("efficiency (%)", "linear", lambda c: [100 * e for e in c.efficiency]),
        ("exposed communication / work", "log", lambda c: [ratio(row) for row in c.rows]),
    ]
    if all(row.get("run_devices_usd") for c in s.curves for row in c.rows):
        first = s.curves[0].rows[0]
        tokens = format_count(first["run_time_s"] * first["tokens_per_s"])
        panels.append((f"cost of devices, {tokens} tokens (USD)", "log", _cost))
    with palette.style():
        labels = [curve.group or curve.regime for curve in s.curves]
        right = 0.42 + max(text_width(text, LABEL) for text in labels) / 72
        titles = [f"{s.name}: scaling", *_notes(s), ""]
        figure, axes = palette.sheet(
            5.4, [PANEL] * len(panels), titles=titles, handles=_handles(s),
            labels=["microbatches"], right=right,
        )  # fmt: skip
        for ax, (name, scale, values) in zip(axes, panels, strict=True):
            _panel(ax, s, name, scale, values)
        _marks(axes, s)
    return palette.save(figure, path)


def check_lines(lines: int) -> None:
    """Check before the work that the lines of a figure can be told apart.

    Raises:
        DescriptionError: when they are too many.
    """
    if lines > MOST_LINES:
        raise DescriptionError(
            f"the figure scaling would hold {lines} lines; list fewer values, so that there are at "
            f"most {MOST_LINES}"
        )


def _check(s: Scaling) -> None:
    if len(s.curves) > MOST_LINES or len(s.groups) > len(SERIES) or len(s.regimes) > len(DASHES):
        raise DescriptionError(
            f"the figure scaling would hold {len(s.curves)} lines of {len(s.groups)} groups; draw "
            f"at most {MOST_LINES} lines of {len(SERIES)} groups: list fewer values"
        )


def _cost(curve: Curve) -> Values:
    return [float(row["run_devices_usd"]) for row in curve.rows]


def _notes(s: Scaling) -> list[str]:
    notes = ["efficiency: throughput a device over that of the fewest devices of its line"]
    if _accumulated(s):
        notes.append("microbatches: what each device accumulates where the global batch is fixed")
    found = [(c, c.overtaken) for c in s.curves]
    crossed = [f"{between(at)} ({_label(s, c)})" for c, at in found if at is not None]
    if crossed:
        notes.append(f"communication overtakes work {', '.join(crossed)}")
    else:
        notes.append("communication that computing does not hide stays below work everywhere")
    return notes


def _label(s: Scaling, curve: Curve) -> str:
    parts = [curve.group] if curve.group else []
    parts += [curve.regime] if len(s.regimes) > 1 or not parts else []
    return ", ".join(parts)


def _look(s: Scaling, curve: Curve) -> dict[str, Any]:
    number = s.groups.index(curve.group)
    colour, marker = SERIES[number]
    return {
        "color": colour, "marker": marker, "ms": 4.5, "lw": 1.4, "mec": "white", "mew": 0.5,
        "ls": DASHES[s.regimes.index(curve.regime)],
    }  # fmt: skip


def _handles(s: Scaling) -> list[Line2D]:
    groups = [
        Line2D([], [], color=SERIES[k][0], marker=SERIES[k][1], ms=4.5, lw=1.4, label=group)
        for k, group in enumerate(s.groups)
        if group
    ]
    regimes = [
        Line2D([], [], color=INK, lw=1.2, ls=DASHES[k], label=_regime_named(s, regime))
        for k, regime in enumerate(s.regimes)
    ]
    return [*groups, *regimes, Line2D([], [], color=FAINT, lw=0.8, label="ideal")]


def _regime_named(s: Scaling, regime: str) -> str:
    curve = next(c for c in s.curves if c.regime == regime)
    if curve.samples == FIXED:
        return f"strong: global batch {curve.rows[0]['global_batch_size']:,}"
    return f"weak: {curve.samples} samples a device"


def _panel(ax: Axes, s: Scaling, name: str, scale: Any, values: Callable[[Curve], Values]) -> None:
    ax.set_xscale("log")
    ax.set_yscale(scale)
    ends: list[tuple[float, float, str, str]] = []
    for curve in s.curves:
        x = np.array([row["ranks"] for row in curve.rows], float)
        y = np.array(values(curve), float)
        shown = np.isfinite(y) & ((y > 0) if scale == "log" else True)
        if not shown.any():
            continue
        look = _look(s, curve)
        ax.plot(x[shown], y[shown], gid=_label(s, curve), **look)
        if curve is next(c for c in s.curves if c.group == curve.group):
            name_of = curve.group or curve.regime
            ends.append((x[shown][-1], y[shown][-1], name_of, look["color"]))
    _ideal(ax, s, name, values)
    devices = sorted({row["ranks"] for curve in s.curves for row in curve.rows})
    ax.set(xlim=(0.8 * devices[0], 1.25 * devices[-1]))
    ax.set_title(name, loc="left", fontsize=9, pad=3)
    ax.xaxis.set_major_locator(FixedLocator(devices))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    _value_axis(ax, scale)
    ax.grid(axis="y", color="#e8e8e8", lw=0.6)
    ax.set_axisbelow(True)
    _name_ends(ax, ends)


def _value_axis(ax: Axes, scale: str) -> None:
    """Number the axis of values: decades, or parts of them where there are few."""
    low, high = ax.get_ylim()
    if scale != "log":
        ax.set_ylim(max(0.0, 10 * math.floor(low / 10) - 10), max(103.0, high))
        return
    few = high / low < 30
    ax.yaxis.set_major_locator(
        LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0) if few else (1.0,))
    )
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    ax.yaxis.set_minor_locator(NullLocator())


def _short(value: float) -> str:
    """Return a number as ``20 M``."""
    for size, letter in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= size:
            return f"{value / size:,.4g}{letter}"
    return f"{value:,.4g}"


def _ideal(ax: Axes, s: Scaling, name: str, values: Callable[[Curve], Values]) -> None:
    """Draw what would be if devices lost nothing, or communication took as long as work."""
    thin: dict[str, Any] = {"color": FAINT, "lw": 0.8, "zorder": 1}
    if name.startswith("tokens"):
        for group in s.groups:
            curve = next(c for c in s.curves if c.group == group)
            x = np.array([curve.rows[0]["ranks"], max(c.rows[-1]["ranks"] for c in s.curves)])
            ax.plot(x, values(curve)[0] * x / x[0], **thin)
    elif name.startswith("efficiency"):
        ax.axhline(100, **thin)
    elif name.startswith("exposed"):
        low, high = ax.get_ylim()
        ax.set_ylim(low, max(3.0, high))
        ax.axhline(1, **thin)
        ax.text(0.01, 1, "as long as work", size=LABEL, color=FAINT, va="bottom",
                transform=ax.get_yaxis_transform())  # fmt: skip


def _name_ends(ax: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Write names of lines beside their ends, moved apart so that none covers another."""
    box = ax.transAxes.inverted()
    tall = 72 * PANEL
    at = [box.transform(ax.transData.transform(end[:2])) for end in ends]
    order = sorted(range(len(ends)), key=lambda k: float(at[k][1]))
    places = apart([float(at[k][1]) for k in order], (LABEL + 2) / tall, 0.03, 0.97)
    for k, place in zip(order, places, strict=True):
        _, _, text, colour = ends[k]
        ax.plot([float(at[k][0]) + 0.012, 1.04], [float(at[k][1]), place], color=colour, lw=0.6,
                transform=ax.transAxes, clip_on=False, gid="leader")  # fmt: skip
        ax.text(1.05, place, text, size=LABEL, color=colour, va="center_baseline",
                transform=ax.transAxes)  # fmt: skip


def _marks(axes: Sequence[Axes], s: Scaling) -> None:
    """Mark where nodes end, and name what the ticks are: devices, and what each accumulates."""
    size = s.node_size
    for k, ax in enumerate(axes):
        if size is not None:
            ax.axvline(size, color=INK, lw=0.8, ls=":", zorder=1)
            if not k:
                both = (("links of one node ", "right"), (" network between nodes", "left"))
                for text, side in both:
                    ax.text(size, 0.97, text, ha=side, va="top", size=LABEL,
                            transform=ax.get_xaxis_transform())  # fmt: skip
        if ax is not axes[-1]:
            ax.tick_params(axis="x", labelbottom=False)
    last = axes[-1]
    accumulated = _accumulated(s)
    below: dict[str, Any] = {"size": 9, "ha": "right", "va": "top", "xycoords": "axes fraction"}
    last.annotate("devices", (0, 0), xytext=(-8, -5.5), textcoords="offset points", **below)
    if accumulated:
        last.xaxis.set_major_formatter(
            FuncFormatter(lambda value, _: f"{value:,.0f}\n{accumulated.get(round(value), '')}")
        )
        last.annotate(
            "microbatches", (0, 0), xytext=(-8, -17.5), textcoords="offset points", **below
        )


def _accumulated(s: Scaling) -> dict[int, str]:
    """Return microbatches of a step by devices, where the batch is fixed and all lines agree."""
    found: dict[int, set[int]] = {}
    for curve in s.curves:
        for row in curve.rows if curve.samples == FIXED else ():
            found.setdefault(row["ranks"], set()).add(row["num_microbatches"])
    if any(len(counts) > 1 for counts in found.values()):
        return {}
    return {devices: f"{counts.pop():,}" for devices, counts in found.items()}
