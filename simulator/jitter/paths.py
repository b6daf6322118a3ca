"""Who delays a step: critical paths and slack of every sample, added up.

A critical path is followed back from the op that ends the step: each op on it began when the one
before it ended, so their times add up to the step. What an op takes longer there than in the step
that nothing disturbs is the *delay* of its rank and kind. A flow counts as its last member's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from simulator.kernels.critical import find_slack, walk
from simulator.program import ACTIONS, NONE, Int64, Program
from simulator.report.breakdown import CATEGORIES, moves, stream_category, work_category
from simulator.report.result import Result

CELLS = 50_000_000
"""Ops between two moments in which an interrupt is heard."""


@dataclass(frozen=True, eq=False)
class Delays:
    """What critical paths show, in ticks; sums are over all samples."""

    window: Int64
    """(samples, 2): first and last tick of the last step."""
    on_path: Int64
    """(places, tiles): ticks of each rank's ops on critical paths; they sum to the steps."""
    path_kind: Int64
    """The same by `CATEGORIES`."""
    delay: Int64
    """(places, tiles): what of it is longer than undisturbed; negative where it is shorter."""
    delay_kind: Int64
    most: Int64
    """(samples, 4): rank of a tile, its tile, place and kind that delay each sample most; NONE
    where none does."""
    op: Int64
    """(samples, 2): row and tile of the op that is longer than undisturbed by most, or NONE."""
    last: Int64
    """(samples, 2): row and tile of the op that ends each sample."""
    slack: Int64
    """(places, tiles): least slack of a rank's work."""
    critical: Int64
    """(places, tiles): samples in which it is none."""

    @classmethod
    def of(cls, parts: Sequence[Delays]) -> Delays:
        """Return what all samples show, from what parts of them do, in order."""
        join = {
            f.name: np.concatenate if f.name in BY_SAMPLE else np.add.reduce for f in fields(cls)
        }
        return cls(**{name: how([getattr(p, name) for p in parts]) for name, how in join.items()})


BY_SAMPLE = ("window", "most", "op", "last")
"""What `Delays` has a row of for each sample; all else is summed."""


