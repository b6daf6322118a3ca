"""Figures: the pipeline as papers draw it, where the time goes, and memory over time.

This module, the modules of other figures (`..._plot`) and their palette are the one door of
matplotlib, opened when a first figure is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from simulator.errors import DescriptionError
from simulator.lower.mesh import Mesh
from simulator.program import ACTION_CODE, ACTIONS, NONE, Int64
from simulator.report import (
    density_plot,
    loader_plot,
    memory_plot,
    network_plots,
    palette,
    roofline_plot,
)
from simulator.report.breakdown import CATEGORIES, COMMUNICATION, moves, stream_category
from simulator.report.palette import COLOURS, INK, Float64, Lane, Spans, text_width

if TYPE_CHECKING:
    from simulator.report.result import Result

MAX_EVERY_RANK = 16
"""Ranks that a pipeline shows all of."""

WORK_NAMES = {"F": "forward", "B": "backward", "I": "I", "W": "W"}
"""Palette name of an action on the compute stream; any other is the optimizer."""


class Cells(NamedTuple):
    """Actions on compute streams, an entry each; `row` counts the ranks shown, ticks are cut."""

    row: Int64
    action: Int64
    stage: Int64
    microbatch: Int64
    start: Int64
    end: Int64


class Plots:
    """Figures of a result. Each is returned and, with a path, saved as png, svg or pdf."""

    def __init__(self, result: Result) -> None:
        self.result = result

    def pipeline(self, path: str | Path | None = None, **options: Any) -> Figure:
        """Draw when ranks compute and communicate; options are those of `pipeline` below."""
        return pipeline(self.result, path, **options)

    def density(self, path: str | Path | None = None) -> Figure:
        """Draw what all ranks do at any time, thousands of them."""
        return density_plot.density_figure(self.result, path)

    def roofline(self, path: str | Path | None = None) -> Figure:
        """Draw how fast operators run for what they compute a byte, under their device's roofs."""
        return roofline_plot.roofline_figure(self.result, path)

    def breakdown(self, path: str | Path | None = None) -> Figure:
        """Draw where the time of each rank goes, as shares of the step."""
        return breakdown(self.result, path)

    def memory(self, path: str | Path | None = None) -> Figure:
        """Draw what fills device memory over time."""
        return memory_plot.memory(self.result, path)

    def loader(self, path: str | Path | None = None) -> Figure:
        """Draw what a loader does for which batch; the scenario must have a data path."""
        return loader_plot.loader(self.result, path)

    def links(self, path: str | Path | None = None) -> Figure:
        """Draw how busy the busiest links are over time; flows must share links."""
        return network_plots.links(self.result, path)

    def topology(self, path: str | Path | None = None) -> Figure:
        """Draw the fabric of the cluster, coloured by use where flows share links."""
        return network_plots.topology(self.result, path)


def pipeline(
    result: Result,
    path: str | Path | None = None,
    *,
    ranks: Sequence[int] | None = None,
    whole_run: bool = False,
) -> Figure:
    """Draw when ranks compute and communicate, a row a rank, cells numbered by microbatch.

    Where more than `palette.MAX_ROWS` rows would be needed, and none are chosen, the last step is
    drawn as `density_plot` does, which shows every rank.

    Args:
        result: what to draw.
        path: where to save the figure; its suffix says how.
        ranks: rows from the top; every rank, or one of each stage, when absent.
        whole_run: draw all steps instead of the last one.

    Raises:
        DescriptionError: when a rank does not exist or the figure cannot be saved.
    """
    palette.check_path(path)
    begin, end = (0, result.times.makespan) if whole_run else result.window
    if ranks is None and not whole_run and len(result.stage_ranks) > palette.MAX_ROWS:
        return density_plot.density_figure(result, path)
    shown, chosen = pipeline_rows(result, ranks)
    cells = pipeline_cells(result, shown, begin, end)
    every = {c: flow_spans(result, shown, c, begin, end) for c in COMMUNICATION}
    flows = {c: spans for c, spans in every.items() if len(spans.row)}
    drawn = {"idle", *flows, *(_work_name(code) for code in set(cells.action.tolist()))}
    lanes = f"thin lanes, from the top: {', '.join(flows)}" if len(flows) > 1 else ""
    later = "paler cells: later chunks of a rank" if _chunk(cells).any() else ""
    pairs = pair_spans(result, shown, cells)
    framed = "framed: a forward and a backward together" if len(pairs.row) else ""
    over = "half a row high: actions whose kernels take turns" if at_once(cells).any() else ""
    notes = "; ".join(filter(None, (lanes, later, framed, over)))
    labels = [palette.rank_label(result, rank) for rank in shown.tolist()]
    heights = [min(0.46 if flows else 0.34, 12 / len(shown)) * len(shown)]
    with palette.style():
        figure, (ax,) = palette.sheet(
            _room_for_numbers(cells, end - begin), heights, labels=labels,
            titles=palette.titles_of(result, chosen, notes),
            handles=[palette.swatch(n, hatched=False) for n in COLOURS if n in drawn],
        )  # fmt: skip
        scale = (begin, palette.time_axis(ax, begin, end, since_last_step=begin > 0))
        _draw_rows(ax, cells, flows, scale, labels, pairs)
        for step_end in result.step_ends[:-1] if whole_run else ():
            ax.axvline((step_end - begin) / scale[1], color=INK, lw=0.8, ls="--", gid="step")
    return palette.save(figure, path)


