"""The event engine: compiled, for programs in which ops queue, exact for every other too."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from simulator.engine import compiled
from simulator.engine.fold import Folding
from simulator.errors import DeadlockError
from simulator.lower.check import explain_deadlock
from simulator.pauses import Pauses, as_arguments
from simulator.program import NONE, Int32, Int64, Program
from simulator.timeline import Timeline
from simulator.traffic import Traffic

BUDGET = 5_000_000
"""Ops between two moments in which an interrupt is heard (about a second)."""


def run(
    program: Program,
    ticks: Int64,
    folding: Folding,
    traffic: Traffic | None = None,
    pauses: Pauses | None = None,
) -> Timeline:
    """Return when every op started and ended; see `simulator.engine.run`."""
    classes = compiled.classes_of_columns(program, folding)
    wide = compiled.ticks_of_columns(ticks, folding)
    start, end = times(program, wide, classes, traffic, pauses)
    return compiled.timeline_of(program, folding, start, end)


def times(
    program: Program,
    ticks: Int64,
    classes: Int32,
    traffic: Traffic | None = None,
    pauses: Pauses | None = None,
) -> tuple[Int64, Int64]:
    """Return start and end (rows, columns) by events.

    Args:
        program: what to run.
        ticks: (rows, columns or 1).
        classes: (partitions, columns): which columns meet in the joint ops of a partition.
        traffic: what flows put on links; without it all of them take fixed times.
        pauses: when ranks stand still, with phases (ranks of a tile, columns).

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
    flows = traffic or Traffic.none()
    longest = int(np.diff(flows.offset).max(initial=0))
    state = np.array([0, 0, 0, 0, 0, running, longest, 0], np.int64)
    fixed = (
        waiting, missing, next_offset, nexts, program.joint, members.offset, members.ranks,
        program.partition, classes, class_offset, np.argsort(classes, axis=1, kind="stable"),
        slot, free, queue_offset, np.zeros(len(free), np.int64),
        np.empty(queue_offset[-1], np.int64), np.empty(queue_offset[-1], np.int64),
    )  # fmt: skip
    rest = (
        np.empty(rows * columns, np.int64), np.empty(max(_most_ended(program, sizes), 1), np.int64),
        ticks, *as_arguments(pauses, program, columns), start, end,
        *_flow_arguments(flows, columns),
    )  # fmt: skip
    heap = np.empty((2, running if traffic is None else 4 * running + 64), np.int64)
    room = _Nodes(longest)
    done = 0
    while True:
        done += run_events(BUDGET, state, *fixed, heap[0], heap[1], room.pool, room.nodes, *rest)
        if state[7]:
            heap = np.concatenate([heap, np.empty_like(heap)], axis=1)
            room.double()
        elif state[0] == 0:
            break
    if done < start.size:
        stuck = (end == NONE).any(axis=0)
        has_ended = end[:, int(np.argmax(stuck))] != NONE
        raise DeadlockError(explain_deadlock(program.flat, np.repeat(has_ended, program.num_tiles)))
    return start, end


class _Nodes:
    """Room for the nodes of the lists in `simulator.kernels.links`: a pool that can grow."""

    def __init__(self, longest: int) -> None:
        self.nodes = np.empty((0, 5), np.int64)
        self.pool = np.array([NONE, 0], np.int64)
        self._add(max(1024, 4 * longest) if longest else 0)

    def _add(self, count: int) -> None:
        first = len(self.nodes)
        fresh = np.full((count, 5), NONE, np.int64)
        fresh[:, 2] = np.append(np.arange(first + 1, first + count), self.pool[0])[:count]
        self.nodes = np.concatenate([self.nodes, fresh])
        if count:
            self.pool[:] = first, self.pool[1] + count

    def double(self) -> None:
        """Make as much room again."""
        self._add(len(self.nodes))


def _flow_arguments(flows: Traffic, columns: int) -> tuple[npt.NDArray[Any], ...]:
    """Return demands, and the state of every flow and link, as the kernel takes them."""
    wide = np.full((len(flows.demand), columns), NONE, np.int32)  # as the kernel numbers flows
    wide[:, : flows.demand.shape[1]] = flows.demand[:, :columns]
    demand = wide.ravel()
    count, links = len(demand), len(flows.capacity)
    return (
        demand, flows.offset, flows.links, flows.coefficient, flows.weight, flows.limit, flows.solo,
        flows.size, flows.capacity, np.zeros(links), np.zeros(links), np.zeros(links, np.int64),
        np.zeros(count), np.zeros(count, np.int64), np.zeros(count), np.zeros(count, np.int64),
        np.zeros(count, np.int64), np.zeros(count, np.bool_), np.full(count, NONE, np.int64),
        np.full(links, NONE, np.int64), np.zeros(count, np.bool_), np.zeros(count, np.int64),
        np.zeros(count, np.bool_), np.zeros(count, np.int64),
    )  # fmt: skip


def _most_ended(program: Program, sizes: Int64) -> int:
    """Return the members of the largest joint op."""
    rows = np.diff(program.joint_members.offset)
    return int((rows * sizes.max(axis=1)[program.partition]).max(initial=1))


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
