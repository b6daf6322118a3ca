"""What all ranks do at any time: shares of short pieces of a step, by category.

What a rank computes comes first; of the rest, time in which bytes move for it counts as
communication of that kind, and what is left is idle. The shares of a piece sum to 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from simulator.program import ACTIONS, Int64
from simulator.report.breakdown import COMMUNICATION, WORK, moves, stream_category, work_category

if TYPE_CHECKING:
    from simulator.report.result import Result

Float32 = npt.NDArray[np.float32]

BINS = 600
"""Pieces that the time of a step is cut into."""

MOST_ROWS = 450
"""Rows at most; more ranks share one, as a mean."""

ACTIVITIES = (*WORK, *COMMUNICATION, "idle")


@dataclass(frozen=True, eq=False)
class Density:
    """Shares of time by activity, of ranks that are ordered by place in the pipeline, then number.

    A row is a rank, or the mean of neighbours in that order.
    """

    shares: Float32
    """(activities, rows, bins), as `ACTIVITIES`."""
    ranks: Int64
    """Ranks in order."""
    place: Int64
    """Where each of them stands in its pipeline."""
    window: tuple[int, int]
    """First and last tick."""

    @property
    def mean(self) -> Float32:
        """(activities, bins): share of all ranks."""
        mean: Float32 = np.average(self.shares, axis=1, weights=np.diff(self.edges))
        return mean

    @property
    def most(self) -> Int64:
        """(rows, bins): the activity that takes most, an index of `ACTIVITIES`."""
        most: Int64 = self.shares.argmax(axis=0)
        return most

    @property
    def edges(self) -> Int64:
        """Place in `ranks` of the first rank of each row, and their number."""
        rows = self.shares.shape[1]
        return np.linspace(0, len(self.ranks), rows + 1).astype(np.int64)


def density(result: Result) -> Density:
    """Return what all ranks do during the last step."""
    p, (begin, end) = result.tiled, result.window
    start, finish = result.times.columns
    columns = start.shape[1]
    column = result.times.column_of_tile
    column = np.zeros(p.num_tiles, np.int64) if column is None else column
    places, tiles = (axis.ravel() for axis in np.indices(p.tile_ranks.shape))
    order = np.lexsort((p.tile_ranks.ravel(), places))
    lanes = (places * columns + column[tiles])[order]
    rows = min(len(lanes), MOST_ROWS)
    out = Density(
        np.zeros((len(ACTIVITIES), rows, BINS), np.float32),
        p.tile_ranks.ravel()[order].astype(np.int64), places[order], (begin, end),
    )  # fmt: skip
    seen = np.zeros((0, 3), np.int64)
    covered = np.zeros((len(p.tile_ranks) * columns, BINS), np.float32)
    for number, mine in enumerate(_rows_by_activity(result)):
        if not len(mine):
            continue
        spans = _spans(p.rank[mine].astype(np.int64), start[mine], finish[mine], out.window)
        seen = _merged(np.concatenate([seen, spans]))
        now = _occupied(seen, len(covered), out.window)
        added, covered = now - covered, now
        out.shares[number] = _means(added, lanes, out.edges)
    out.shares[-1] = _means(1 - covered, lanes, out.edges)
    return out


def _rows_by_activity(result: Result) -> list[Int64]:
    """Return the rows of the program of each activity but idle."""
    p = result.tiled
    works = np.array([WORK.index(work_category(a)) for a in ACTIONS])[p.action]
    compute = p.stream == p.streams.index("compute")
    kinds = np.array([*map(stream_category, p.streams), ""])[p.stream]
    moving = moves(p) & ~compute
    return [
        *(np.flatnonzero(compute & (works == number)) for number in range(len(WORK))),
        *(np.flatnonzero(moving & (kinds == kind)) for kind in COMMUNICATION),
    ]


def _spans(rank: Int64, start: Int64, end: Int64, window: tuple[int, int]) -> Int64:
    """Return (spans, 3): lane, first and last tick since the window began, of what lies in it."""
    begin, until = window
    lane = rank[:, None] * start.shape[1] + np.arange(start.shape[1])
    start, end = start.clip(begin, until) - begin, end.clip(begin, until) - begin
    inside = end > start
    return np.stack([lane[inside], start[inside], end[inside]], axis=1)


def _merged(spans: Int64) -> Int64:
    """Return spans of which none touch, that cover the same time of each lane."""
    if not len(spans):
        return spans
    lane, start, end = spans[np.lexsort((spans[:, 1], spans[:, 0]))].T
    # Lanes lie one after the other on one axis of time, a tick apart, so that one pass merges all.
    length = int(end.max()) + 2
    start, end = lane * length + start, np.maximum.accumulate(lane * length + end)
    first = np.flatnonzero(np.append(True, start[1:] > end[:-1]))
    last = np.append(first[1:], len(end)) - 1
    return np.stack([lane[first], start[first] % length, end[last] - lane[first] * length], axis=1)


def _occupied(spans: Int64, lanes: int, window: tuple[int, int]) -> Float32:
    """Return (lanes, bins): the share of each piece of time that disjoint spans cover."""
    width = max(window[1] - window[0], 1) / BINS
    lane, *ends = spans.T
    covered = np.zeros((lanes, BINS + 1))
    # The time covered up to a moment grows linearly: differences of that at the edges of bins.
    for moment, sign in zip(ends, (1.0, -1.0), strict=True):
        at = moment / width
        piece = np.minimum(at.astype(np.int64), BINS - 1)
        part = (piece + 1 - at) * sign
        np.add.at(covered, (lane, piece), part)
        np.add.at(covered, (lane, piece + 1), sign - part)
    return np.cumsum(covered, axis=1)[:, :BINS].clip(0.0, 1.0).astype(np.float32)


def _means(of_lanes: Float32, lanes: Int64, edges: Int64) -> Float32:
    """Return the mean over the ranks of each row."""
    sums = np.add.reduceat(of_lanes[lanes], edges[:-1], axis=0)
    means: Float32 = (sums / np.diff(edges)[:, None]).astype(np.float32)
    return means
