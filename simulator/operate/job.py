"""What both engines run: a job in whole nanoseconds, from a scenario and its step time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simulator.describe.operations import Operations
from simulator.describe.optimizer import OPTIMIZERS
from simulator.describe.scenario import Scenario
from simulator.errors import DescriptionError
from simulator.lower.optimizers import saved_state_bytes
from simulator.lower.trainable import parameters, stage_tensors, stages
from simulator.operate.interval import INTERVALS
from simulator.program import Int64

NANOSECONDS = 10**9
"""Ticks of a second here: int64 has room for 292 years of them."""

FOREVER = 4 * 10**18
"""Longer times are cut: no run is as long, and two of them still fit into int64."""

SLOW_NODE = "slow node"
"""Name of the component that has turned slow and is taken out when it is found."""

NO_NODE = -1
"""Repair time of what takes no node."""

TRAINING, CHECKPOINT, LOST, DETECTION, WAITING, RESCHEDULING, RESTART, RESTORE, SLOW, FEWER = range(
    10
)

CATEGORIES = (
    "training", "checkpoint", "lost work", "detection", "waiting for repair", "rescheduling",
    "restart", "restore", "slow node", "fewer replicas",
)  # fmt: skip
"""Where the time goes; it adds up to the wall clock. `training`: steps that were kept, at their
full pace. `checkpoint`: training held back by one. `lost work`: steps that a failure undid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training job as engines see it; times are ticks of a nanosecond."""

    duration: int
    steps: tuple[int, ...]
    """What steps take, one after the other, round and round: samples of it, or one time."""
    slow_steps: tuple[int, ...]
    """The same with a slow node."""
    interval: int
    """Steps between checkpoints."""
    asynchronous: bool
    blocked: int
    """Training held back by a checkpoint: the write, or the snapshot."""
    drain: int
    """Write of a snapshot beside training; 0 where a checkpoint is synchronous."""
    restore: int
    restart: int
    rescheduling: int
    spares: int
    replicas: tuple[int, ...]
    """Replicas that can run, by the number of nodes that are missing; 0: the job waits."""
    names: tuple[str, ...]
    """Of components."""
    detection: tuple[int, ...]
    """By component."""
    repair: tuple[int, ...]
    """By component; `NO_NODE` where it takes no node."""

    def useful(self, nth: int, missing: int) -> int:
        """Return the ticks of a step that count as training when so many nodes are missing."""
        return self.steps[nth] * self.replicas[missing] // self.replicas[0]

    @property
    def columns(self) -> tuple[Int64, Int64, Int64, Int64, Int64]:
        """What kernels take: `steps` and `slow_steps` added up, what of them is `useful` by missing
        nodes added up, `replicas`, `detection` and `repair`.
        """
        steps = np.array([self.steps, self.slow_steps], np.int64)
        replicas, detection, repair = (
            np.array(x, np.int64) for x in (self.replicas, self.detection, self.repair)
        )
        counts, of = np.unique(replicas, return_inverse=True)
        useful = (counts[:, None] * steps[0] // replicas[0])[of.reshape(-1)]
        pace, paced = (
            np.concatenate([np.zeros((len(x), 1), np.int64), np.cumsum(x, axis=1)], axis=1)
            for x in (steps, useful)
        )
        return pace, paced, replicas, detection, repair


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """Seconds and bytes of one checkpoint."""

    state_bytes: float
    write: float
    blocked: float
    restore: float


def mtbf(ops: Operations, devices: int, nodes: int) -> float:
    """Return the mean seconds between two interruptions of the whole job, or infinity."""
    rate = sum(c.number(devices, nodes) / c.mtbf for c in ops.components)
    if ops.slow_node is not None:
        rate += nodes / ops.slow_node.mtbf
    return 1 / rate if rate else float("inf")


def state_bytes(s: Scenario) -> float:
    """Return the bytes of a checkpoint: what a parameter is updated from, each one once.

    The fp32 master copy, or the weight where there is none, and the optimizer's states; of what is
    not trained the weight alone. 8.03e9 parameters under Adam are 8.03e9 x 12 B = 96.4 GB. Copies
    in lower precision are made anew, gradients are not saved. Matrices of Adafactor and Muon keep
    less, as the ranks hold them.

    Raises:
        DescriptionError: when that is so of experts on ranks of their own.
    """
    held, precision, rule = parameters(s), s.precision, OPTIMIZERS[s.run.optimizer]
    trained = (precision.master or precision.weight) + rule.state_bytes
    size = float(held.trained * trained + (held.total - held.trained) * precision.weight)
    if not (rule.factored or rule.orthogonal):
        return size
    if s.plan.ep > 1:
        raise DescriptionError(
            f"operations.checkpoint.state is missing: what {s.run.optimizer} keeps of experts on "
            "plan.ep ranks is not counted; state the bytes of a checkpoint"
        )
    less = sum(saved_state_bytes(s.run.optimizer, stage_tensors(s, one)) for one in stages(s))
    return size - s.plan.tp * less


def saving(s: Scenario, ops: Operations) -> Saving:
    """Return what a checkpoint of a scenario takes.

    Raises:
        DescriptionError: when nothing says how fast a snapshot is.
    """
    c = ops.checkpoint
    size = state_bytes(s) if c.state is None else c.state
    write = c.write_time
    if write is None:
        assert c.write_bandwidth is not None  # checked by its description
        write = size / c.write_bandwidth
    restore = c.restore_time
    if restore is None:
        restore = size / c.read_bandwidth if c.read_bandwidth else write
    blocked = write if not c.asynchronous else _snapshot(s, ops, size)
    return Saving(state_bytes=size, write=write, blocked=blocked, restore=restore)


def _snapshot(s: Scenario, ops: Operations, size: float) -> float:
    """Return the seconds in which each device copies its even share of the state to its host."""
    c, hosts = ops.checkpoint, [node.host for node in s.cluster.kinds]
    if c.snapshot_time is not None:
        return c.snapshot_time
    bandwidth = c.snapshot_bandwidth
    known = [h.bandwidth * h.efficiency / h.devices_per_link for h in hosts if h is not None]
    if bandwidth is None and len(known) == len(hosts):
        bandwidth = min(known)  # all wait for the slowest
    if bandwidth is None:
        raise DescriptionError(
            "operations.checkpoint.asynchronous: the node does not say what its host offers; state "
            'snapshot_bandwidth = "25 GB/s" (from each device) or snapshot_time'
        )
    return size / s.cluster.world_size / bandwidth


def interval_seconds(s: Scenario, ops: Operations) -> float:
    """Return the stated interval between checkpoints, or that of the rule.

    Raises:
        DescriptionError: when a rule has nothing to go by.
    """
    wanted = ops.checkpoint.interval
    if not isinstance(wanted, str):
        return wanted
    between = mtbf(ops, s.cluster.world_size, s.cluster.num_nodes)
    save = saving(s, ops)
    cost = save.blocked
    hidden = ops.checkpoint.asynchronous and save.write  # one follows the other then
    if between == float("inf") or not (cost or hidden):
        what = "nothing fails" if between == float("inf") else "a checkpoint takes no time"
        raise DescriptionError(
            f"operations.checkpoint.interval {wanted!r} weighs checkpoints against failures, and "
            f'{what}; state an interval, as "30 min"'
        )
    return INTERVALS[wanted](cost, between)


def job(
    s: Scenario, ops: Operations, step_times: Sequence[float], interval: float | None = None
) -> Job:
    """Return the job of a scenario whose steps take some seconds.

    Args:
        s: what trains.
        ops: what happens to it.
        step_times: seconds of steps with nothing wrong, one after the other, round and round.
        interval: seconds between checkpoints; what the operations say when absent, where a rule
            for asynchronous ones is not followed below the time of a write.
    """
    save, cluster = saving(s, ops), s.cluster
    every = interval_seconds(s, ops) if interval is None else interval
    kinds = list(ops.components)
    names = [c.name for c in kinds]
    detection = [ops.detection_time if c.detection_time is None else c.detection_time
                 for c in kinds]  # fmt: skip
    repair = [
        NO_NODE if not c.takes_node
        else _ticks(ops.repair_time if c.repair_time is None else c.repair_time)
        for c in kinds
    ]  # fmt: skip
    slowdown = 1.0
    if ops.slow_node is not None:
        names, detection = [*names, SLOW_NODE], [*detection, 0.0]
        repair, slowdown = [*repair, _ticks(ops.repair_time)], ops.slow_node.slowdown
    if len(set(names)) < len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise DescriptionError(f"operations.components: two of them have the name {twice!r}")
    a_replica = cluster.world_size // s.plan.dp
    missing = range(cluster.num_nodes + 1)
    replicas = [(cluster.num_nodes - gone) * cluster.ranks_per_node // a_replica
                for gone in missing]  # fmt: skip
    if ops.elastic and s.plan.dp == 1:
        raise DescriptionError(
            "operations.elastic: plan.dp 1 has no replica to spare; leave it out, and the job "
            "waits for a repair"
        )
    if not ops.elastic:
        replicas = [count if not gone else 0 for gone, count in enumerate(replicas)]
    step_time = sum(step_times) / len(step_times)
    least = math.ceil(save.write / step_time) if interval is None and _waits_for_writes(ops) else 1
    return Job(
        duration=_ticks(ops.days * 86400),
        steps=tuple(max(1, _ticks(one)) for one in step_times),
        slow_steps=tuple(max(1, _ticks(one * slowdown)) for one in step_times),
        interval=min(max(1, round(every / step_time), least), FOREVER),
        asynchronous=ops.checkpoint.asynchronous,
        blocked=_ticks(save.blocked),
        drain=_ticks(save.write) if ops.checkpoint.asynchronous else 0,
        restore=_ticks(save.restore),
        restart=_ticks(ops.restart_time + s.run.warm_up),
        rescheduling=_ticks(ops.rescheduling_time),
        spares=ops.spare_nodes,
        replicas=tuple(replicas),
        names=tuple(names),
        detection=tuple(map(_ticks, detection)),
        repair=tuple(repair),
    )


def _waits_for_writes(ops: Operations) -> bool:
    """Return whether a rule that knows of snapshots only must not ask for more than is written."""
    return ops.checkpoint.asynchronous and isinstance(ops.checkpoint.interval, str)


def _ticks(seconds: float) -> int:
    return min(round(seconds * NANOSECONDS), FOREVER)
