"""What runs on each rank at every moment, whatever waits for what.

The `breakdown` knows what an op waits for. A measured run does not say that, so that it is told
by what runs: where work of the rank runs, time is that work's, whatever communication runs beside
it; where only communication runs, it is exposed; where nothing runs, it is idle. A profiler counts
a collective from its first member's arrival to its end: waiting for the others is part of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simulator.program import ACTIONS, NONE, Int64, Program
from simulator.report.breakdown import COMMUNICATION, WORK, moves, stream_category, work_category
from simulator.timeline import Timeline

OTHER = "communication"
"""Flows whose stream names no axis of a mesh."""

IDLE = "idle"
"""Nothing runs."""

RUNNING = (*WORK, *COMMUNICATION, OTHER)
"""What can run, first what owns a moment at which several do."""

CATEGORIES = (*RUNNING, IDLE)


@dataclass(frozen=True, eq=False)
class Occupancy:
    """Ticks of every rank in a window, by what runs; rows are `CATEGORIES`."""

    ticks: Int64
    """(categories, ranks); each column sums to the window."""
    communication: Int64
    """Ticks of each rank during which any communication runs."""
    hidden: Int64
    """Of them those during which work runs too."""

    @property
    def overlap(self) -> float:
        """Share of the time of communication, over all ranks, that is beside work; 0 of none."""
        total = int(self.communication.sum())
        return float(self.hidden.sum() / total) if total else 0.0


def occupancy(program: Program, timeline: Timeline, begin: int, end: int) -> Occupancy:
    """Return what runs on every rank between two ticks.

    Args:
        program: what has run.
        timeline: when its ops started and ended.
        begin: first tick, of all ranks.
        end: last tick, likewise.
    """
    start, finish = timeline.columns
    columns, ranks = start.shape[1], len(program.tile_ranks)
    category = _categories(program)
    lane = (program.rank.astype(np.int64)[:, None] * columns + np.arange(columns)).ravel()
    kind = np.repeat(category, columns)
    since, until = (x.ravel().clip(begin, end) for x in (start, finish))
    there = until > since
    owned, moving, hidden = _sweep(
        lane[there], kind[there], since[there], until[there], ranks * columns
    )
    owned[-1] = (end - begin) - owned[:-1].sum(axis=0)
    column = timeline.column_of_tile
    column = np.zeros(program.num_tiles, np.int64) if column is None else column
    ticks = np.zeros((len(CATEGORIES), program.num_ranks), np.int64)
    ticks[:, program.tile_ranks] = owned.reshape(-1, ranks, columns)[:, :, column]
    both = np.zeros((2, program.num_ranks), np.int64)
    both[:, program.tile_ranks] = np.stack([moving, hidden]).reshape(2, ranks, columns)[
        :, :, column
    ]
    return Occupancy(ticks, both[0], both[1])


def _categories(program: Program) -> Int64:
    """Return the category of each row, an index into `RUNNING`."""
    work = np.array([RUNNING.index(work_category(action)) for action in ACTIONS], np.int64)
    named = [stream_category(stream) for stream in program.streams]
    flows = [RUNNING.index(name if name in COMMUNICATION else OTHER) for name in named]
    flows.append(RUNNING.index(OTHER))  # without a stream: NONE is -1, the last one
    of_stream = np.array(flows, np.int64)[program.stream]
    found: Int64 = np.where(moves(program), of_stream, work[program.action])
    return found


def _sweep(
    lane: Int64, kind: Int64, since: Int64, until: Int64, lanes: int
) -> tuple[Int64, Int64, Int64]:
    """Return (categories, lanes) ticks owned, those with communication, those with work too."""
    lane, kind = np.tile(lane, 2), np.tile(kind, 2)
    change = np.repeat([1, -1], len(since))
    time = np.concatenate([since, until])
    order = np.lexsort((time, lane))
    lane, kind, change, time = lane[order], kind[order], change[order], time[order]
    length = np.append(np.diff(time), 0)
    length[np.append(lane[1:] != lane[:-1], True)[: len(lane)]] = 0  # the last of its lane
    owner = np.full(len(lane), NONE, np.int64)
    running = {}
    for code in np.unique(kind)[::-1].tolist():  # the first one has the last word
        running[code] = np.cumsum(np.where(kind == code, change, 0)) > 0
        owner[running[code]] = code
    nothing = np.zeros(len(lane), bool)
    works, flows = nothing.copy(), nothing.copy()
    for code, on in running.items():
        (works if RUNNING[code] in WORK else flows)[on] = True
    owned = np.zeros((len(CATEGORIES), lanes), np.int64)
    some = owner != NONE
    np.add.at(owned, (owner[some], lane[some]), length[some])

    def total(where: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Int64:
        out = np.zeros(lanes, np.int64)
        np.add.at(out, lane[where], length[where])
        return out

    return owned, total(flows), total(flows & works)
