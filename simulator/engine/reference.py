"""The reference engine: GPUs' streams and the transfers between them as SimPy processes.

It is the definition of what a Program means; any other engine must give the same ticks. Time is
whole picoseconds: every delay is an int, so sums are exact.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any

import numpy as np
import simpy

from simulator.budget import require
from simulator.engine.contention import Desks, Network
from simulator.engine.fold import Folding
from simulator.errors import DeadlockError
from simulator.kernels.pauses import resumed
from simulator.lower.check import explain_deadlock
from simulator.pauses import Pauses
from simulator.program import NONE, Int32, Int64, Program
from simulator.timeline import Timeline
from simulator.traffic import Traffic

BYTES_PER_OP = 800
"""Of an op's event and its share of a process (measured: 767 bytes an op of 0.7 M)."""

Process = Generator[simpy.Event, Any, None]


class _Meeting:
    """A joint op in the making: it starts when its last member has arrived."""

    def __init__(self, env: simpy.Environment, members: int) -> None:
        self.missing = members
        self.begun = env.event()
        self.moved = env.event()
        """That its bytes have moved, where it shares links."""

    def arrive(self) -> simpy.Event:
        """Tell that one more member is ready; return what happens when all are."""
        self.missing -= 1
        if self.missing == 0:
            self.begun.succeed()
        return self.begun


class _Run:
    """One run of a program: its clock, who has ended, who meets, who queues, what flows."""

    def __init__(
        self,
        program: Program,
        ticks: Int64,
        traffic: Traffic,
        demand: Int32,
        pauses: tuple[Int64, int, int] | None,
    ) -> None:
        self.program = program
        self.pauses = pauses
        self.ticks: list[int] = ticks.tolist()
        self.slot = program.slot.tolist() or [NONE] * len(program)
        self.env = simpy.Environment()
        self.ended = [self.env.event() for _ in range(len(program))]
        self.desks = Desks(self.env, program.servers)
        self.network = Network(self.env, traffic, demand)
        self.meetings = [
            _Meeting(self.env, size) for size in np.diff(program.joint_members.offset).tolist()
        ]
        self.start = np.full(len(program), NONE, np.int64)
        self.end = np.full(len(program), NONE, np.int64)

    def is_fluid(self, op: int) -> bool:
        """Return whether an op is a member of a flow that shares links."""
        joint = self.program.joint[op]
        return bool(joint != NONE and self.network.demand[joint] != NONE)

    def held(self, op: int) -> int:
        """Return how long an op that starts now holds its stream, pauses included."""
        if self.pauses is None or self.pauses[0][op] == NONE:
            return self.ticks[op]
        phase, period, duration = self.pauses
        now = int(self.env.now)
        return resumed(now, self.ticks[op], period, duration, int(phase[op])) - now

    def flow(self, joint: int) -> Process:
        """A flow that shares links: its members meet, it waits its latency, its bytes move."""
        meeting, members = self.meetings[joint], self.program.joint_members[joint].tolist()
        yield meeting.begun
        if latency := max(self.ticks[op] for op in members):
            yield self.env.timeout(latency)
        yield self.network.transfer(joint)
        meeting.moved.succeed()

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
            if self.is_fluid(op):
                yield self.meetings[self.program.joint[op]].moved
            elif self.ticks[op]:
                yield self.env.timeout(self.held(op))
            self.end[op] = self.env.now
            self.ended[op].succeed()
            if self.slot[op] != NONE:
                self.desks.release(self.slot[op])


def run(
    program: Program,
    ticks: Int64,
    _folding: Folding,
    traffic: Traffic | None = None,
    pauses: Pauses | None = None,
) -> Timeline:
    """Return when every op started and ended; every rank runs, folded or not.

    Raises:
        DeadlockError: when ops are left that can never start; it says who waits for whom.
    """
    size, what = BYTES_PER_OP * len(program), f"{len(program):,} ops as SimPy processes"
    require(size, what, "use the compiled engine")
    flat = program.flat
    wide = np.broadcast_to(ticks, (len(program.rank), program.num_tiles))
    flows = traffic or Traffic.none()
    demand = _demands(program, flows)
    now = _Run(flat, wide.ravel(), flows, demand, _pauses(program, pauses))
    for ops in _streams(flat):
        now.env.process(now.stream(ops))
    for joint in np.flatnonzero(demand != NONE).tolist():
        now.env.process(now.flow(joint))
    now.env.run()
    if (now.end == NONE).any():
        raise DeadlockError(explain_deadlock(flat, now.end != NONE))
    if program.tiling is None:
        return Timeline(now.start, now.end)
    shape = wide.shape
    return Timeline(now.start.reshape(shape), now.end.reshape(shape), np.arange(shape[1]))


def _pauses(program: Program, pauses: Pauses | None) -> tuple[Int64, int, int] | None:
    """Return the phase of each op of the flat program, or NONE, with period and duration."""
    if pauses is None:
        return None
    rows = pauses.of_rows(program)[:, None]
    phase = np.where(rows == NONE, NONE, pauses.phase[program.rank])
    return phase.ravel(), pauses.period, pauses.duration


def _demands(program: Program, flows: Traffic) -> Int32:
    """Return the demand of each joint op of the flat program, or NONE."""
    if not len(flows.demand):
        return np.full(len(program.flat.joint_group), NONE, np.int32)
    width = program.classes.max(axis=1)[program.partition] + 1
    present = np.arange(flows.demand.shape[1]) < width[:, None]
    by_joint: Int32 = flows.demand[present]
    return by_joint


def _streams(program: Program) -> list[list[int]]:
    """Return the ops of every stream in order; an op without stream is alone in its own."""
    lanes: dict[tuple[int, int], list[int]] = {}
    for op, (rank, stream) in enumerate(
        zip(program.rank.tolist(), program.stream.tolist(), strict=True)
    ):
        lanes.setdefault((rank, stream) if stream != NONE else (NONE, op), []).append(op)
    return list(lanes.values())
