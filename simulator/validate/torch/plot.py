"""The overlay of a replay: a predicted step over a measured one, rank by rank, on one axis."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from simulator.errors import DescriptionError
from simulator.program import ACTIONS, NONE, Int64
from simulator.report import palette
from simulator.report.breakdown import stream_category
from simulator.report.palette import COLOURS, Lane, Spans
from simulator.timeline import Timeline
from simulator.units import format_seconds
from simulator.validate.torch.compare import Comparison, Gantt
from simulator.validate.torch.job import Job
from simulator.validate.torch.text import TITLES

ROW = 0.27
"""Inches of a row: a rank's prediction, or what was measured of it."""

LANE = Lane(0.08, 0.84)

ROOM = 7.0
"""Inches of the axis."""

NAMES = {"F": "forward", "B": "backward", "I": "I", "W": "W", "OPT": "optimizer"}
"""Colour of an action's work; a sum of tp ranks has that of its axis."""


def overlay(c: Comparison, path: str | Path | None = None) -> Figure:
    """Draw a predicted step over a measured one.

    Args:
        c: what a replay says.
        path: file to save it as; none when absent.

    Raises:
        DescriptionError: when times were left out, so that there is nothing to draw, or the figure
            cannot be saved.
    """
    palette.check_path(path)
    if c.gantt is None:
        raise DescriptionError(
            f"there is no figure: times are left out, since {c.shares_cores or 'no step ended'}"
        )
    gantt, job = c.gantt, c.job
    ranks = palette.sample(np.arange(job.world_size))[: palette.MAX_ROWS // 2].tolist()
    rows = [(rank, which) for rank in ranks for which in ("predicted", "measured")]
    labels = [f"rank {rank} {which}" for rank, which in rows]
    begins = {name: int(getattr(gantt, name).start.min()) for name in ("predicted", "measured")}
    long = max(getattr(gantt, name).makespan - begins[name] for name in begins)
    chunks = range(max(len(job.stages_of(rank)) for rank in ranks))
    every = {
        (name, later): _cells(gantt, rows, begins, name, later, job)
        for name in (*NAMES.values(), "tp")
        for later in (chunks if name != "tp" else (0,))
    }
    drawn = list(dict.fromkeys(name for (name, _), cells in every.items() if len(cells.row)))
    lengths = " ".join(
        f"{name} {format_seconds((getattr(gantt, name).makespan - begins[name]) * 1e-12)}"
        for name in begins
    ).replace(" measured", ", measured")
    axes = "".join(f" x {a} {getattr(job, a)}" for a in ("dp", "tp") if getattr(job, a) > 1)
    with palette.style():
        figure, (ax,) = palette.sheet(
            ROOM, [ROW * len(rows)], labels=labels,
            titles=[
                f"A step of real ranks: {lengths}",
                f"pp {job.pp}{axes}, {job.num_microbatches} microbatches; measured by the "
                f"{TITLES[gantt.clock]}; predicted from op times measured apart",
                "each is the step of median length"
                f"{'; paler cells: later chunks of a rank' if len(chunks) > 1 else ''}"
                f"; {c.machine.get('device')}",
            ],
            handles=[palette.swatch(name, hatched=False) for name in (*drawn, "idle")],
        )  # fmt: skip
        unit = palette.time_axis(ax, 0, long, since_last_step=False)
        palette.row_axis(ax, labels, 0.5)
        whole = np.full(len(rows), long)
        at = np.arange(len(rows))
        palette.boxes(
            ax, Spans(at, 0 * at, whole), (0, unit), LANE, "idle", facecolor=COLOURS["idle"]
        )
        for (name, later), cells in every.items():
            if len(cells.row):
                colour = palette.paler(COLOURS[name], 0.5 * (1 - 0.5**later))
                _draw(ax, cells, unit, name, colour, numbered=job.tp == 1)
        for rank in range(1, len(ranks)):
            ax.axhline(2 * rank, color=palette.FAINT, lw=0.5)
    return palette.save(figure, path)


class Cells(NamedTuple):
    """Cells of one colour, an entry each, in ticks."""

    row: Int64
    start: Int64
    end: Int64
    microbatch: Int64


def _cells(
    gantt: Gantt, rows: list[tuple[int, str]], begins: dict[str, int], name: str, later: int,
    job: Job,
) -> Cells:  # fmt: skip
    """Return the cells of a name, of the stages that are a rank's `later`-th."""
    p, found = gantt.program, [np.zeros((4, 0), np.int64)]
    for row, (rank, which) in enumerate(rows):
        stages = job.stages_of(rank)[later : later + 1] if name != "tp" else job.stages_of(rank)
        place, tile = (int(x[0]) for x in np.nonzero(p.tile_ranks == rank))
        if name == "tp":
            streams = [i for i, s in enumerate(p.streams) if stream_category(s) == "tp"]
            mine = np.isin(p.stream, streams)
        else:
            codes = [code for code, kind in enumerate(ACTIONS) if NAMES.get(kind) == name]
            mine = np.isin(p.action, codes) & (p.stream == p.streams.index("compute"))
        ops = np.flatnonzero(mine & (p.rank == place) & np.isin(p.stage, stages))
        timeline: Timeline = getattr(gantt, which)
        start, end = timeline.columns
        column = 0 if timeline.column_of_tile is None else int(timeline.column_of_tile[tile])
        start, end = start[ops, column] - begins[which], end[ops, column] - begins[which]
        found.append(np.stack([np.full(len(ops), row), start, end, p.microbatch[ops]]))
    return Cells(*np.concatenate(found, axis=1))


def _draw(ax: Axes, cells: Cells, unit: float, name: str, colour: str, numbered: bool) -> None:
    look = {"edgecolor": "white", "linewidth": 0.3} if numbered else {"linewidth": 0.0}
    spans = Spans(cells.row, cells.start, cells.end)
    palette.boxes(ax, spans, (0, unit), LANE, name, facecolor=colour, **look)
    shown = np.flatnonzero(cells.microbatch != NONE)
    if not numbered or not len(shown):
        return
    points, tall = palette.points_per_unit(ax)
    widths = (cells.end - cells.start)[shown] / unit * points
    texts = [str(m) for m in cells.microbatch[shown].tolist()]
    size = palette.cell_text_size(texts, widths, 0.75 * tall)
    for i in np.flatnonzero(widths >= palette.cell_widths(texts, size)).tolist():
        middle = (cells.start[shown[i]] + cells.end[shown[i]]) / 2 / unit
        ax.text(
            middle, cells.row[shown[i]] + 0.5, texts[i], size=size, color=palette.ink_on(colour),
            ha="center", va="center_baseline",
        )  # fmt: skip