def pipeline_rows(result: Result, ranks: Sequence[int] | None = None) -> tuple[Int64, str]:
    """Return the ranks that a pipeline shows from the top, and which they are when not all.

    Raises:
        DescriptionError: when a stated rank does not exist, or none is stated.
    """
    count = result.tiled.num_ranks
    every = np.arange(count)
    if ranks is not None:
        if not 0 < len(ranks) == len(set(ranks).intersection(range(count))):
            raise DescriptionError(f"ranks {list(ranks)} must be some of 0 to {count - 1}, once")
        return np.array(ranks, np.int64), f"{len(ranks)} of {count} ranks"
    if count <= MAX_EVERY_RANK:
        return every, ""
    if result.scenario is None:
        shown, which = palette.sample(every), "evenly spaced"
    else:
        stages = result.stage_ranks
        shown = palette.sample(stages)
        kind = palette.place_named(result)
        which = f"one of each {kind}" if len(shown) == len(stages) else f"of evenly spaced {kind}s"
    return shown, f"{len(shown)} of {count} ranks, {which}" if len(shown) < count else ""


def pipeline_cells(result: Result, ranks: Int64, begin: int, end: int) -> Cells:
    """Return one cell for each action on the compute streams of some ranks, cut to a window."""
    p, t = result.excerpt(ranks)
    rows = _row_of_rank(result, ranks)
    mine = (p.stream == p.streams.index("compute")) & (rows[p.rank] != NONE)
    ops = np.flatnonzero(mine & (t.end > begin) & (t.start < end) & (t.end > t.start))
    names = (p.rank, p.step, p.action, p.stage, p.microbatch)
    keys = np.stack([rows[p.rank[ops]], *(c[ops].astype(np.int64) for c in names[1:])])
    order = np.lexsort(keys[::-1])
    keys, ops = keys[:, order], ops[order]
    first = np.flatnonzero(np.append(len(ops) > 0, (np.diff(keys) != 0).any(axis=0)))
    row, _, action, stage, microbatch = keys[:, first]
    start = np.minimum.reduceat(t.start[ops], first) if len(ops) else first
    until = np.maximum.reduceat(t.end[ops], first) if len(ops) else first
    return Cells(row, action, stage, microbatch, start.clip(begin, end), until.clip(begin, end))


def flow_spans(result: Result, ranks: Int64, category: str, begin: int, end: int) -> Spans:
    """Return when flows of a category move bytes on some ranks; those that touch are merged."""
    p, t = result.excerpt(ranks)
    rows = _row_of_rank(result, ranks)
    streams = [i for i, s in enumerate(p.streams) if stream_category(s) == category]
    mine = np.isin(p.stream, streams) & (rows[p.rank] != NONE) & moves(p)
    ops = np.flatnonzero(mine & (t.end > begin) & (t.start < end) & (t.end > t.start))
    # Rows lie one after the other on one axis of time, a tick apart, so that one pass merges all.
    length = end - begin + 1
    start = rows[p.rank[ops]] * length + t.start[ops].clip(begin, end) - begin
    until = rows[p.rank[ops]] * length + t.end[ops].clip(begin, end) - begin
    order = np.argsort(start, kind="stable")
    start, until = start[order], np.maximum.accumulate(until[order])
    first = np.flatnonzero(np.append(len(ops) > 0, start[1:] > until[:-1]))
    last = np.append(first[1:], len(ops))[: len(first)] - 1
    row = start[first] // length
    return Spans(row, start[first] % length + begin, until[last] % length + begin)


