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
from simulator.validate.torch.job import Job
from simulator.validate.torch.recording import Links


class Rebuilt(NamedTuple):
    """When each action of a step began and ended, in seconds by rank."""

    spans: tuple[tuple[tuple[float, float], ...], ...]

    @property
    def seconds(self) -> float:
        """The step."""
        return max(spans[-1][1] for spans in self.spans)


def rebuilt(
    job: Job, busy: Sequence[Sequence[float]], links: Links, buckets: dict[int, tuple[float, ...]]
) -> Rebuilt:
    """Return a step whose actions took so many seconds each, by rank and position.

    Args:
        job: what the ranks did.
        busy: seconds that each action computed.
        links: measured times of messages and sums.
        buckets: bytes of the buckets of each stage.
    """
    clock = [0.0] * job.world_size
    done: list[list[tuple[float, float]]] = [[] for _ in clock]
    arrives: dict[tuple[int, Action], float] = {}
    ready: dict[int, dict[int, float]] = {}
    summed: dict[tuple[int, int], float] = {}
    lane_free = [0.0] * job.world_size
    message = links.message(job.boundary_bytes)[0]

    def waits_for(rank: int, action: Action) -> float | None:
        """Return when what an action needs from others is there; None while nobody knows."""
        if action.kind in ("RECV_F", "RECV_B"):
            return arrives.get((rank, action))
        if action.kind == "OPT" and len(job.holders[action.stage]) > 1:
            return summed.get((rank, action.stage))
        return 0.0

    def sum_up(stage: int) -> None:
        """Take the sums of a stage whose holders have all come, bucket after bucket."""
        holders = job.holders[stage]
        now = max(ready[stage].values())
        for size in buckets[stage]:
            now = max(now, *(lane_free[r] for r in holders)) + links.sum(size)
        for r in holders:
            lane_free[r] = summed[r, stage] = now

    moved = True
    while moved:
        moved = False
        for rank in range(job.world_size):
            row = job.list_of(rank)
            while len(done[rank]) < len(row):
                position = len(done[rank])
                action = row[position]
                when = waits_for(rank, action)
                if when is None:
                    break
                begin = clock[rank]
                clock[rank] = max(begin, when) + busy[rank][position]
                if action.kind in ("SEND_F", "SEND_B"):
                    to = job.peer(rank, action), job.other_side(action)
                    arrives[to] = max(begin + message, clock[rank])
                elif action.kind == "REDUCE_GRAD" and len(job.holders[action.stage]) > 1:
                    ready.setdefault(action.stage, {})[rank] = clock[rank]
                    if len(ready[action.stage]) == len(job.holders[action.stage]):
                        sum_up(action.stage)
                done[rank].append((begin, clock[rank]))
                moved = True
    assert all(len(d) == len(job.list_of(r)) for r, d in enumerate(done))  # they ran so
    return Rebuilt(tuple(map(tuple, done)))
