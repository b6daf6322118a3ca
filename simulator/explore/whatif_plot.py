"""The figure of what-ifs: the critical path by owner, and what each ideal would gain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from simulator.explore.whatif import WhatIf
from simulator.report import palette
from simulator.report.palette import COLOURS, HATCHED_WHITE, HATCHES, INK
from simulator.report.summary import OWNERS
from simulator.units import format_seconds

PLAIN: dict[str, Any] = {"facecolor": "#f7f7f7", "edgecolor": INK, "linewidth": 0.5}
"""Of an ideal that takes time away from several owners."""

ROW = 0.27
"""Inches of a bar with its gap."""


def whatif_figure(w: WhatIf, path: str | Path | None = None) -> Figure:
    """Draw the critical path by owner, and a bar for each ideal.

    Args:
        w: what to draw.
        path: file to save it as; none when absent.

    Raises:
        DescriptionError: when the figure cannot be saved.
    """
    palette.check_path(path)
    step = w.path.step_s
    parts = {k: v / step for k, v in w.path.owners_s.items() if v >= 0.001 * step}
    names = [g.ideal.name for g in w.gains]
    with palette.style():
        figure, axes = palette.sheet(
            5.0, [0.4, ROW * len(names)], labels=[*names, "critical path"],
            titles=[f"{w.scenario.name}: step {format_seconds(step)}", w.verdict],
            handles=[Patch(label=OWNERS[k].partition(",")[0], **_look(k)) for k in parts],
        )  # fmt: skip
        left = 0.0
        for name, share in parts.items():
            axes[0].barh(0.5, 100 * share, 0.76, left, **_look(name))
            left += 100 * share
        palette.row_axis(axes[0], ["critical path"], 0.5)
        axes[0].set(xlim=(0, 100), xticks=[])
        axes[0].spines["bottom"].set_visible(False)
        gains = 100 * np.array([g.gain for g in w.gains])
        low, high = min(0.0, float(gains.min())), max(0.0, float(gains.max()))
        room = (0.22 if all(g.fits for g in w.gains) else 0.42) * max(high - low, 1.0)
        for at, g in enumerate(w.gains):
            owner = g.ideal.owner or "bubble"
            look = _look(owner) if g.ideal.owner else PLAIN
            axes[1].barh(at + 0.5, 100 * g.gain, 0.72, **look)
            text = f"{100 * g.gain:+.2f} %" + ("" if g.fits else ", does not fit")
            text += ", hidden" * (g.slack is not None)
            axes[1].text(max(100 * g.gain, 0.0) + 0.02 * room, at + 0.5, f" {text}", size=8,
                         va="center_baseline")  # fmt: skip
        palette.row_axis(axes[1], names, 0.5)
        axes[1].axvline(0, color=INK, linewidth=0.7)
        axes[1].set(xlim=(low, high + room), xlabel="of the step that it would gain (%)")
    return palette.save(figure, path)


def _look(owner: str) -> dict[str, Any]:
    return {
        "facecolor": COLOURS[owner], "linewidth": 0.4, "hatch": HATCHES.get(owner),
        "edgecolor": "white" if owner in HATCHED_WHITE or owner not in HATCHES else palette.FAINT,
    }  # fmt: skip
