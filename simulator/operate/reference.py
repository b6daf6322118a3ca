"""The reference of operations: a job, what breaks it and what is repaired as SimPy processes.

It is the definition of what `kernels/operations.py` computes, which must give the same numbers.
What breaks or comes back at a tick does so before anything else ends at it. Steps run one by one,
so this is slow where steps are short.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple

import simpy
from simpy.core import Environment
from simpy.events import URGENT

from simulator.operate.draw import ONSET
from simulator.operate.job import (
    CATEGORIES,
    CHECKPOINT,
    DETECTION,
    FEWER,
    LOST,
    NO_NODE,
    RESCHEDULING,
    RESTART,
    RESTORE,
    SLOW,
    SLOW_NODE,
    TRAINING,
    WAITING,
    Job,
)

Process = Generator[simpy.Event, Any, None]


class Sample(NamedTuple):
    """What became of one sample."""

    ticks: list[int]
    """By category."""
    interruptions: list[int]
    """By component."""
    steps: int
    shares: int
    """Sum over kept steps of the replicas that ran them."""
    checkpoints: int


class _Progress(NamedTuple):
    """Steps that count so far, and the time they took, by category."""

    steps: int = 0
    shares: int = 0
    training: int = 0
    slow: int = 0
    fewer: int = 0

    @property
    def ticks(self) -> int:
        return self.training + self.slow + self.fewer


class _Urgent(simpy.Event):
    """A time at which this is handled before all that ends then."""

    def __init__(self, env: Environment, delay: int) -> None:
        super().__init__(env)
        self._ok, self._value = True, None
        env.schedule(self, URGENT, delay)


class _Operation:
    """One job over days, its cluster and its storage."""

    def __init__(self, job: Job, breaks: list[tuple[int, int]], first: int) -> None:
        self.job = job
        self.nth = first
        """Of the times of steps, that of the next one."""
        self.env = simpy.Environment()
        self.ticks = [0] * len(CATEGORIES)
        self.interruptions = [0] * len(job.names)
        self.checkpoints = 0
        self.doing, self.since = TRAINING, 0
        self.progress = self.durable = _Progress()
        self.write: simpy.Process | None = None
        self.spares, self.missing, self.slow = job.spares, 0, 0
        self.is_unplaced = self.is_waiting = False
        self.back = self.env.event()
        """That a node has come back."""
        self.process = self.env.process(self.work())
        self.env.process(self.breakages(breaks))

    @property
    def now(self) -> int:
        """The tick; all delays are whole numbers."""
        return int(self.env.now)

    def breakages(self, breaks: list[tuple[int, int]]) -> Process:
        """Break what breaks when it does."""
        for tick, what in breaks:
            yield _Urgent(self.env, tick - self.now)
            if what == ONSET:
                self.slow += 1
                continue
            self.slow -= self.job.names[what] == SLOW_NODE
            if self.job.repair[what] != NO_NODE and self.missing < len(self.job.replicas) - 1:
                self.missing += 1
                self.is_unplaced = True
                self.env.process(self.repair(self.job.repair[what]))
            if not self.is_waiting:
                self.interruptions[what] += 1
                self.process.interrupt(what)

    def repair(self, ticks: int) -> Process:
        """Bring a node back as a spare."""
        yield _Urgent(self.env, ticks)
        self.spares += 1
        self.back.succeed()
        self.back = self.env.event()

    def work(self) -> Process:
        """Train, and recover whenever something breaks."""
        broken: int | None = None
        while True:
            try:
                if broken is not None:
                    yield from self.spend(DETECTION, self.env.timeout(self.job.detection[broken]))
                    yield from self.place()
                    broken = None
                yield from self.train()
            except simpy.Interrupt as interrupt:
                broken = interrupt.cause
                self.roll_back()

    def spend(self, category: int, until: simpy.Event) -> Process:
        """Spend the time until something on one thing."""
        self.doing, self.since = category, self.now
        try:
            yield until
        except simpy.Interrupt:
            self.ticks[LOST if category == TRAINING else category] += self.now - self.since
            raise
        if category != TRAINING:  # which counts once it is sure to be kept
            self.ticks[category] += self.now - self.since

    def train(self) -> Process:
        """Run steps, and save after every so many."""
        while True:
            for _ in range(self.job.interval):
                steps = self.job.slow_steps if self.slow else self.job.steps
                took = steps[self.nth]
                yield from self.spend(TRAINING, self.env.timeout(took))
                self.progress = self.after_step(took)
                self.nth = (self.nth + 1) % len(steps)
            yield from self.settle()
            yield from self.spend(CHECKPOINT, self.env.timeout(self.job.blocked))
            self.checkpoints += 1
            if self.job.asynchronous:
                self.write = self.env.process(self.drain(self.progress))
            else:
                self.durable = self.progress
            if self.can_grow():
                yield from self.settle()
                yield from self.place()

    def after_step(self, took: int) -> _Progress:
        """Return the progress after one more step."""
        done, usual = self.progress, self.job.steps[self.nth]
        useful = self.job.useful(self.nth, self.missing)
        return _Progress(
            done.steps + 1,
            done.shares + self.job.replicas[self.missing],
            done.training + useful,
            done.slow + took - usual,
            done.fewer + usual - useful,
        )

    def settle(self) -> Process:
        """Wait until an earlier checkpoint has been written."""
        if self.write is not None and self.write.is_alive:
            yield from self.spend(CHECKPOINT, self.write)

    def drain(self, snapshot: _Progress) -> Process:
        """Write a snapshot beside training; what fails meanwhile leaves it unfinished."""
        try:
            yield self.env.timeout(self.job.drain)
            self.durable = snapshot
        except simpy.Interrupt:
            return

    def roll_back(self) -> None:
        """Go back to what has been written."""
        if self.write is not None and self.write.is_alive:
            self.write.interrupt()
        self.write = None
        self.ticks[LOST] += self.progress.ticks - self.durable.ticks
        self.progress = self.durable

    def can_grow(self) -> bool:
        """Return whether spare nodes would make up replicas that are missing."""
        after = self.missing - min(self.missing, self.spares)
        return self.job.replicas[after] > self.job.replicas[self.missing]

    def place(self) -> Process:
        """Get nodes, wait for them where too few are left, start there and read the state."""
        self.take()
        while not self.job.replicas[self.missing]:
            self.is_waiting = True
            yield from self.spend(WAITING, self.back)
            self.is_waiting = False
            self.take()
        if self.is_unplaced:
            yield from self.spend(RESCHEDULING, self.env.timeout(self.job.rescheduling))
            self.is_unplaced = False
        yield from self.spend(RESTART, self.env.timeout(self.job.restart))
        yield from self.spend(RESTORE, self.env.timeout(self.job.restore))

    def take(self) -> None:
        """Put spare nodes in the place of missing ones."""
        taken = min(self.missing, self.spares)
        self.missing -= taken
        self.spares -= taken
        self.is_unplaced |= taken > 0

    def result(self) -> Sample:
        """Run to the end and return what became of it."""
        self.env.run(until=self.job.duration)
        self.ticks[self.doing] += self.job.duration - self.since
        done = self.progress
        for category, ticks in ((TRAINING, done.training), (SLOW, done.slow), (FEWER, done.fewer)):
            self.ticks[category] += ticks
        return Sample(self.ticks, self.interruptions, done.steps, done.shares, self.checkpoints)


def run_reference(job: Job, breaks: list[tuple[int, int]], first: int = 0) -> Sample:
    """Return what becomes of a job in one sample of what breaks, (tick, what) in order.

    Its first step takes the time of number `first`.
    """
    return _Operation(job, breaks, first).result()
