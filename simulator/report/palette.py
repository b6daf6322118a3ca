"""How all figures look: one colour means one thing, and sheets of paper laid out in inches.

Hues are Okabe and Ito's (2008) or lie between them, so that colour-blind readers tell them apart;
in grey, lightness and hatches do. Sheets are laid out in inches, so that text is known to fit where
it is put. Figures are plain objects: there is no pyplot, no backend and no global state.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Patch
from matplotlib.textpath import text_to_path

from simulator.errors import DescriptionError
from simulator.files import check_writable, write_whole
from simulator.program import Int64
from simulator.report.text import stages_text
from simulator.units import UNITS, format_seconds, to_seconds

if TYPE_CHECKING:
    from simulator.report.result import Result

Float64 = npt.NDArray[np.float64]

COLOURS = {
    # Work: backward is dark, its halves I and W are paler greens.
    "forward": "#56b4e9",
    "backward": "#006b4f",
    "I": "#2fa583",
    "W": "#b4e3cf",
    "optimizer": "#f0e442",
    # Communication
    "tp": "#e69f00",
    "pp": "#0072b2",
    "dp": "#d55e00",
    "cp": "#7b3fa0",
    "ep": "#9e9d24",
    "tied": "#cc79a7",
    "offload": "#8c564b",
    "data": "#3d6f8f",
    "save": "#7f2f45",
    "log": "#5f7d2e",
    # What a loader does for a batch
    "request": "#d9d2e9",
    "read": "#8fb3cc",
    "transform": "#e8a06b",
    "pin": "#a6c48a",
    "copy": "#5d4037",
    # What holds a step back, of work and of all of it; kinds of communication are above
    "compute": "#26356f",
    "memory": "#f2a7a0",
    "launch": "#474747",
    "work": "#4a5568",
    "exposed": "#c2255c",
    "bubble": "#a8a8a8",
    # Steps under jitter
    "samples": "#9fb4cc",
    "gain": "#1f6f78",
    # Idle: grey, the lighter the less there is to see in it
    "fill": "#ececec",
    "stall": "#c2c2c2",
    "drain": "#dadada",
    "idle": "#f3f3f3",
    # Memory, with the optimizer as above
    "weights": "#c8ad7f",
    "gradients": "#7d5a44",
    "activations": "#b9b3e6",
    "transients": "#6f5fb0",
    "gathered": "#e3d6bb",
    "unreduced": "#b08f7d",
    "buffers": "#8f8f8f",
    "context": "#d0d0d0",
    "capacity": "#b00020",
}
"""Colour of everything that figures draw, by its name in reports."""

HATCHES = {
    "tp": "////",
    "pp": "\\\\\\\\",
    "dp": "xxxx",
    "cp": "**",
    "ep": "OO",
    "tied": "oo",
    "offload": "++",
    "data": "..",
    "save": "..",
    "log": "--",
    "exposed": "xxxx",
    "bubble": "----",
    "fill": "....",
    "stall": "----",
    "drain": "||||",
    "gradients": "////",
    "gathered": "....",
    "unreduced": "\\\\\\\\",
    "buffers": "----",
    "context": "....",
}
"""Hatch of areas that would otherwise look alike in grey."""

HATCHED_WHITE = (
    "tp", "pp", "dp", "cp", "ep", "tied", "offload", "data", "save", "log",
    "exposed", "gradients",
)  # fmt: skip

SERIES = (
    ("#332288", "o"), ("#a83c55", "s"), ("#44aa99", "^"), ("#882255", "D"), ("#999933", "v"),
    ("#88ccee", "P"),
)  # fmt: skip
"""Colour and marker of lines that differ in what is compared: after Tol's muted hues, none of the
above; the first three differ in grey too."""

INK, FAINT = "#1a1a1a", "#5c5c5c"
"""Text that must be read, and text that explains it."""

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same widths everywhere
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "hatch.linewidth": 0.5,
    "pdf.fonttype": 42,  # real text, as journals ask
    "svg.hashsalt": "trainsim",
}

FORMATS: dict[str, dict[str, Any]] = {
    ".png": {"Software": None},
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None},
}
"""Files that figures are saved as, with the metadata that would differ from run to run."""


LEGEND: dict[str, Any] = {
    "loc": "lower left",
    "frameon": False,
    "fontsize": 9,
    "borderpad": 0,
    "borderaxespad": 0,
    "handlelength": 1.6,
    "handletextpad": 0.5,
    "columnspacing": 1.2,
    "labelspacing": 0.4,
}

MAX_ROWS = 32
"""Rows that a figure shows at most."""


class Spans(NamedTuple):
    """Intervals of ticks on rows of a figure."""

    row: Int64
    start: Int64
    end: Int64


class Lane(NamedTuple):
    """Where something lies in its row, from the row's top, and how tall it is; a row is 1."""

    top: float
    height: float


def style() -> AbstractContextManager[None]:
    """Return the context in which figures are drawn and saved."""
    return matplotlib.rc_context(STYLE)