def pair_spans(result: Result, ranks: Int64, cells: Cells) -> Spans:
    """Return from when to when a forward and a backward of a bare schedule run together."""
    columns = (cells.row, cells.action, cells.stage, cells.microbatch)
    place = {key: i for i, key in enumerate(zip(*(c.tolist() for c in columns), strict=True))}
    both = [
        [place.get((row, ACTION_CODE[a.kind], a.stage, a.microbatch)) for a in pair]
        for row, rank in enumerate(ranks.tolist() if result.actions else ())
        for pair in pairwise(result.actions[rank])
        if pair[0].paired
    ]
    seen = np.array([pair for pair in both if None not in pair], np.int64).reshape(-1, 2)
    return Spans(cells.row[seen[:, 0]], cells.start[seen].min(axis=1, initial=cells.end.max()),
                 cells.end[seen].max(axis=1, initial=0))  # fmt: skip


def _draw_rows(
    ax: Axes, cells: Cells, flows: dict[str, Spans], scale: tuple[int, float], labels: list[str],
    pairs: Spans,
) -> None:  # fmt: skip
    """Draw the compute lane of every row, and a thin lane below it for each kind of flow."""
    thin = min(0.13, 0.28 / max(len(flows), 1))
    lane = Lane(0.06, 0.85 - thin * len(flows))
    palette.row_axis(ax, labels, lane.top + lane.height / 2)
    for row in range(len(labels)):
        where = (lane.top + row, lane.height)
        ax.broken_barh([ax.get_xlim()], where, color=COLOURS["idle"], linewidth=0, gid="idle")
    _draw_cells(ax, cells, scale, lane)
    frame = {"facecolor": "none", "edgecolor": INK, "linewidth": 1.0}
    palette.boxes(ax, pairs, scale, lane, "pair", **frame)
    for i, (name, spans) in enumerate(flows.items()):
        below = Lane(lane.top + lane.height + 0.03 + thin * i, thin)
        palette.boxes(ax, spans, scale, below, name, color=COLOURS[name], linewidth=0.3)


def _draw_cells(ax: Axes, cells: Cells, scale: tuple[int, float], lane: Lane) -> None:
    """Draw cells, and their microbatch where the number fits into the cell.

    A forward and a backward that run at once have half of the lane each, the forward above.
    """
    x, y = palette.points_per_unit(ax)
    width = (cells.end - cells.start) / scale[1] * x
    texts = ["opt" if m == NONE else str(m) for m in cells.microbatch.tolist()]
    half = lane._replace(height=lane.height / 2)
    lanes = (lane, half, half._replace(top=lane.top + half.height))
    at, chunks = at_once(cells), _chunk(cells)
    size = palette.cell_text_size(texts, width, 0.75 * lanes[int(at.any())].height * y)
    fits = palette.cell_widths(texts, size) <= width
    middle = ((cells.start + cells.end) / 2 - scale[0]) / scale[1]
    columns = (cells.action.tolist(), chunks.tolist(), at.tolist())
    for code, chunk, place in sorted(set(zip(*columns, strict=True))):
        mine, lane = (cells.action == code) & (chunks == chunk) & (at == place), lanes[place]
        colour = palette.paler(COLOURS[_work_name(code)], 0.5 * (1 - 0.5**chunk))
        spans = Spans(cells.row[mine], cells.start[mine], cells.end[mine])
        line = np.clip(0.06 * width[mine], 0.0, 0.7)  # thin cells keep their colour
        look = {"facecolor": colour, "edgecolor": "white", "linewidth": line}
        palette.boxes(ax, spans, scale, lane, _work_name(code), **look)
        for i in np.flatnonzero(mine & fits).tolist():
            ax.text(middle[i], cells.row[i] + lane.top + lane.height / 2, texts[i], size=size,
                    color=palette.ink_on(colour), ha="center", va="center_baseline")  # fmt: skip


def at_once(cells: Cells) -> Int64:
    """Return 0 for a cell that has its row to itself, else 1 for a forward, 2 for what runs beside.

    Kernels of a pair of actions take turns, so that their cells lie over each other.
    """
    order = np.lexsort((cells.start, cells.row))
    row, start, end = cells.row[order], cells.start[order], cells.end[order]
    meets = np.flatnonzero((row[1:] == row[:-1]) & (start[1:] < end[:-1]))
    both = order[np.concatenate([meets, meets + 1])]
    place = np.zeros(len(order), np.int64)
    place[both] = np.where(cells.action[both] == ACTION_CODE["F"], 1, 2)
    return place


