"""The figure of compared schedules: where their steps go, and the memory that they take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from simulator.explore.schedules import Compared, Ran
from simulator.report import palette
from simulator.report.palette import COLOURS, HATCHES
from simulator.units import format_seconds

PARTS = {"work": "work", "exposed": "exposed communication", "bubble": "bubble"}
"""Parts of a bar by the name of their colour, and what they are called."""

ROW = 0.27
"""Inches of a bar with its gap."""

CUT = 2.5
"""Steps of so many times the fastest are cut off, so that the others can be told apart."""


def schedules_figure(compared: Compared, path: str | Path | None = None) -> Figure:
    """Draw a bar for each schedule: its step, taken apart, and below it its memory.

    Args:
        compared: what to draw.
        path: file to save it as; none when absent.

    Raises:
        DescriptionError: when the figure cannot be saved.
    """
    palette.check_path(path)
    rows, s = compared.ran, compared.scenario
    names = [r.name for r in rows]
    handles = [
        *(Patch(label=name, **_look(part)) for part, name in PARTS.items()),
        Patch(label="memory of the fullest rank", **_look("activations")),
        Line2D([], [], color=COLOURS["capacity"], label="memory of a device"),
    ]
    titles = [
        f"{s.name}: schedules on the same work",
        f"pp {s.plan.pp}, {s.num_microbatches} microbatches of {s.plan.microbatch_size}; "
        "means over ranks, fastest first",
    ]
    with palette.style():
        figure, axes = palette.sheet(
            5.5, [ROW * len(rows), ROW * len(rows)], titles=titles, handles=handles, labels=names,
            right=0.8,
        )  # fmt: skip
        _steps(axes[0], rows)
        _memory(axes[1], rows, max(r.device_memory_bytes for r in rows), compared)
        for ax in axes:
            palette.row_axis(ax, names, 0.5)
    return palette.save(figure, path)


def _look(name: str) -> dict[str, Any]:
    return {
        "facecolor": COLOURS[name], "edgecolor": "white", "linewidth": 0.4,
        "hatch": HATCHES.get(name),
    }  # fmt: skip


def _steps(ax: Axes, rows: tuple[Ran, ...]) -> None:
    at, left = np.arange(len(rows)) + 0.5, np.zeros(len(rows))
    step = np.array([r.step_time_s for r in rows])
    end = float(step[step <= CUT * step.min()].max())
    for part in PARTS:
        piece = step * [getattr(r, part) for r in rows]
        ax.barh(at, piece, 0.76, left, **_look(part))
        left += piece
    for y, seconds in zip(at.tolist(), step.tolist(), strict=True):
        text = f"{format_seconds(seconds)}" if seconds <= end else f"... {format_seconds(seconds)}"
        ax.text(min(seconds, end) + 0.01 * end, y, text, size=8, va="center_baseline")
    ax.set(xlim=(0, end), xlabel="step (s)")


def _memory(ax: Axes, rows: tuple[Ran, ...], most: float, compared: Compared) -> None:
    gigabytes, at = 1e9, np.arange(len(rows)) + 0.5
    size = np.array([r.device_memory_bytes for r in rows]) / gigabytes
    ax.barh(at, size, 0.76, **_look("activations"))
    for y, value in zip(at.tolist(), size.tolist(), strict=True):
        ax.text(value + 0.01 * most / gigabytes, y, f"{value:.1f} GB", size=8, va="center_baseline")
    capacity = min(kind.device.memory for kind in compared.scenario.cluster.kinds) / gigabytes
    if capacity < 1.6 * most / gigabytes:
        ax.axvline(capacity, color=COLOURS["capacity"], linewidth=1.2)
    ax.set(xlim=(0, most / gigabytes * 1.001), xlabel="device memory (GB)")