def lightness(colour: str) -> float:
    """Return how light ``#rrggbb`` prints in grey, from 0 to 1 (Rec. 601 luma)."""
    red, green, blue = _channels(colour)
    return 0.299 * red + 0.587 * green + 0.114 * blue


def ink_on(colour: str) -> str:
    """Return black or white, whichever is read more easily on a colour."""
    return INK if lightness(colour) > 0.5 else "#ffffff"


def paler(colour: str, share: float) -> str:
    """Return a colour mixed with a share of white."""
    mixed = (c + (1 - c) * share for c in _channels(colour))
    return "#" + "".join(f"{round(255 * c):02x}" for c in mixed)


def _channels(colour: str) -> tuple[float, ...]:
    return tuple(int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))


def area(name: str) -> dict[str, Any]:
    """Return the colour and the hatch of a named area."""
    edge = "#ffffff" if name in HATCHED_WHITE else FAINT
    hatch = HATCHES.get(name)
    return {"facecolor": COLOURS[name], "hatch": hatch, "edgecolor": edge, "linewidth": 0.0}


def swatch(name: str, *, hatched: bool = True) -> Patch:
    """Return the entry of a legend for a named area."""
    if hatched and name in HATCHES:
        return Patch(**area(name), label=name)
    return Patch(facecolor=COLOURS[name], edgecolor=FAINT, linewidth=0.4, label=name)


def plate(name: str) -> dict[str, Any]:
    """Return the look of a value in a named area, on a plate that keeps the hatch out of it."""
    box = {"boxstyle": "square,pad=0.12", "facecolor": COLOURS[name], "edgecolor": "none"}
    place = {"ha": "center", "va": "center_baseline"}
    return {"size": 8, "color": ink_on(COLOURS[name]), "bbox": box, **place}


@lru_cache(maxsize=4096)
def text_width(text: str, size: float) -> float:
    """Return the width of a text in points."""
    font = FontProperties(family=STYLE["font.family"], size=size)
    width, _, _ = text_to_path.get_text_width_height_descent(text, font, ismath=False)
    return float(width)


def cell_widths(texts: Sequence[str], size: float) -> Float64:
    """Return how wide cells must be for their texts, in points."""
    return np.array([text_width(text, size) + 1.6 for text in texts], np.float64)


def cell_text_size(texts: Sequence[str], widths: Float64, height: float) -> float:
    """Return the largest legible size, in points, at which nearly all texts fit their cells."""
    for size in (9.0, 8.0, 7.0, 6.0):
        if size <= height and np.mean(cell_widths(texts, size) <= widths) > 0.95:
            return size
    return min(5.5, height)


def wrapped(text: str, points: float) -> list[str]:
    """Return the lines of a text that is no wider than some points."""
    lines = [""]
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}".strip()
        lines = [*lines[:-1], longer] if text_width(longer, 9) <= points else [*lines, word]
    return lines


