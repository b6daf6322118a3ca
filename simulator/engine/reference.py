"""The reference engine: GPUs' streams and the transfers between them as SimPy processes.

It is the definition of what a Program means; any other engine must give the same ticks. Time is
whole picoseconds: every delay is an int, so sums are exact.
"""

from __future__ import annotations

import heapq
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import numpy as np
import simpy
from simpy.events import EventPriority

from simulator.budget import require
from simulator.engine.fold import Folding
from simulator.errors import DeadlockError
from simulator.lower.check import explain_deadlock
from simulator.program import NONE, Int64, Program
from simulator.timeline import Timeline

BYTES_PER_OP = 800
"""Of an op's event and its share of a process (measured: 767 bytes an op of 0.7 M)."""

Process = Generator[simpy.Event, Any, None]


class _Meeting:
    """A joint op in the making: it starts when its last member has arrived."""

    def __init__(self, env: simpy.Environment, members: int) -> None:
        self.missing = members
        self.begun = env.event()

    def arrive(self) -> simpy.Event:
        """Tell that one more member is ready; return what happens when all are."""
        self.missing -= 1
        if self.missing == 0:
            self.begun.succeed()
        return self.begun


class _Desks:
    """Servers that ops queue for: first come first served, ties in order of op id.

    Servers are granted when a tick has come to rest: after every op that ends at that tick has
    freed its own, and every op that is ready because of it has asked.
    """

    AFTER_ALL_ELSE = EventPriority(2)
    """SimPy's priority for what happens last at a tick; ordinary events have 1."""

    def __init__(self, env: simpy.Environment, servers: Sequence[int]) -> None:
        self.env = env
        self.free = list(servers)
        self.queues: list[list[tuple[Any, ...]]] = [[] for _ in servers]
        self.due = False

    def request(self, desk: int, op: int) -> simpy.Event:
        """Ask for a server; return what happens when one is granted."""
        granted = self.env.event()
        heapq.heappush(self.queues[desk], (self.env.now, op, granted))
        self._grant_later()
        return granted

    def release(self, desk: int) -> None:
        """Give a server back."""
        self.free[desk] += 1
        self._grant_later()

    def _grant_later(self) -> None:
        if not self.due:
            self.due = True
            rest = self.env.event()
            rest.callbacks.append(self._grant)
            rest._ok, rest._value = True, None
            self.env.schedule(rest, priority=self.AFTER_ALL_ELSE)

    def _grant(self, _rest: simpy.Event) -> None:
        self.due = False
        for desk, queue in enumerate(self.queues):
            while self.free[desk] and queue:
                self.free[desk] -= 1
                heapq.heappop(queue)[2].succeed()


class _Run:
    """One run of a program: its clock, who has ended, who meets and who queues."""

    def __init__(self, program: Program, ticks: Int64) -> None:
        self.program = program
        self.ticks: list[int] = ticks.tolist()
        self.slot = program.slot.tolist() or [NONE] * len(program)
        self.env = simpy.Environment()
        self.ended = [self.env.event() for _ in range(len(program))]
        self.desks = _Desks(self.env, program.servers)
        self.meetings = [
            _Meeting(self.env, size) for size in np.diff(program.joint_members.offset).tolist()
        ]
        self.start = np.full(len(program), NONE, np.int64)
        self.end = np.full(len(program), NONE, np.int64)

    def stream(self, ops: Iterable[int]) -> Process:
        """One in-order stream: each op waits for its inputs, meets its partners, holds, ends."""
        for op in ops:
            inputs = [self.ended[pred] for pred in self.program.predecessors(op).tolist()]
            yield from (event for event in inputs if not event.processed)
            if self.program.joint[op] != NONE:
                yield self.meetings[self.program.joint[op]].arrive()
            if self.slot[op] != NONE:
                yield self.desks.request(self.slot[op], op)
            self.start[op] = self.env.now
            if self.ticks[op]:
                yield self.env.timeout(self.ticks[op])
            self.end[op] = self.env.now
            self.ended[op].succeed()
            if self.slot[op] != NONE:
                self.desks.release(self.slot[op])


def run(program: Program, ticks: Int64, _folding: Folding) -> Timeline:
    """Return when every op started and ended; every rank runs, folded or not.

    Raises:
        DeadlockError: when ops are left that can never start; it says who waits for whom.
    """
    size, what = BYTES_PER_OP * len(program), f"{len(program):,} ops as SimPy processes"
    require(size, what, "use the compiled engine")
    flat = program.flat
    wide = np.broadcast_to(ticks, (len(program.rank), program.num_tiles))
    now = _Run(flat, wide.ravel())
    for ops in _streams(flat):
        now.env.process(now.stream(ops))
    now.env.run()
    if (now.end == NONE).any():
        raise DeadlockError(explain_deadlock(flat, now.end != NONE))
    if program.tiling is None:
        return Timeline(now.start, now.end)
    shape = wide.shape
    return Timeline(now.start.reshape(shape), now.end.reshape(shape), np.arange(shape[1]))


def _streams(program: Program) -> list[list[int]]:
    """Return the ops of every stream in order; an op without stream is alone in its own."""
    lanes: dict[tuple[int, int], list[int]] = {}
    for op, (rank, stream) in enumerate(
        zip(program.rank.tolist(), program.stream.tolist(), strict=True)
    ):
        lanes.setdefault((rank, stream) if stream != NONE else (NONE, op), []).append(op)
    return list(lanes.values())
