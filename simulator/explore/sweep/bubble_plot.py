"""The figure of the bubble over microbatches: how many it takes until a pipeline is full."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from simulator.errors import DescriptionError
from simulator.explore.sweep.lines import label, telling
from simulator.explore.sweep.point import SAMPLES
from simulator.explore.sweep.row import OK, Row
from simulator.explore.sweep.swept import Swept
from simulator.report import palette
from simulator.report.labels import apart
from simulator.report.palette import FAINT, SERIES, text_width
from simulator.schedules import BUBBLE_FRACTION

MOVERS = ("run.global_batch_size", SAMPLES, "plan.microbatch_size")
"""Keys that change how many microbatches there are; the first that differs leads along a line."""

SIZE = 8.0
"""Points of a label."""

TALL = 3.3
"""Inches of the axes."""

MOST_TICKS = 9


@dataclass(frozen=True, slots=True)
class BubbleLine:
    """Points that differ in the number of microbatches only, the fewest first."""

    name: str
    rows: tuple[Row, ...]

    @property
    def ideal(self) -> list[tuple[int, float]]:
        """Microbatches and bubble fraction for equal stages and free messages, where it is known.

        (p-1)/(m+p-1) of plain schedules, less where ranks hold several chunks.
        """
        return [
            (row["num_microbatches"], formula(row["pp"], row["num_microbatches"], row["chunks"]))
            for row in self.rows
            if (formula := BUBBLE_FRACTION.get(row["schedule"]))
        ]

    def hides(self, other: BubbleLine) -> bool:
        """Return whether another line lies on this one."""
        return [row["num_microbatches"] for row in self.rows] == [
            row["num_microbatches"] for row in other.rows
        ] and all(
            abs(a["bubble_fraction"] - b["bubble_fraction"]) < 0.003
            for a, b in zip(self.rows, other.rows, strict=True)
        )


def check_bubble(keys: Sequence[str]) -> None:
    """Check before the work that a sweep has several numbers of microbatches.

    Raises:
        DescriptionError: when it has not.
    """
    if not any(key in MOVERS for key in keys):
        raise DescriptionError(
            "--plot bubble draws over microbatches; list several values of one of "
            f"{', '.join(MOVERS)}"
        )


def bubble_lines(swept: Swept) -> list[BubbleLine]:
    """Return the lines of a sweep; points that are refused are left out.

    Raises:
        DescriptionError: when there is none, or too many to tell apart.
    """
    check_bubble(swept.varied)
    mover = next(key for key in MOVERS if key in swept.varied)
    rows = [row for row in swept.rows if row["status"] == OK]
    names = telling(rows, [key for key in swept.varied if key != mover])
    found: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: int(row["num_microbatches"])):
        found.setdefault(label(row, names), []).append(row)
    if not found:
        raise DescriptionError("no point of the sweep runs, so there is no bubble to draw")
    if len(found) > len(SERIES):
        raise DescriptionError(
            f"the figure bubble would hold {len(found)} lines; list fewer values, so that there "
            f"are at most {len(SERIES)}"
        )
    return [BubbleLine(name, tuple(rows)) for name, rows in found.items()]


def bubble_figure(swept: Swept, path: str | Path | None = None) -> Figure:
    """Draw the bubble fraction over microbatches, a line for all settings that change neither.

    Raises:
        DescriptionError: when there is nothing to draw, or the file cannot be saved.
    """
    palette.check_path(path)
    lines = bubble_lines(swept)
    right = 0.35 + max(text_width(line.name, SIZE) for line in lines) / 72
    handles = [Line2D([], [], color=FAINT, lw=1.4, marker="o", ms=4.5, label="simulated")]
    if any(line.ideal for line in lines):
        formula = "closed form: equal stages, free messages"
        handles.append(Line2D([], [], color=FAINT, lw=1.0, ls=(0, (3, 2)), label=formula))
    titles = [
        f"{swept.name}: bubble over microbatches",
        "share of the step in which ranks idle and nothing moves for them, mean over ranks",
    ]
    out = len(swept.rows) - sum(len(line.rows) for line in lines)
    titles += [f"{out} of {len(swept.rows)} points are refused and not drawn"] if out else []
    with palette.style():
        figure, (ax,) = palette.sheet(
            5.6, [TALL], titles=titles, handles=handles, labels=["100 %"], right=right
        )
        for k, (line, (colour, marker)) in enumerate(zip(lines, SERIES, strict=False)):
            if line.ideal:
                ax.plot(*zip(*line.ideal, strict=True), color=colour, lw=1.0, ls=(0, (3, 2)),
                        gid="ideal", zorder=1)  # fmt: skip
            x = [row["num_microbatches"] for row in line.rows]
            y = [row["bubble_fraction"] for row in line.rows]
            wide = 2.4 if any(map(line.hides, lines[k + 1 :])) else 1.0
            ax.plot(x, y, color=colour, marker=marker, ms=4.5 * wide, lw=1.4 * wide, mec="white",
                    mew=0.5, gid=line.name or "line")  # fmt: skip
        _axes(ax, lines)
        _name_lines(ax, lines)
    return palette.save(figure, path)


def _axes(ax: Axes, lines: Sequence[BubbleLine]) -> None:
    counts = sorted({row["num_microbatches"] for line in lines for row in line.rows})
    top = max(
        [row["bubble_fraction"] for line in lines for row in line.rows]
        + [share for line in lines for _, share in line.ideal]
    )
    ax.set(
        xscale="log", xlim=(0.9 * counts[0], 1.1 * counts[-1]), ylim=(0, max(1.08 * top, 0.05)),
        xlabel="microbatches of a step",
    )  # fmt: skip
    step = -(-len(counts) // MOST_TICKS)
    ax.xaxis.set_major_locator(FixedLocator([float(c) for c in counts[::-1][::step]]))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g} %"))
    ax.grid(axis="y", color="#e8e8e8", lw=0.6)
    ax.set_axisbelow(True)


def _name_lines(ax: Axes, lines: Sequence[BubbleLine]) -> None:
    """Name lines at their right ends."""
    high = ax.get_ylim()[1]
    ends = sorted((line.rows[-1]["bubble_fraction"] / high, k) for k, line in enumerate(lines))
    places = apart([end for end, _ in ends], 1.25 * SIZE / 72 / TALL, 0.02, 0.98)
    for y, (_, k) in zip(places, ends, strict=True):
        ax.annotate(lines[k].name, (1, y), (5, 0), xycoords="axes fraction", size=SIZE,
                    textcoords="offset points", color=SERIES[k][0], va="center_baseline",
                    gid="name")  # fmt: skip
