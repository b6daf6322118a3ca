"""The event engine: compiled, for programs in which ops queue, exact for every other too."""

from __future__ import annotations

import numpy as np

from simulator.engine import compiled
from simulator.engine.fold import Folding
from simulator.errors import DeadlockError
from simulator.lower.check import explain_deadlock
from simulator.program import NONE, Int32, Int64, Program
from simulator.timeline import Timeline

BUDGET = 5_000_000
"""Ops between two moments in which an interrupt is heard (about a second)."""


def run(program: Program, ticks: Int64, folding: Folding) -> Timeline:
    """Return when every op started and ended; see `simulator.engine.run`."""
    classes = compiled.classes_of_columns(program, folding)
    start, end = times(program, compiled.ticks_of_columns(ticks, folding), classes)
    return compiled.timeline_of(program, folding, start, end)


def times(program: Program, ticks: Int64, classes: Int32) -> tuple[Int64, Int64]:
    """Return start and end (rows, columns) by events.

    Args:
        program: what to run.
        ticks: (rows, columns or 1).
        classes: (partitions, columns): which columns meet in the joint ops of a partition.

    Raises:
        DeadlockError: when ops are left that can never start.
    """
    from simulator.kernels.events import prepare, run_events  # loads numba

    columns, rows = classes.shape[1], len(program.rank)
    start = np.full((rows, columns), NONE, np.int64)
    end = np.full((rows, columns), NONE, np.int64)
    if rows == 0:
        return start, end
    members, (next_offset, nexts) = program.joint_members, program.nexts
    sizes = np.stack([np.bincount(row, minlength=columns) for row in classes]).astype(np.int64)
    class_offset = np.concatenate(
        [np.zeros((len(sizes), 1), np.int64), np.cumsum(sizes, axis=1)], axis=1
    )
    waiting, missing = prepare(
        program.pred_offset, program.stream_previous, members.offset, sizes, program.partition,
        columns,
    )  # fmt: skip
    slot = program.slot if len(program.slot) else np.full(rows, NONE, np.int32)
    free, queue_offset = _desks(program, slot, columns)
    running = _most_running(program) * columns
    state = np.zeros(3, np.int64)
    arguments = (
        state, waiting, missing, next_offset, nexts, program.joint, members.offset, members.ranks,
        program.partition, classes, class_offset, np.argsort(classes, axis=1, kind="stable"),
        slot, free, queue_offset, np.zeros(len(free), np.int64),
        np.empty(queue_offset[-1], np.int64), np.empty(queue_offset[-1], np.int64),
        np.empty(running, np.int64), np.empty(running, np.int64),
        np.empty(rows * columns, np.int64), ticks, start, end,
    )  # fmt: skip
    done, ended = 0, BUDGET
    while ended >= BUDGET:
        ended = run_events(BUDGET, *arguments)
        done += ended
    if done < start.size:
        stuck = (end == NONE).any(axis=0)
        ended = end[:, int(np.argmax(stuck))] != NONE
        raise DeadlockError(explain_deadlock(program.flat, np.repeat(ended, program.num_tiles)))
    return start, end


def _desks(program: Program, slot: Int32, columns: int) -> tuple[Int64, Int64]:
    """Return free servers and the place of the queue of each desk on each column."""
    free = np.repeat(np.array(program.servers, np.int64), columns)
    count = np.bincount(slot[slot != NONE], minlength=len(program.servers))
    offset = np.concatenate([[0], np.cumsum(np.repeat(count, columns))]).astype(np.int64)
    return free, offset


def _most_running(program: Program) -> int:
    """Return how many ops of a tile can run at once: one a stream, and all those without."""
    lane = program.rank.astype(np.int64) * (len(program.streams) + 1) + program.stream
    lanes = np.unique(lane[program.stream != NONE])
    return len(lanes) + int((program.stream == NONE).sum())
