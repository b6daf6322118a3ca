"""The figure of many ranks: what each does at any time, and how many do what."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from simulator.report import palette
from simulator.report.density import ACTIVITIES, MOST_ROWS, Density, density
from simulator.report.palette import COLOURS

if TYPE_CHECKING:
    from simulator.report.result import Result

MOST_NAMES = 16
"""Places, or ranks, that are named on the left."""


def density_figure(result: Result, path: str | Path | None = None) -> Figure:
    """Draw what all ranks do during the last step, thousands of them.

    Above the share of all ranks, below a row a rank: its colour is what takes most of that time.

    Args:
        result: what to draw.
        path: where to save the figure; its suffix says how.

    Raises:
        DescriptionError: when the figure cannot be saved.
    """
    palette.check_path(path)
    shown = density(result)
    begin, end = shown.window
    names = [n for k, n in enumerate(ACTIVITIES) if shown.shares[k].max(initial=0) > 0.005]
    ticks, labels = _named(result, shown)
    rows = "a row a rank"
    if len(shown.ranks) > MOST_ROWS:
        rows = f"{len(shown.ranks):,} ranks, {len(shown.ranks) / MOST_ROWS:.3g} to a row"
    rows += f", by {palette.place_named(result)}" if shown.place.max(initial=0) else ""
    titles = palette.titles_of(
        result, f"{rows}; colour: what takes most of that time; above, of all ranks"
    )
    tall = float(np.clip(0.035 * len(shown.ranks), 1.4, 4.6))
    with palette.style():
        figure, (top, ax) = palette.sheet(
            9.0, [1.1, tall], titles=titles, labels=[*labels, "100 %"],
            handles=[palette.swatch(name, hatched=False) for name in names],
        )  # fmt: skip
        scale = palette.time_axis(ax, begin, end, since_last_step=begin > 0)
        right = (end - begin) / scale or 1.0
        _draw_shares(top, shown, names, right)
        colours = ListedColormap([COLOURS[name] for name in ACTIVITIES])
        ax.imshow(
            shown.most, cmap=colours, vmin=-0.5, vmax=len(ACTIVITIES) - 0.5, aspect="auto",
            extent=(0.0, right, float(len(shown.ranks)), 0.0), interpolation="nearest",
            gid="ranks",
        )  # fmt: skip
        ax.set(ylim=(len(shown.ranks), 0), yticks=ticks, yticklabels=labels)
        ax.tick_params(axis="y", length=0)
        ax.spines["left"].set_visible(False)
        bounds = np.flatnonzero(np.diff(shown.place)) + 1
        if len(bounds) < 3 * MOST_NAMES < len(shown.ranks):
            ax.hlines(bounds, 0, right, color="white", lw=0.8)
    return palette.save(figure, path)


def _draw_shares(ax: Axes, shown: Density, names: list[str], right: float) -> None:
    """Stack the shares of all ranks over time."""
    mean, left = 100 * shown.mean, np.zeros(shown.shares.shape[2])
    x = np.linspace(0, right, len(left) + 1)
    for name in names:
        upper = left + mean[ACTIVITIES.index(name)]
        ax.stairs(upper, x, baseline=left, fill=True, color=COLOURS[name], lw=0, gid=name)
        left = upper
    ax.set(xlim=(0, right), ylim=(0, 100), yticks=[0, 50, 100],
           yticklabels=["0 %", "50 %", "100 %"])  # fmt: skip
    ax.tick_params(axis="x", labelbottom=False)


def _named(result: Result, shown: Density) -> tuple[list[float], list[str]]:
    """Return where names stand on the left, and the names: of places, or of ranks of one place."""
    count, places = len(shown.ranks), np.unique(shown.place)
    if len(places) > 1 and result.scenario is not None:
        some = palette.sample(places, MOST_NAMES)
        middle = [float(np.flatnonzero(shown.place == place).mean()) + 0.5 for place in some]
        return middle, [palette.stages_named(result.stages[place]) for place in some]
    some = palette.sample(np.arange(count), MOST_NAMES)
    return (some + 0.5).tolist(), [f"rank {shown.ranks[at]}" for at in some.tolist()]
