"""Predicted against measured as a figure: a panel for times, a panel for memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from simulator.errors import DescriptionError
from simulator.report import palette
from simulator.validate.published import Report

BAND = 0.10
"""Half the width of the grey band, as a share of the measured value."""

HUES = (*(colour for colour, _ in palette.SERIES), palette.INK)

MARKERS = "os^Dv"
"""The next one for each hue, and another for the same hue."""

PANELS = {"s": ("seconds of a step", 4.6), "GiB": ("GiB of a GPU", 3.0)}
"""What the axes of each unit show, and the panel's height in inches."""


def published_figure(reports: Sequence[Report], path: str | Path | None = None) -> Figure:
    """Draw predicted over measured values of all rows, logarithmically; save it where a path is.

    Raises:
        DescriptionError: when no row of a time or of memory was re-run.
    """
    shown = [r for r in reports if r.outcomes and r.source.unit in PANELS]
    if not shown:
        raise DescriptionError("--figure: no row of a time or of memory was re-run")
    units = [unit for unit in PANELS if any(r.source.unit == unit for r in shown)]
    looks = {r.source.name: _look(n) for n, r in enumerate(shown)}
    handles = [
        Line2D([], [], label=r.source.name, **{**looks[r.source.name], "alpha": 1.0, "ms": 5})
        for r in shown
    ]
    with palette.style():
        figure, axes = palette.sheet(
            5.6, [PANELS[unit][1] for unit in units], labels=["predicted"], handles=handles,
            titles=["Predicted against measured",
                    f"grey: within {BAND:.0%} of the measured value; calibrated and replayed "
                    "sources are named as such in the report"],
        )  # fmt: skip
        for unit, ax in zip(units, axes, strict=True):
            _panel(ax, unit, [r for r in shown if r.source.unit == unit], looks)
    return palette.save(figure, path)


def _look(number: int) -> dict[str, Any]:
    shape, hue = divmod(number, len(HUES))
    return {
        "color": HUES[hue], "marker": MARKERS[(hue + shape) % len(MARKERS)], "ls": "none",
        "ms": 3.8, "alpha": 0.6, "mew": 0,
    }  # fmt: skip


def _panel(
    ax: Axes, unit: str, reports: Sequence[Report], looks: dict[str, dict[str, Any]]
) -> None:
    values = np.array([o[1:] for r in reports for o in r.outcomes])
    ends = np.array([values.min() / 1.3, values.max() * 1.3])
    ax.fill_between(ends, ends * (1 - BAND), ends * (1 + BAND), color="#dadada", lw=0)
    ax.plot(ends, ends, color=palette.FAINT, lw=0.7)
    for r in reports:
        measured, predicted = zip(*(o[1:] for o in r.outcomes), strict=True)
        ax.plot(measured, predicted, gid=r.source.name, **looks[r.source.name])
    name = PANELS[unit][0]
    ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    ax.set(xlabel=f"measured {name}", ylabel="predicted")
