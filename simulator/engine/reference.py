"""The reference engine: GPUs' streams and the transfers between them as SimPy processes.

It is the definition of what a Program means; any other engine must give the same ticks. Time is
whole picoseconds: every delay is an int, so sums are exact.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any

import numpy as np
import simpy

from simulator.errors import DeadlockError
from simulator.lower.check import explain_deadlock
from simulator.program import NONE, Int64, Program
from simulator.timeline import Timeline

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


class _Run:
    """One run of a program: its clock, who has ended, and who meets."""

    def __init__(self, program: Program, ticks: Int64) -> None:
        self.program = program
        self.ticks: list[int] = ticks.tolist()
        self.env = simpy.Environment()
        self.ended = [self.env.event() for _ in range(len(program))]
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
            self.start[op] = self.env.now
            if self.ticks[op]:
                yield self.env.timeout(self.ticks[op])
            self.end[op] = self.env.now
            self.ended[op].succeed()


def run(program: Program, ticks: Int64) -> Timeline:
    """Return when every op started and ended.

    Args:
        program: what to run.
        ticks: how long each op holds once it has started.

    Raises:
        DeadlockError: when ops are left that can never start; it says who waits for whom.
    """
    now = _Run(program, ticks)
    for ops in _streams(program):
        now.env.process(now.stream(ops))
    now.env.run()
    if (now.end == NONE).any():
        raise DeadlockError(explain_deadlock(program, now.end != NONE))
    return Timeline(now.start, now.end)


def _streams(program: Program) -> list[list[int]]:
    """Return the ops of every stream in order; an op without stream is alone in its own."""
    lanes: dict[tuple[int, int], list[int]] = {}
    for op, (rank, stream) in enumerate(
        zip(program.rank.tolist(), program.stream.tolist(), strict=True)
    ):
        lanes.setdefault((rank, stream) if stream != NONE else (NONE, op), []).append(op)
    return list(lanes.values())