def sheet(
    room: float,
    heights: Sequence[float],
    *,
    titles: Sequence[str],
    handles: Sequence[Artist],
    labels: Sequence[str],
    right: float = 0.25,
) -> tuple[Figure, list[Axes]]:
    """Return a figure and its empty axes, between titles above and a legend below.

    Args:
        room: width of the axes in inches.
        heights: of the axes, from the top, in inches.
        titles: the title, then smaller lines.
        handles: entries of the legend.
        labels: what will stand left of the axes.
        right: inches to keep free right of the axes.
    """
    left = 0.3 + max(text_width(label, 9) for label in labels) / 72
    columns = _columns([str(h.get_label()) for h in handles], 72 * room)
    rows = -(-len(handles) // columns)
    space = 72 * 0.97 * (room + right - 0.1)  # screens' hinting widens text by up to 3 %
    head = wrapped(titles[0], space * 9 / 12.5)  # it is larger and bold
    lines = [line for text in titles[1:] for line in wrapped(text, space)]
    top, bottom = 0.24 + 0.2 * len(head) + 0.165 * len(lines), 0.58 + 0.19 * rows
    width, gap = left + room + right, 0.42
    height = top + sum(heights) + gap * (len(heights) - 1) + bottom
    figure, axes, y = Figure(figsize=(width, height)), [], height - top
    for tall in heights:
        y -= tall
        axes.append(figure.add_axes((left / width, y / height, room / width, tall / height)))
        y -= gap
    x, lower = left / width, 0.12 + 0.2 * len(head)
    figure.text(x, 1 - 0.1 / height, "\n".join(head), size=11, weight="bold", va="top")
    figure.text(x, 1 - lower / height, "\n".join(lines), size=9, color=FAINT, va="top")
    # Legends are filled by column; this order makes them read by row.
    by_row = [handles[i] for c in range(columns) for i in range(c, len(handles), columns)]
    figure.legend(handles=by_row, ncols=columns, bbox_to_anchor=(x, 0.07 / height), **LEGEND)
    return figure, axes


def _columns(labels: Sequence[str], points: float) -> int:
    """Return the columns of a legend that is no wider than some points, its rows about equal."""
    around = 9 * (LEGEND["handlelength"] + LEGEND["handletextpad"] + LEGEND["columnspacing"])
    entry = [text_width(label, 9) + around for label in labels]
    if sum(entry) <= points:
        return max(1, len(labels))
    most = max(1, int(points / max(entry)))
    return -(-len(labels) // -(-len(labels) // most))


def boxes(
    ax: Axes, spans: Spans, scale: tuple[int, float], lane: Lane, name: str, **look: Any
) -> None:
    """Draw spans as one collection; `scale` is the tick of x = 0 and the ticks of one x."""
    left, right = (spans.start - scale[0]) / scale[1], (spans.end - scale[0]) / scale[1]
    top = spans.row + lane.top
    x = np.stack([left, left, right, right], axis=1)
    y = np.stack([top, top + lane.height, top + lane.height, top], axis=1)
    corners: Any = np.stack([x, y], axis=2)
    ax.add_collection(PolyCollection(corners, gid=name, **look), autolim=False)


def points_per_unit(ax: Axes) -> tuple[float, float]:
    """Return how many points a unit of x and a unit of y are long."""
    (x0, x1), (y0, y1) = ax.get_xlim(), ax.get_ylim()
    extent: Any = ax.get_window_extent().size
    width, height = extent / ax.figure.dpi
    return 72 * float(width) / abs(x1 - x0), 72 * float(height) / abs(y1 - y0)


def titles_of(result: Result, *notes: str) -> list[str]:
    """Return the title of a figure and the lines below it."""
    name = result.scenario.name if result.scenario else result.title
    bubble = float(result.breakdown.bubble_fraction.mean())
    step = format_seconds(result.step_time_s)
    titles = [f"{name}: step time {step}, bubble fraction {bubble:.1%}"]
    if result.scenario:
        plan = result.scenario.plan
        chunks = f" x {plan.chunks} chunks" if plan.chunks > 1 else ""
        titles.append(
            f"{plan.schedule}, pp {plan.pp}{chunks} x tp {plan.tp} x dp {plan.dp}, "
            f"{result.scenario.num_microbatches} microbatches"
        )
    return [*titles, *filter(None, notes)]


def time_axis(ax: Axes, begin: int, end: int, *, since_last_step: bool) -> float:
    """Give an axis a window as its range, in a unit that suits it; return the ticks of the unit."""
    seconds = to_seconds(end - begin)
    name = next((u for u in ("s", "ms", "us") if seconds >= UNITS["seconds"][u]), "us")
    unit = UNITS["seconds"][name] / to_seconds(1)
    since = " since the last step began" if since_last_step else ""
    ax.set(xlim=(0, (end - begin) / unit or 1.0), xlabel=f"time{since} ({name})")
    return unit


def row_axis(ax: Axes, labels: Sequence[str], middle: float) -> None:
    """Name the rows of an axis, from the top; `middle` is where in its row a name stands."""
    ax.set(ylim=(len(labels), 0), yticks=np.arange(len(labels)) + middle, yticklabels=labels)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)


def sample(ranks: Int64, most: int = MAX_ROWS) -> Int64:
    """Return at most so many of some ranks, evenly spaced from the first to the last."""
    at = np.linspace(0, len(ranks) - 1, min(len(ranks), most))
    return ranks[np.round(at).astype(np.int64)]


def stages_of(result: Result, rank: int) -> list[int]:
    """Return the stages that a rank computes."""
    return result.stages[place_of(result, rank)]


def place_of(result: Result, rank: int) -> int:
    """Return where a rank stands in its pipeline."""
    return int(np.nonzero(result.tiled.tile_ranks == rank)[0][0])


def rank_label(result: Result, rank: int) -> str:
    """Return a rank's name, with its stages unless they are plain."""
    stages = stages_of(result, rank)
    plain = stages == [rank] if result.scenario is None else result.scenario.plan.pp == 1
    if plain or not stages:
        return f"rank {rank}"
    return f"rank {rank} · {stages_named(stages)}"


def place_named(result: Result) -> str:
    """Return what a place in the pipeline is called: a stage where each has one."""
    return "stage" if max(map(len, result.stages)) == 1 else "pipeline position"


def stages_named(stages: Sequence[int]) -> str:
    """Return the stages of a rank in words."""
    return f"stage{'s' * (len(stages) > 1)} {stages_text(stages)}"


def check_path(path: str | Path | None) -> None:
    """Check that a figure can be saved at a path, before the work of drawing it.

    Raises:
        DescriptionError: when its suffix is unknown or nothing can be written there.
    """
    if path is None:
        return
    if Path(path).suffix.lower() not in FORMATS:
        *others, last = FORMATS
        raise DescriptionError(
            f"cannot save a figure as {str(path)!r}: its name must end in "
            f"{', '.join(others)} or {last}"
        )
    check_writable(Path(path))


def save(figure: Figure, path: str | Path | None) -> Figure:
    """Save a figure whole or not at all, when there is a path; return it."""
    if path is not None:
        metadata = FORMATS[Path(path).suffix.lower()]
        with style():
            write_whole(Path(path), lambda to: figure.savefig(to, dpi=200, metadata=metadata))
    return figure
