"""A step put together again from what its actions took: the rebuilt clock.

On a host that does other things too, the wall clock of a step says little, and the CPU time of each
action still says much. This puts the actions of all ranks on one clock: a rank goes through its
list, computes for the CPU time that it took, and waits only for messages and for sums of gradients.
It knows nothing of the engines that it is compared with, and shares no code with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from simulator.schedules import Action
from simulator.validate.torch.job import Job, Part
from simulator.validate.torch.recording import Links


class Rebuilt(NamedTuple):
    """When each part of a step began and ended, in seconds by rank; waits end what waits."""

    spans: tuple[tuple[tuple[float, float], ...], ...]

    @property
    def seconds(self) -> float:
        """The step."""
        return max(spans[-1][1] for spans in self.spans)


def rebuilt(
    job: Job, busy: Sequence[Sequence[float]], links: Links, buckets: dict[int, tuple[float, ...]]
) -> Rebuilt:
    """Return a step whose parts took so many seconds each, by rank and position.

    Args:
        job: what the ranks did.
        busy: seconds that each part computed.
        links: measured times of messages and sums.
        buckets: bytes of the buckets of each stage.
    """
    ranks = _Ranks(job, links, buckets)
    while any(ranks.goes(rank, busy[rank]) for rank in range(job.world_size)):
        pass
    assert all(len(d) == len(job.parts(r)) for r, d in enumerate(ranks.done))  # they ran so
    return Rebuilt(tuple(map(tuple, ranks.done)))


class _Ranks:
    """Where each rank is, and what has been handed over."""

    def __init__(self, job: Job, links: Links, buckets: dict[int, tuple[float, ...]]) -> None:
        self.job, self.links, self.buckets = job, links, buckets
        self.clock = [0.0] * job.world_size
        self.done: list[list[tuple[float, float]]] = [[] for _ in self.clock]
        self.message = links.message(job.boundary_bytes)[0]
        self.arrives: dict[tuple[int, Action], float] = {}
        self.ready: dict[tuple[int, int], dict[int, float]] = {}
        self.summed: dict[tuple[int, int], float] = {}
        self.lane_free = [0.0] * job.world_size
        self.met: dict[tuple[tuple[int, ...], int], dict[int, float]] = {}

    def goes(self, rank: int, busy: Sequence[float]) -> bool:
        """Let a rank go on until it waits for what is not there; return whether it moved."""
        parts, done = self.job.parts(rank), self.done[rank]
        before = len(done)
        while len(done) < len(parts):
            position = len(done)
            action, part = parts[position]
            begin = self.clock[rank]
            when = self._there(rank, position, action, part)
            if when is None:
                break
            own = 0.0 if part.kind in ("sum", "wait") else busy[position]
            self.clock[rank] = max(begin, when) + own
            self._hand_over(rank, action, part, begin)
            done.append((begin, self.clock[rank]))
        return len(done) > before

    def _there(self, rank: int, position: int, action: Action, part: Part) -> float | None:
        """Return when what a part needs from others is there; None while nobody knows."""
        if part.kind == "receive":
            return self.arrives.get((rank, action))
        if part.kind == "wait":
            return self.summed.get((rank, action.stage))
        if part.kind != "sum":
            return 0.0
        peers = self.job.peers(rank)
        come = self.met.setdefault((peers, position), {})
        come[rank] = self.clock[rank]
        if len(come) < len(peers):
            return None
        return max(come.values()) + self.links.peer_sum(part.bytes)

    def _hand_over(self, rank: int, action: Action, part: Part, begin: float) -> None:
        """Send a message, or come to a sum of gradients."""
        now = self.clock[rank]
        if part.kind == "send":
            to = self.job.peer(rank, action), self.job.other_side(action)
            self.arrives[to] = max(begin + self.message, now)
        elif part.kind == "launch" and len(self.job.sharers(rank, action.stage)) > 1:
            held = action.stage, self.job.place(rank)[2]
            come = self.ready.setdefault(held, {})
            come[rank] = now
            if len(come) == len(self.job.holders[held]):
                self._sum_up(*held)

    def _sum_up(self, stage: int, index: int) -> None:
        """Take the sums of a stage whose holders have all come, bucket after bucket."""
        holders = self.job.holders[stage, index]
        now = max(self.ready[stage, index].values())
        for size in self.buckets[stage]:
            now = max(now, *(self.lane_free[r] for r in holders)) + self.links.sum(size)
        for r in holders:
            self.lane_free[r] = self.summed[r, stage] = now
