"""The figure of a loader: what is done for which batch, from storage to the device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from simulator.errors import DescriptionError
from simulator.program import ACTIONS, STORED, Int64, Program
from simulator.report import palette
from simulator.report.breakdown import stream_category, work_category
from simulator.report.palette import COLOURS, Lane, Spans

if TYPE_CHECKING:
    from simulator.report.result import Result

NO_DATA = "there is no data path to draw: the scenario has no [data]"

MOST_BATCHES, MOST_WORKERS = 12, 12
"""Batches copied and workers that are shown; a longer step is cut."""


class Pieces(NamedTuple):
    """What is drawn, an entry each: on which row, as what, of which batch, from when to when."""

    row: Int64
    name: list[str]
    batch: Int64
    start: Int64
    end: Int64


def loader(result: Result, path: str | Path | None = None) -> Figure:
    """Draw the batches of the first rank that loads during the last step, a row a stream.

    Raises:
        DescriptionError: when there is no data path, or the figure cannot be saved.
    """
    palette.check_path(path)
    if result.scenario is None or result.scenario.data is None:
        raise DescriptionError(NO_DATA)
    rank, labels, pieces, (begin, end) = loader_pieces(result)
    names = [n for n in COLOURS if n in {"idle", *pieces.name}]
    which = f"rank {rank}; numbers: batches of its loader, one a microbatch, from the run's first"
    data = result.scenario.data
    if data.workers > MOST_WORKERS:
        which += f"; {MOST_WORKERS} of {data.workers} workers"
    with palette.style():
        figure, (ax,) = palette.sheet(
            9.0, [0.34 * len(labels)], labels=labels,
            titles=palette.titles_of(result, which),
            handles=[palette.swatch(name, hatched=False) for name in names],
        )  # fmt: skip
        scale = (begin, palette.time_axis(ax, begin, end, since_last_step=begin > 0))
        _draw(ax, labels, pieces, scale)
    return palette.save(figure, path)


def loader_pieces(result: Result) -> tuple[int, list[str], Pieces, tuple[int, int]]:
    """Return the rank, the names of rows, what is on them, and the window that is shown."""
    p, t = result.excerpt([int(result.tiled.tile_ranks[0, 0])])
    lanes = [i for i, name in enumerate(p.streams) if stream_category(name) == "data"]
    loading = np.flatnonzero(np.isin(p.stream, lanes))
    rank = int(p.rank[loading].min())
    copies = loading[(p.stream[loading] == p.streams.index("copy")) & (p.rank[loading] == rank)]
    number, of_pass = _numbers(p, loading[p.rank[loading] == rank])
    begin, end = result.window
    after = [s for s in np.sort(t.start[copies]).tolist() if s >= begin]
    if len(after) > MOST_BATCHES:
        end = min(end, after[MOST_BATCHES])
    workers = [name for name in p.streams if name.startswith("worker")][:MOST_WORKERS]
    order = ["storage", *workers, "pin", "copy", "compute"]
    rows = {p.streams.index(name): row for row, name in enumerate(order)}
    shown = np.flatnonzero(
        (p.rank == rank) & np.isin(p.stream, list(rows)) & (t.end > begin) & (t.start < end)
        & (t.end > t.start)
    )  # fmt: skip
    out: dict[tuple[int, str, int], list[int]] = {}
    names_of = _names(p)
    for op in shown.tolist():
        name, lane = names_of[p.cost[op]], rows[int(p.stream[op])]
        if lane == len(order) - 1:
            name = work_category(ACTIONS[p.action[op]])
        if name == "start":
            continue
        batch = number.get(op, of_pass.get((int(p.step[op]), int(p.microbatch[op])), -1))
        span = out.setdefault((lane, name, batch), [int(t.start[op]), int(t.end[op])])
        span[:] = min(span[0], int(t.start[op])), max(span[1], int(t.end[op]))
    found = [[lane, batch, *span] for (lane, _, batch), span in out.items()]
    row, number_of, start, until = np.array(found, np.int64).reshape(-1, 4).T
    names = [name for _, name, _ in out]
    pieces = Pieces(row, names, number_of, start.clip(begin, end), until.clip(begin, end))
    return rank, order, pieces, (begin, end)


def _names(p: Program) -> list[str]:
    """Return what each cost of a program is called in the figure."""
    return ["read" if cost.name in STORED else cost.name for cost in p.costs]


def _numbers(p: Program, loading: Int64) -> tuple[dict[int, int], dict[tuple[int, int], int]]:
    """Return the batch of each row of a rank's loader, and of each step and microbatch."""
    names = np.array(_names(p), object)[p.cost[loading]]
    number: dict[int, int] = {}
    for name in dict.fromkeys(names.tolist()):
        rows = loading[names == name].tolist()  # of a name they stand in order of batches
        number |= {row: batch for batch, row in enumerate(rows)}
    of: dict[tuple[int, int], int] = {}
    for row in loading[names == "copy"].tolist():  # those beyond the run repeat its last labels
        of.setdefault((int(p.step[row]), int(p.microbatch[row])), number[row])
    return number, of


def _draw(ax: Axes, labels: list[str], pieces: Pieces, scale: tuple[int, float]) -> None:
    lane = Lane(0.1, 0.8)
    palette.row_axis(ax, labels, 0.5)
    for row in range(len(labels)):
        where = (lane.top + row, lane.height)
        ax.broken_barh([ax.get_xlim()], where, color=COLOURS["idle"], linewidth=0, gid="idle")
    x, _ = palette.points_per_unit(ax)
    width = (pieces.end - pieces.start) / scale[1] * x
    names = np.array(pieces.name)
    for name in dict.fromkeys(pieces.name):
        mine = names == name
        spans = Spans(pieces.row[mine], pieces.start[mine], pieces.end[mine])
        look = {"facecolor": COLOURS[name], "edgecolor": "white", "linewidth": 0.5}
        palette.boxes(ax, spans, scale, lane, name, **look)
    texts = ["" if batch < 0 else str(batch) for batch in pieces.batch.tolist()]
    for i in np.flatnonzero(palette.cell_widths(texts, 8) <= width).tolist():
        middle = ((pieces.start[i] + pieces.end[i]) / 2 - scale[0]) / scale[1]
        ax.text(middle, pieces.row[i] + 0.5, texts[i], size=8, ha="center", va="center_baseline",
                color=palette.ink_on(COLOURS[pieces.name[i]]))  # fmt: skip
