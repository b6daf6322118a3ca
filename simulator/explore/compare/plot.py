"""The figure of a comparison: both steps as bars by part, and the difference of each part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from simulator.explore.compare.comparison import Comparison
from simulator.explore.compare.side import OUT_OF_STEP
from simulator.report import palette
from simulator.report.palette import FAINT, INK
from simulator.units import UNITS, format_seconds, to_seconds

ROW = 0.3
"""Inches of a bar with its gap."""

PLAIN: dict[str, Any] = {"facecolor": "#ffffff", "edgecolor": FAINT, "linewidth": 0.4}
"""Look of `OUT_OF_STEP`, which no other figure has."""


def comparison_figure(c: Comparison, path: str | Path | None = None) -> Figure:
    """Draw both steps by part, and below each other what B has more or less of each.

    Args:
        c: what to draw.
        path: file to save it as; none when absent.

    Raises:
        DescriptionError: when the figure cannot be saved.
    """
    palette.check_path(path)
    names = [p.name for p in c.parts]
    longest = max(c.a.step, c.b.step, 1)
    unit_name = next((u for u in ("s", "ms", "us") if to_seconds(longest) >= UNITS["seconds"][u]),
                     "us")  # fmt: skip
    unit = UNITS["seconds"][unit_name] / to_seconds(1)
    with palette.style():
        figure, (steps, changes) = palette.sheet(
            5.4, [2 * ROW + 0.1, ROW * (len(names) + 1)], labels=[*names, "the step"],
            titles=[c.verdict, f"A: {c.a.name}", f"B: {c.b.name}"],
            handles=[Patch(label=name, **_look(name)) for name in names],
            right=0.9,
        )  # fmt: skip
        for row, letter in enumerate("ab"):
            left = 0.0
            for part in c.parts:
                width = float(getattr(part, letter)) / unit
                if width > 0:
                    steps.barh(row + 0.5, width, 0.76, left, **_look(part.name))
                    left += width
            side = (c.a, c.b)[row]
            steps.text(left, row + 0.5, f"  {format_seconds(to_seconds(side.step))}",
                       size=8, va="center_baseline")  # fmt: skip
        palette.row_axis(steps, ["A", "B"], 0.5)
        steps.set(xlim=(0, longest / unit), xlabel=f"mean of a rank's step ({unit_name})")
        _changes(c, changes, [*names, "the step"])
    return palette.save(figure, path)


def _changes(c: Comparison, ax: Any, names: list[str]) -> None:
    """Draw the differences of parts, and of the step, around zero."""
    ticks = [float(p.difference or 0) for p in c.parts] + [float(c.difference)]
    seconds = np.array([to_seconds(t) for t in ticks])
    low, high = min(0.0, float(seconds.min())), max(0.0, float(seconds.max()))
    span = (high - low) or 1.0
    for at, (name, value) in enumerate(zip(names, seconds.tolist(), strict=True)):
        look = {"facecolor": INK} if at == len(c.parts) else _look(name)
        ax.barh(at + 0.5, value, 0.72, **look)
        text = f"{'+' if value > 0 else ''}{format_seconds(value)}"
        ax.text(max(value, 0.0), at + 0.5, f"  {text}", size=8, va="center_baseline")
    palette.row_axis(ax, names, 0.5)
    ax.axvline(0, color=INK, linewidth=0.7)
    ax.set(xlim=(low, high + 0.02 * span), xticks=[], xlabel="B - A: to the right, B has more")
    ax.spines["bottom"].set_visible(False)


def _look(name: str) -> dict[str, Any]:
    return PLAIN if name == OUT_OF_STEP else palette.area(name)
