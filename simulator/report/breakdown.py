"""Where each rank's time goes: work, exposed communication, bubble; the pieces sum to the step.

A rank is idle between two ops of its compute stream. What the later op waits for decides what that
time is: while a flow that it waits for is moving bytes, the time is exposed communication of that
flow's kind; the rest, where nothing moves on its behalf, is bubble. Copies to and from the host,
updates there, logging, checkpoints, and all that a loader does for a batch count as flows. Bubble
before a rank's first work is fill, after its last forward or backward drain, and in between stall.
All ints, exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from simulator.kernels.pieces import pieces
from simulator.program import ACTION_CODE, ACTIONS, NONE, Int64, Program
from simulator.timeline import Timeline

Ticks: TypeAlias = Int64 | int

WORK = ("forward", "backward", "optimizer")
COMMUNICATION = ("tp", "pp", "dp", "cp", "ep", "tied", "offload", "data", "save", "log")
OF_HOSTS = ("offload", "data", "save", "log")
"""Of them what hosts and storage do, for which there are works too."""
BUBBLE = ("fill", "stall", "drain")
CATEGORIES = (*WORK, *COMMUNICATION, *BUBBLE)

_WORK_OF_ACTION = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}


def work_category(action: str) -> str:
    """Return the category of work of an action kind; what is no pass is optimizer."""
    return _WORK_OF_ACTION.get(action, "optimizer")


@dataclass(frozen=True, slots=True, eq=False)
class Breakdown:
    """Ticks of every rank in a window of time, by category; rows are `CATEGORIES`."""

    ticks: Int64
    """(categories, ranks); each column sums to the rank's `window`."""
    window: Int64
    """Length of the window of each rank, in ticks."""
    busy: Int64
    """Work of each row of the program within the windows, over all tiles."""

    def of(self, *categories: str) -> Int64:
        """Return the ticks of some categories together, by rank."""
        rows = [CATEGORIES.index(c) for c in categories]
        total: Int64 = self.ticks[rows].sum(axis=0)
        return total

    @property
    def shares(self) -> npt.NDArray[np.float64]:
        """(categories, ranks): share of each rank's window."""
        shares: npt.NDArray[np.float64] = self.ticks / np.maximum(self.window, 1)
        return shares

    @property
    def bubble(self) -> Int64:
        """Idle ticks of each rank in which nothing moves on its behalf."""
        return self.of(*BUBBLE)

    @property
    def bubble_fraction(self) -> npt.NDArray[np.float64]:
        """Bubble over the whole window, by rank: (p-1)/(m+p-1) for plain GPipe and 1F1B."""
        fraction: npt.NDArray[np.float64] = self.bubble / np.maximum(self.window, 1)
        return fraction

    @property
    def bubble_ratio(self) -> npt.NDArray[np.float64]:
        """Bubble over the time of work, by rank: Megatron's (p-1)/m."""
        ratio: npt.NDArray[np.float64] = self.bubble / np.maximum(self.of(*WORK), 1)
        return ratio


def stream_category(stream: str) -> str:
    """Return the category that waiting for a stream's flows counts as, from its first word."""
    word = stream.split(" ")[0]
    return _CATEGORY_OF_WORD.get(word, word)


_CATEGORY_OF_WORD = {
    "send": "pp", "recv": "pp", "pipeline": "pp", "unshard": "dp", "reduce": "dp", "shards": "dp",
    "etp": "ep", "edp": "dp", "host": "offload", "fetch": "offload", "storage": "data",
    "worker": "data", "pin": "data", "copy": "data", "snapshot": "save", "write": "save",
    "restore": "save",
}  # fmt: skip
"""Categories of streams that have another name."""


def moves(program: Program) -> npt.NDArray[np.bool_]:
    """Return whether each row moves bytes: a flow, or work of a rank's host."""
    hosts = [stream_category(stream) in OF_HOSTS for stream in program.streams]
    found: npt.NDArray[np.bool_] = program.is_flow | np.array([*hosts, False])[program.stream]
    return found


def breakdown(
    program: Program, timeline: Timeline, begin: Ticks, end: Ticks, turn: Ticks = 0
) -> Breakdown:
    """Return where the time of every rank goes between two ticks.

    Args:
        program: what has run.
        timeline: when its ops started and ended.
        begin: first tick, one for all or (ranks of a tile, columns of the timeline).
        end: last tick, likewise.
        turn: when the step before ended on all ranks, one for all or by column of the timeline; 0
            for the first step.
    """
    start, finish = timeline.columns
    shape = (len(program.tile_ranks), start.shape[1])
    begin, end = (np.broadcast_to(np.asarray(x, np.int64), shape) for x in (begin, end))
    turns = np.broadcast_to(np.asarray(turn, np.int64), shape[1:])
    column = timeline.column_of_tile
    if column is None:
        column = np.zeros(1, np.int64)
    ops = np.flatnonzero(program.stream == program.streams.index("compute"))
    ops = ops[np.argsort(program.rank[ops], kind="stable")]
    offset = np.searchsorted(program.rank[ops], np.arange(shape[0] + 1))
    flows = [CATEGORIES.index(c) if (c := stream_category(s)) in COMMUNICATION else NONE
             for s in program.streams]  # fmt: skip
    flow_category = np.where(moves(program), np.array(flows, np.int64)[program.stream], NONE)
    out = np.zeros((len(CATEGORIES), *shape), np.int64)
    busy = np.zeros(len(program.rank), np.int64)
    pieces(
        len(ops) * shape[1], ops, offset, _work_categories()[program.action], flow_category,
        program.action == ACTION_CODE["OPT"], tuple(CATEGORIES.index(name) for name in BUBBLE),
        program.pred_offset, program.preds, program.stream_previous, start, finish, begin, turns,
        end, np.bincount(column, minlength=shape[1]), out, busy,
    )  # fmt: skip
    ticks = np.zeros((len(CATEGORIES), program.num_ranks), np.int64)
    ticks[:, program.tile_ranks] = out[:, :, column]
    window = np.zeros(program.num_ranks, np.int64)
    window[program.tile_ranks] = (end - begin)[:, column]
    return Breakdown(ticks, window, busy)


def _work_categories() -> Int64:
    """Return the category of work by action code."""
    return np.array([CATEGORIES.index(work_category(name)) for name in ACTIONS], np.int64)


def binding(program: Program, timeline: Timeline, ops: Int64, *, streams: bool) -> Int64:
    """Return the predecessor of each op that ended last, or NONE; `streams` adds its lane's."""
    best = program.stream_previous[ops].astype(np.int64) if streams else np.full(len(ops), NONE)
    begin = program.pred_offset[ops]
    degree = program.pred_offset[ops + 1] - begin
    for k in range(int(degree.max(initial=0))):
        has = degree > k
        pred = np.full(len(ops), NONE, np.int64)
        pred[has] = program.preds[begin[has] + k]
        later = has & ((best == NONE) | (timeline.end[pred] > timeline.end[best]))
        best = np.where(later, pred, best)
    return best
