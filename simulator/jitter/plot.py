"""The figure of jitter: how steps spread beside the undisturbed one, and what each cause costs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from simulator.jitter.result import Jittered
from simulator.report import palette
from simulator.report.palette import COLOURS, FAINT, INK
from simulator.units import UNITS, format_seconds

UNDISTURBED, GAIN = INK, COLOURS["gain"]
MARKS = {5: ":", 50: "--", 95: ":"}
"""Percentiles that the histogram shows, and how."""

BAR = 0.32
"""Inches of a bar with its gap."""


def jitter_figure(j: Jittered, path: str | Path | None = None) -> Figure:
    """Draw a histogram of steps, and what a mean step would gain without each disturbance.

    Args:
        j: what to draw.
        path: file to save it as; none when absent.

    Raises:
        DescriptionError: when the figure cannot be saved.
    """
    palette.check_path(path)
    scenario = j.result.scenario
    assert scenario is not None  # it has jitter
    longer = j.mean_s / j.result.step_time_s - 1
    drawn = f"{len(j.step_ticks):,} samples, seed {j.jitter.seed}"
    titles = [
        f"{scenario.name}: step time {format_seconds(j.mean_s)}, {longer:+.1%} by jitter",
        f"{drawn if j.jitter.is_random else 'nothing is drawn'}; undisturbed "
        f"{format_seconds(j.result.step_time_s)}; standard deviation {format_seconds(j.sd_s)}",
    ]
    handles = [
        Patch(facecolor=COLOURS["samples"], label="samples"),
        Line2D([], [], color=UNDISTURBED, lw=2, label="undisturbed step"),
        Line2D([], [], color=INK, lw=1, ls="--", label="median"),
        Line2D([], [], color=INK, lw=1, ls=":", label="5 and 95 %"),
        Patch(facecolor=GAIN, label="gain without it"),
    ]
    names = list(j.gains)
    heights = [2.2, *([BAR * len(names) + 0.1] if names else [])]
    with palette.style():
        figure, axes = palette.sheet(
            5.4, heights, titles=titles, handles=handles if names else handles[:-1],
            labels=[*names, "samples 100"], right=1.45,
        )  # fmt: skip
        _histogram(axes[0], j)
        if names:
            _gains(axes[1], j)
            _lower(figure, axes[1])
    return palette.save(figure, path)


def _unit(seconds: float) -> tuple[str, float]:
    """Return a unit that suits some seconds, and how many seconds it is."""
    name = next((u for u in ("s", "ms", "us") if seconds >= UNITS["seconds"][u]), "us")
    return name, UNITS["seconds"][name]


def _histogram(ax: Axes, j: Jittered) -> None:
    """Draw how many samples took how long, and how long the undisturbed step takes."""
    name, unit = _unit(j.result.step_time_s)
    steps = j.step_s / unit
    base = j.result.step_time_s / unit
    width = max(steps.max(), base) - min(steps.min(), base)
    bins = min(40, max(10, len(steps) // 10))
    spread = steps.max() - steps.min() > 1e-9 * base
    edges = np.histogram_bin_edges(steps, bins) if spread else base * np.array([-0.001, 0.001])
    edges = edges if spread else steps[0] + edges
    ax.hist(steps, bins=edges.tolist(), color=COLOURS["samples"], gid="samples")
    ax.axvline(base, color=UNDISTURBED, lw=2, gid="undisturbed")
    for percentile, dash in MARKS.items():
        if spread:
            ax.axvline(float(np.percentile(steps, percentile)), color=INK, lw=1, ls=dash)
    margin = 0.04 * (width or base)
    ax.set_xlim(min(edges[0], base) - margin, max(edges[-1], base) + margin)
    ax.set_ylabel("samples")
    ax.set_xlabel(f"step time ({name})", fontsize=8)
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    ax.tick_params(axis="x", labelsize=8)


def _gains(ax: Axes, j: Jittered) -> None:
    """Draw what each disturbance costs."""
    name, unit = _unit(max(g.mean_s for g in j.gains.values()))
    for row, gain in enumerate(j.gains.values()):
        x, error = gain.mean_s / unit, gain.error_s / unit
        ax.barh(row + 0.5, x, height=0.6, color=GAIN, gid="gain")
        if error:
            ax.plot([x - error, x + error], [row + 0.5] * 2, color=INK, lw=1, marker="|", ms=6)
        ax.text(1.02, row + 0.5, f"{format_seconds(gain.mean_s)}, {gain.share:.1%}",
                va="center_baseline", transform=ax.get_yaxis_transform())  # fmt: skip
    palette.row_axis(ax, list(j.gains), 0.5)
    ax.axvline(0, color=FAINT, lw=0.7)
    ax.set_xlabel(f"mean gain without it ({name}); whiskers: its 95 % confidence", fontsize=8)
    ax.tick_params(axis="x", labelsize=8)


def _lower(figure: Figure, ax: Axes) -> None:
    """Make room for the name of the axis above."""
    box = ax.get_position()
    down = 0.12 / figure.get_figheight()
    ax.set_position((box.x0, box.y0 - down, box.width, box.height))
