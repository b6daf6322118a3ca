"""The figure of a search: all plans that were simulated, by time and memory, or time and cost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from simulator.errors import DescriptionError
from simulator.explore.search import Found
from simulator.explore.search_text import longer
from simulator.explore.trial import Trial
from simulator.report import palette
from simulator.report.palette import COLOURS, FAINT, INK
from simulator.report.summary import OWNERS

MARKERS = {
    "compute": "o", "memory": "s", "launch": "D", "tp": "^", "pp": "v", "dp": "<", "cp": ">",
    "ep": "P", "tied": "p", "offload": "X", "data": "d", "save": "H", "log": "8", "bubble": "h",
}  # fmt: skip
"""Marker of plans that lose most in a part of the step; its colour is the part's."""

SLOWEST = 4.0
"""Steps of more times the best are not drawn."""

KINDS = ("memory", "cost")
"""Figures: memory, or cost, over the time of a step."""


def check_kind(found: Found, kind: str) -> None:
    """Check that a search has what a figure shows.

    Raises:
        DescriptionError: when nothing fits, or nothing is priced.
    """
    if not found.best:
        raise DescriptionError("--plot shows plans that fit, and none does")
    if kind == "cost" and found.best[0].tokens_per_usd is None:
        raise DescriptionError(
            'the figure cost needs a price: --set cost.device_price="2.50 USD/h"'
        )


def search_figure(found: Found, kind: str = "memory", path: str | Path | None = None) -> Figure:
    """Draw the plans that were simulated, coloured by the part in which they lose most.

    Raises:
        DescriptionError: when the figure cannot be drawn or saved.
    """
    palette.check_path(path)
    check_kind(found, kind)
    first = found.best[0]
    shown = [t for t in found.trials if not t.failed and t.step_time_s]
    shown = [t for t in shown if t.fits or kind == "memory"]
    cut = [t for t in shown if t.step_time_s <= SLOWEST * first.step_time_s]
    groups: dict[str, list[Trial]] = {}
    for t in cut:
        if t.fits and t is not first:
            owner, seconds = next(iter(longer(t, first, found.objective).items()))
            groups.setdefault(owner if seconds > 0 else "compute", []).append(t)
    over = [t for t in cut if not t.fits]
    handles = [
        Line2D([], [], ls="", marker="*", ms=12, color=COLOURS["capacity"], label="best plan"),
        *(_dot(owner) for owner in MARKERS if owner in groups),
        *(
            [Line2D([], [], ls="", marker="x", ms=5, color=FAINT, label="does not fit")]
            * bool(over)
        ),
    ]
    front = _front([t for t in cut if t.fits], kind)
    if len(front) > 1:
        handles.append(Line2D([], [], color=INK, lw=1.0, label="none is better in both"))
    names = {"memory": "memory of the fullest rank (GB)", "cost": "USD for a million tokens"}
    titles = [
        f"{found.scenario.name}: {len(shown):,} plans simulated",
        "colour: what a plan loses most in against the best",
    ]
    if len(cut) < len(shown):
        titles.append(f"{len(shown) - len(cut):,} slower than {SLOWEST:g} x the best are not drawn")
    with palette.style():
        figure, (ax,) = palette.sheet(
            5.6, [3.6], titles=titles, handles=handles, labels=["1,000.0"], right=0.3
        )
        for owner, members in groups.items():
            ax.plot(*_points(members, kind), ls="", marker=MARKERS[owner], ms=5,
                    color=COLOURS[owner], mec=INK, mew=0.3, alpha=0.85)  # fmt: skip
        ax.plot(*_points(over, kind), ls="", marker="x", ms=5, color=FAINT, alpha=0.7)
        if len(front) > 1:
            ax.plot(*_points(front, kind), color=INK, lw=1.0, drawstyle="steps-post", zorder=3)
        ax.plot(*_points([first], kind), ls="", marker="*", ms=14, color=COLOURS["capacity"],
                mec="white", mew=0.6, zorder=4)  # fmt: skip
        if kind == "memory":
            capacity = found.scenario.cluster.node.device.memory / 1e9
            ax.axhline(capacity, color=COLOURS["capacity"], lw=1.0, ls="--")
            ax.annotate("memory of a device", (1, capacity), (-2, 3), textcoords="offset points",
                        xycoords=("axes fraction", "data"), ha="right", size=8,
                        color=COLOURS["capacity"])  # fmt: skip
            top = max([t.device_memory_bytes / 1e9 for t in cut], default=capacity)
            ax.set_ylim(0, 1.08 * min(max(top, capacity), 2 * capacity))
        else:
            ax.set_ylim(bottom=0)
        ax.set(xlabel="step (s)", ylabel=names[kind])
        ax.set_xlim(left=0.9 * min(t.step_time_s for t in cut))
    return palette.save(figure, path)


def _dot(owner: str) -> Line2D:
    return Line2D([], [], ls="", marker=MARKERS[owner], ms=6, color=COLOURS[owner], mec=INK,
                  mew=0.3, label=OWNERS[owner].partition(",")[0])  # fmt: skip


def _points(trials: list[Trial], kind: str) -> tuple[np.ndarray, np.ndarray]:
    return np.array([t.step_time_s for t in trials]), np.array([_height(t, kind) for t in trials])


def _height(t: Trial, kind: str) -> float:
    if kind == "memory":
        return t.device_memory_bytes / 1e9
    return 1e6 / (t.tokens_per_usd or np.inf)


def _front(trials: list[Trial], kind: str) -> list[Trial]:
    """Return plans than which none is both faster and lower, fastest first."""
    out: list[Trial] = []
    for t in sorted(trials, key=lambda t: (t.step_time_s, _height(t, kind))):
        if not out or _height(t, kind) < _height(out[-1], kind):
            out.append(t)
    return out