class Paths:
    """Adds up critical paths, some samples at a time."""

    def __init__(self, result: Result, samples: int) -> None:
        program = result.tiled
        self.program, self.result = program, result
        self.kind = kinds_of_rows(program)
        shape = program.tile_ranks.shape
        self.on_path, self.delay = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self.slack, self.critical = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self.path_kind, self.delay_kind = (np.zeros(len(CATEGORIES), np.int64) for _ in range(2))
        self.window = np.zeros((samples, 2), np.int64)
        self.most, self.op = (np.full((samples, n), NONE, np.int64) for n in (4, 2))
        self.last = np.full((samples, 2), NONE, np.int64)
        self.done_samples = 0
        start, end = result.times.columns
        column = result.times.column_of_tile
        self.column = np.zeros(1, np.int64) if column is None else column
        self.base = end - start
        last_step = program.step == program.step.max(initial=0)
        self.candidates = program.last_of_steps[last_step[program.last_of_steps]]
        work = ~program.is_flow & ~program.is_beside & last_step
        self.place = np.where(work, program.rank, NONE).astype(np.int64)

    def add(self, start: Int64, end: Int64, samples: int) -> None:
        """Add samples side by side, (rows, samples x tiles); `start` is overwritten."""
        begin, finish = step_windows(self.program, end, samples)
        tiles = self.program.num_tiles
        for k in range(samples):
            self.window[self.done_samples + k] = begin[k], finish[k]
            self._add_path(start, end, k * tiles, self.done_samples + k)
        self._add_slack(start, end, begin, finish)
        self.done_samples += samples

    def _add_path(self, start: Int64, end: Int64, base: int, sample: int) -> None:
        p, tiles = self.program, self.program.num_tiles
        ends = end[self.candidates, base : base + tiles]
        row, tile = np.divmod(int(np.argmax(ends)), tiles)
        row = self.candidates[row]
        path = np.empty((len(p.rank), 2), np.int64)
        begin = int(self.window[sample, 0])
        members = p.joint_members
        count = walk(
            len(p.rank) * tiles, row, tile, base, begin, p.pred_offset, p.preds, p.stream_previous,
            p.joint, members.offset, members.ranks, p.partition, p.classes, start, end, path,
        )  # fmt: skip
        rows, on = path[:count, 0], path[:count, 1]
        first, last = start[rows, base + on], end[rows, base + on]
        ticks = last - np.maximum(first, begin)
        usual = self.base[rows, self.column[on] if self.base.shape[1] > 1 else 0]
        longer = np.minimum(last - first - usual, ticks)  # of what began before, what is left of it
        places, kinds = p.rank[rows], self.kind[rows]
        np.add.at(self.on_path, (places, on), ticks)
        np.add.at(self.path_kind, kinds, ticks)
        np.add.at(self.delay_kind, kinds, longer)
        by_rank = np.zeros_like(self.delay)
        np.add.at(by_rank, (places, on), longer)
        self.delay += by_rank
        self.last[sample] = row, tile
        if longer.max() > 0:
            worst = int(np.argmax(longer))
            self.op[sample] = rows[worst], on[worst]
        rank = np.unravel_index(int(np.argmax(by_rank)), by_rank.shape)
        by_place = by_rank.sum(axis=1)
        by_kind = np.bincount(kinds, longer, len(CATEGORIES))
        greatest = (
            (rank, by_rank[rank]),
            (by_place.argmax(), by_place.max()),
            (by_kind.argmax(), by_kind.max()),
        )
        codes = np.hstack([np.where(most > 0, code, NONE) for code, most in greatest])
        self.most[sample] = codes

    def _add_slack(self, start: Int64, end: Int64, begin: Int64, finish: Int64) -> None:
        p, tiles, samples = self.program, self.program.num_tiles, len(finish)
        offset, rows = p.units
        joint = p.joint[rows[offset[:-1]]]
        partition = np.append(p.partition, NONE)[joint].astype(np.int64)
        shift = np.repeat(np.arange(samples, dtype=np.int32) * tiles, tiles)
        classes = np.tile(p.classes, samples) + shift
        room = np.repeat(finish - begin, tiles)
        slack = np.tile(room, (len(p.tile_ranks), 1))
        limit = np.repeat(finish, tiles)
        stride = max(1, CELLS // end.shape[1])
        for last in range(len(offset) - 1, 0, -stride):
            find_slack(
                end.size, max(0, last - stride), last, offset, rows, partition, *p.nexts, classes,
                limit, p.is_beside, self.place, start, end, slack,
            )  # fmt: skip
        by_sample = slack.reshape(len(slack), samples, tiles)
        self.slack += by_sample.sum(axis=1)
        self.critical += (by_sample == 0).sum(axis=1)

    def done(self) -> Delays:
        """Return what all samples show."""
        return Delays(
            self.window, self.on_path, self.path_kind, self.delay, self.delay_kind, self.most,
            self.op, self.last, self.slack, self.critical,
        )  # fmt: skip


def kinds_of_rows(program: Program) -> Int64:
    """Return the index into `CATEGORIES` of each row: of its flow, or of its work."""
    flows = [stream_category(stream) for stream in program.streams]
    flow = np.array([CATEGORIES.index(c) if c in CATEGORIES else 0 for c in flows], np.int64)
    work = np.array([CATEGORIES.index(work_category(a)) for a in ACTIONS], np.int64)
    kinds: Int64 = np.where(
        moves(program), np.append(flow, 0)[program.stream], work[program.action]
    )
    return kinds


def step_windows(program: Program, end: Int64, samples: int) -> tuple[Int64, Int64]:
    """Return the first and last tick of the last step of each sample."""
    rows = program.last_of_steps
    step = program.step[rows]
    last = int(program.step.max(initial=0))
    finish = [
        end[rows[step == k]].max(axis=0, initial=0).reshape(samples, -1).max(axis=1)
        for k in range(max(last - 1, 0), last + 1)
    ]
    return np.zeros_like(finish[-1]) if len(finish) == 1 else finish[0], finish[-1]
