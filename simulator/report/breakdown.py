"""Where each rank's time goes: work, exposed communication, bubble; the pieces sum to the step.

A rank is idle between two ops of its compute stream. What the later op waits for decides what that
time is: while a flow that it waits for is moving bytes, the time is exposed communication of that
flow's kind; the rest, where nothing moves on its behalf, is bubble. Bubble before a rank's first
work is fill, after its last forward or backward drain, and in between stall. All ints, exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from simulator.program import ACTION_CODE, ACTIONS, NONE, Int64, Program
from simulator.timeline import Timeline

WORK = ("forward", "backward", "optimizer")
COMMUNICATION = ("tp", "pp", "dp", "tied")
BUBBLE = ("fill", "stall", "drain")
CATEGORIES = (*WORK, *COMMUNICATION, *BUBBLE)

_WORK_OF_ACTION = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}


def work_category(action: str) -> str:
    """Return the category of work of an action kind; what is no pass is optimizer."""
    return _WORK_OF_ACTION.get(action, "optimizer")


@dataclass(frozen=True, slots=True, eq=False)
class Breakdown:
    """Ticks of every rank in a window of time, by category; rows are `CATEGORIES`."""

    begin: int
    end: int
    ticks: Int64
    """(categories, ranks); each column sums to `window`."""

    @property
    def window(self) -> int:
        """Length of the window, in ticks."""
        return self.end - self.begin

    def of(self, *categories: str) -> Int64:
        """Return the ticks of some categories together, by rank."""
        rows = [CATEGORIES.index(c) for c in categories]
        total: Int64 = self.ticks[rows].sum(axis=0)
        return total

    @property
    def bubble(self) -> Int64:
        """Idle ticks of each rank in which nothing moves on its behalf."""
        return self.of(*BUBBLE)

    @property
    def bubble_fraction(self) -> npt.NDArray[np.float64]:
        """Bubble over the whole window, by rank: (p-1)/(m+p-1) for plain GPipe and 1F1B."""
        return self.bubble / max(self.window, 1)

    @property
    def bubble_ratio(self) -> npt.NDArray[np.float64]:
        """Bubble over the time of work, by rank: Megatron's (p-1)/m."""
        return self.bubble / np.maximum(self.of(*WORK), 1)


def stream_category(stream: str) -> str:
    """Return the category that waiting for a stream's flows counts as."""
    return "pp" if stream.startswith(("send", "recv")) else stream


def breakdown(program: Program, timeline: Timeline, begin: int, end: int) -> Breakdown:
    """Return where the time of every rank goes between two ticks."""
    ticks = np.zeros((len(CATEGORIES), program.num_ranks), np.int64)
    ops = np.flatnonzero(program.stream == program.streams.index("compute"))
    ops = ops[np.argsort(program.rank[ops], kind="stable")]
    rank = program.rank[ops].astype(np.int64)
    lo = np.clip(timeline.start[ops], begin, end)
    hi = np.clip(timeline.end[ops], begin, end)

    category = _work_categories()[program.action[ops]]
    np.add.at(ticks, (category, rank), hi - lo)

    first = np.append(True, rank[1:] != rank[:-1])
    gap_begin = np.where(first, begin, np.roll(hi, 1))
    bubble = _expose(program, timeline, ops, gap_begin, lo, ticks)
    phase = _bubble_phases(program, timeline, ops, rank, begin)
    np.add.at(ticks, (phase, rank), bubble)

    last = np.append(first[1:], True)
    tail = np.full(program.num_ranks, end - begin, np.int64)
    tail[rank[last]] = end - hi[last]
    ticks[CATEGORIES.index("drain")] += tail
    return Breakdown(begin, end, ticks)


def _work_categories() -> Int64:
    """Return the category of work by action code."""
    return np.array([CATEGORIES.index(work_category(name)) for name in ACTIONS], np.int64)


def _bubble_phases(
    program: Program, timeline: Timeline, ops: Int64, rank: Int64, begin: int
) -> Int64:
    """Return which kind of bubble lies before each compute op."""
    fill, stall, drain = (CATEGORIES.index(name) for name in BUBBLE)
    phase = np.full(len(ops), stall, np.int64)
    inside = np.flatnonzero(timeline.end[ops] > begin)
    _, first = np.unique(rank[inside], return_index=True)
    phase[inside[first]] = fill
    phase[program.action[ops] == ACTION_CODE["OPT"]] = drain
    return phase


def _expose(
    program: Program, timeline: Timeline, ops: Int64, lo: Int64, hi: Int64, ticks: Int64
) -> Int64:
    """Count exposed communication in the gaps [lo, hi) before ops; return what is left of them.

    A gap is followed backwards: the flow that the op waited for, the flow that this one waited
    for, and so on, for as long as they reach into the gap.
    """
    categories = np.array(
        [CATEGORIES.index(c) if (c := stream_category(s)) in COMMUNICATION else NONE
         for s in program.streams], np.int64,
    )  # fmt: skip
    left = hi - lo
    gaps = np.flatnonzero(left > 0)
    cause = binding(program, timeline, ops[gaps], streams=False)
    until = hi[gaps].copy()
    while True:
        alive = (cause != NONE) & (until > lo[gaps])
        alive[alive] &= program.is_flow[cause[alive]]
        gaps, cause, until = gaps[alive], cause[alive], until[alive]
        if not len(gaps):
            return left
        begun = np.maximum(timeline.start[cause], lo[gaps])
        moved = np.maximum(np.minimum(timeline.end[cause], until) - begun, 0)
        np.add.at(ticks, (categories[program.stream[cause]], program.rank[cause]), moved)
        left[gaps] -= moved
        until = np.minimum(until, timeline.start[cause])
        cause = binding(program, timeline, cause, streams=True)


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