def _room_for_numbers(cells: Cells, window: int) -> float:
    """Return the inches that give nearly all cells room for their number, within reason."""
    numbered = cells.microbatch != NONE
    texts = [str(m) for m in cells.microbatch[numbered].tolist()]
    share = (cells.end - cells.start)[numbered] / max(window, 1)
    need = np.quantile(palette.cell_widths(texts, 6.0) / share, 0.96) if len(texts) else 0.0
    return float(np.clip(1.02 * need / 72, 7.0, 12.0))


def _chunk(cells: Cells) -> Int64:
    """Return which chunk of its rank each cell belongs to: 0 for its first stage."""
    present = np.zeros((int(cells.row.max(initial=0)) + 1, int(cells.stage.max(initial=0)) + 1))
    present[cells.row, cells.stage] = 1
    return (np.cumsum(present, axis=1).astype(np.int64) - 1)[cells.row, cells.stage]


def _work_name(code: int) -> str:
    return WORK_NAMES.get(ACTIONS[code], "optimizer")


def breakdown(result: Result, path: str | Path | None = None) -> Figure:
    """Draw where the time of each rank goes, as shares of the last step.

    Raises:
        DescriptionError: when the figure cannot be saved.
    """
    palette.check_path(path)
    share, labels, chosen = breakdown_bars(result)
    names = [name for name, row in zip(CATEGORIES, share, strict=True) if row.max(initial=0) > 0]
    with palette.style():
        figure, (ax,) = palette.sheet(
            7.0,
            [len(labels) * (0.36 if len(labels) <= MAX_EVERY_RANK else 0.26)],
            titles=palette.titles_of(result, chosen),
            handles=[palette.swatch(name) for name in names],
            labels=labels,
        )
        palette.row_axis(ax, labels, 0.5)
        ax.set(xlim=(0, 100), xlabel="share of the step (%)")
        left, points = np.zeros(len(labels)), palette.points_per_unit(ax)[0]
        for name in names:
            piece = 100 * share[CATEGORIES.index(name)]
            ax.barh(np.arange(len(labels)) + 0.5, piece, 0.78, left, gid=name, **palette.area(name))
            for i, value in enumerate(piece.tolist()):
                text = f"{value:.1f}" if value < 9.95 else f"{value:.0f}"
                if text_width(text, 8) + 8 <= value * points:
                    ax.text(left[i] + value / 2, i + 0.5, text, **palette.plate(name))
            left += piece
    return palette.save(figure, path)


def breakdown_bars(result: Result) -> tuple[Float64, list[str], str]:
    """Return shares of the step by category and bar, each bar's label, and which bars they are."""
    count = result.tiled.num_ranks
    share = result.breakdown.shares
    if count <= palette.MAX_ROWS or result.scenario is None:
        ranks = palette.sample(np.arange(count))
        labels = [palette.rank_label(result, rank) for rank in ranks.tolist()]
        some = f"{len(ranks)} of {count} ranks, evenly spaced" if len(ranks) < count else ""
        return share[:, ranks], labels, some
    mesh = Mesh.of(result.scenario.plan)
    places = palette.sample(np.arange(mesh.pp))
    members = mesh.ranks_of_tiles(np.arange(mesh.tiles)[:, None], places[None, :])
    mean = share[:, members].mean(axis=1)
    kind = palette.place_named(result)
    some = f"a {kind}" if len(places) == mesh.pp else f"evenly spaced {kind}s"
    which = f"each bar: mean of the {len(members)} ranks of {some}; {count} ranks in all"
    return mean, [palette.stages_named(result.stages[place]) for place in places.tolist()], which


def _row_of_rank(result: Result, ranks: Int64) -> Int64:
    rows = np.full(result.tiled.num_ranks, NONE, np.int64)
    rows[ranks] = np.arange(len(ranks))
    return rows


FIGURES: dict[str, Callable[..., Figure]] = {
    "pipeline": pipeline,
    "density": density_plot.density_figure,
    "breakdown": breakdown,
    "roofline": roofline_plot.roofline_figure,
    "memory": memory_plot.memory,
    "loader": loader_plot.loader,
    "links": network_plots.links,
    "topology": network_plots.topology,
}
"""Figures by name; each takes a result and, where the figure is to be saved, a path."""
