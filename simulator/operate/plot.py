"""The figure of operations: where the time goes, how goodput spreads, and the best interval."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from simulator.operate.result import Operated, Spread
from simulator.operate.text import format_hours
from simulator.report import palette
from simulator.report.palette import COLOURS, FAINT, INK, SERIES

if TYPE_CHECKING:
    from simulator.operate.best import Best

LOOKS = {
    "wall clock": ("#d6d6d6", None),
    "checkpoint": (COLOURS["save"], "////"),
    "lost work": ("#ff8c7a", "xxxx"),
    "detection": ("#ffe9a8", None),
    "waiting for repair": ("#a0a0aa", "...."),
    "rescheduling": ("#d7a9e3", "\\\\\\\\"),
    "restart": ("#9c6ade", None),
    "restore": ("#a8dadc", "----"),
    "slow node": ("#6d597a", "////"),
    "fewer replicas": ("#84a98c", "oo"),
    "training": ("#4f7942", None),
}
"""Colour and hatch of each bar, none of which means another thing elsewhere; apart in grey by
lightness or hatch."""

ROW = 0.3
"""Inches of a bar with its gap."""


def goodput_figure(o: Operated, path: str | Path | None = None, best: Best | None = None) -> Figure:
    """Draw what is taken from the wall clock until training is left, with its spread over samples.

    Args:
        o: what to draw.
        path: file to save it as; none when absent.
        best: adds goodput by checkpoint interval.

    Raises:
        DescriptionError: when the figure cannot be saved.
    """
    palette.check_path(path)
    shares = {name: x for name, x in o.by_category().items() if x.any() and name != "training"}
    names = ["wall clock", *shares, "training"]
    many = len(o.seeds) > 1
    heights = [ROW * len(names) + 0.15, *([1.3] if many else []), *([1.7] if best else [])]
    g = Spread.of(o.goodput)
    spread = (
        f"whiskers: 5 to 95 % of {len(o.seeds):,} samples" if many else f"seed {o.seeds[0]} alone"
    )
    ops = o.operations
    titles = [
        f"{o.scenario.name}: goodput {g.mean:.1%}",
        f"{ops.days:g} days, stopped {o.interruptions.mean():,.1f} times, a checkpoint every "
        f"{format_hours(o.job.interval * o.step_time_s)}; {spread}",
    ]
    with palette.style():
        figure, axes = palette.sheet(
            6.0, heights, titles=titles, handles=_handles(many, best), labels=names, right=1.45
        )
        _waterfall(axes[0], o, names)
        if many:
            _histogram(axes[1], o, g)
        if best:
            _curve(axes[-1], best)
        for ax in axes[:-1]:
            ax.tick_params(axis="x", labelsize=8)
        _apart(figure, axes)
    return palette.save(figure, path)


def _handles(many: bool, best: Best | None) -> list[Any]:
    handles: list[Any] = [Patch(facecolor=LOOKS["training"][0], label="effective training time")]
    if many:
        handles.append(Line2D([], [], color=INK, lw=1, marker="|", label="5 to 95 % of samples"))
    if best is not None:
        handles += [
            Line2D([], [], color=FAINT, marker="o", ms=3, lw=1, label="simulated"),
            *(Line2D([], [], color=colour, ls=dash, label=label)
              for label, (_, colour, dash) in _marks(best).items()),
        ]  # fmt: skip
    return handles


def _apart(figure: Figure, axes: list[Axes]) -> None:
    """Make room for the names below axes: the sheet leaves little between them."""
    height = figure.get_figheight()
    grow = 0.32 * (len(axes) - 1)
    if not grow:
        return
    boxes = [ax.get_position() for ax in axes]
    figure.set_figheight(height + grow)
    scale = height / (height + grow)
    for text in figure.texts:  # they hang from the top
        x, y = text.get_position()
        text.set_position((x, 1 - (1 - y) * scale))
    for legend in figure.legends:
        anchor = legend.get_bbox_to_anchor().transformed(figure.transFigure.inverted())
        legend.set_bbox_to_anchor((anchor.x0, anchor.y0 * scale))
    for k, (ax, box) in enumerate(zip(axes, boxes, strict=True)):
        raised = 0.32 * (len(axes) - 1 - k) / (height + grow)
        ax.set_position((box.x0, box.y0 * scale + raised, box.width, box.height * scale))


def _waterfall(ax: Axes, o: Operated, names: list[str]) -> None:
    """Take each loss from what is left, from the top down to training."""
    shares, hours = o.by_category(), o.operations.days * 24
    left = 1.0
    low = min(0.999, Spread.of(o.goodput).low)
    start = max(0.0, low - 0.35 * (1 - low)) if low > 0.4 else 0.0
    for row, name in enumerate(names):
        colour, hatch = LOOKS[name]
        if name in ("wall clock", "training"):
            x = Spread.of(shares[name]) if name == "training" else Spread.of(np.ones(1))
            begin, end, whiskers = start, x.mean, (x.low, x.high)
        else:
            x = Spread.of(shares[name])
            begin, end, whiskers = left - x.mean, left, (left - x.high, left - x.low)
            left -= x.mean
        edge = "#ffffff" if palette.lightness(colour) < 0.55 else FAINT
        ax.barh(row, 100 * (end - begin), left=100 * begin, height=0.62, facecolor=colour,
                hatch=hatch, edgecolor=edge, lw=0.0, gid=name)  # fmt: skip
        if whiskers[1] > whiskers[0]:
            ax.plot([100 * w for w in whiskers], [row, row], color=INK, lw=1, marker="|", ms=6)
        sign = "" if name in ("wall clock", "training") else "- "
        ax.text(1.01, row, f"{sign}{x.mean:.2%}  {x.mean * hours:,.1f} h", va="center_baseline",
                transform=ax.get_yaxis_transform())  # fmt: skip
    palette.row_axis(ax, names, 0.0)
    ax.set(ylim=(len(names) - 0.45, -0.55), xlim=(100 * start, 100))
    since = f", from {100 * start:.3g} % on" if start else ""
    ax.set_xlabel(f"share of the wall clock (%{since})", fontsize=8)


def _histogram(ax: Axes, o: Operated, g: Spread) -> None:
    """Draw how many samples had which goodput."""
    ax.hist(100 * o.goodput, bins=min(40, max(8, len(o.seeds) // 20)), color=LOOKS["training"][0])
    for value in (g.low, g.high):
        ax.axvline(100 * value, color=INK, lw=1, ls=":")
    ax.text(0.0, 1.03, f"goodput of each sample: {g.low:.2%} to {g.high:.2%} in 90 of 100",
            transform=ax.transAxes, size=8)  # fmt: skip
    ax.set_ylabel("samples", fontsize=8)
    ax.set_xlabel("goodput (%)", fontsize=8)


def _marks(best: Best) -> dict[str, tuple[float, str, str]]:
    return {
        "best by simulation": (best.best, INK, "-"),
        "Young": (best.young, SERIES[1][0], "--"),
        "Daly": (best.daly, SERIES[0][0], ":"),
    }


def _curve(ax: Axes, best: Best) -> None:
    """Draw goodput by checkpoint interval, and the rules' intervals."""
    scale, unit = (3600.0, "h") if best.seconds[-1] > 7200 else (60.0, "min")
    x, y = np.array(best.seconds) / scale, 100 * np.array(best.goodput)
    ax.plot(x, y, color=FAINT, marker="o", ms=3, lw=1)
    for value, colour, dash in _marks(best).values():
        ax.axvline(value / scale, color=colour, ls=dash, lw=1.4)
    ticks = np.array([0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500])
    ticks = ticks[(ticks >= x[0]) & (ticks <= x[-1])]
    ax.set_xscale("log")
    ax.set_xticks(ticks, [f"{t:g}" for t in ticks])
    ax.minorticks_off()
    ax.set_xlabel(f"training between checkpoints ({unit})", fontsize=8)
    ax.set_ylabel("goodput (%)", fontsize=8)
