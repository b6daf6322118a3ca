"""Device memory that torch's allocator does not give out: the driver's context, NCCL's buffers."""

from __future__ import annotations

from simulator.describe.scenario import Scenario

BUFFERS = {
    "SIMPLE": 4 * 2**20,
    "LL": 8 * 8 * 512 * 16,
    "LL128": 8 * 120 * 640 * 8,
}
"""Bytes of the receive buffer of a connection by protocol. NCCL 2.21, src/init.cc and
src/include/device.h: NCCL_BUFFSIZE is 4 MiB; LL holds 8 steps x 8 lines of 16 bytes of 512 threads,
LL128 8 steps x 120 words of 8 bytes of 640 threads."""

MESSAGE_PEERS = 2
"""Neighbours from which a pipeline rank receives: outputs and gradients."""


def connections(ranks: int) -> int:
    """Return the peers from which a rank of a group receives on a channel.

    One in the ring; in the double binary tree, which nodes form and whose ranks are a chain in each
    node, one more each way.
    """
    return min(ranks - 1, 1) + min(ranks - 1, 2)


def nccl_bytes(s: Scenario) -> float:
    """Return the bytes of NCCL's buffers on each rank: channels x peers x buffer of each group."""
    plan, channels = s.plan, s.cluster.node.link.channels
    groups = [plan.tp, plan.shards, plan.replicas // plan.shards, plan.cp, plan.ep, plan.etp]
    collective = sum(connections(ranks) for ranks in groups if ranks > 1) * sum(BUFFERS.values())
    messages = min(plan.pp - 1, MESSAGE_PEERS) * BUFFERS["SIMPLE"]
    return float(channels * (collective + messages))


def outside(s: Scenario) -> float:
    """Return the bytes in use on each device beside what torch's allocator has reserved."""
    return s.cluster.node.device.context + nccl_bytes(s)
