"""Device memory that torch's allocator does not give out: the driver's context, NCCL's buffers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from simulator.describe.model import Model
from simulator.describe.placement import kind_of_ranks
from simulator.describe.scenario import Scenario

Float64 = npt.NDArray[np.float64]

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


def nccl_bytes(s: Scenario, kind: int = 0) -> float:
    """Return the bytes of NCCL's buffers on a rank: channels x peers x buffer of each group.

    The channels are those of a kind of node, as `Cluster.kinds` numbers them.
    """
    plan, channels = s.plan, s.cluster.kinds[kind].link.channels
    groups = [plan.tp, plan.shards, plan.holders // plan.shards, plan.cp, plan.ep, plan.etp]
    groups += [plan.edp] * (isinstance(s.model, Model) and s.model.num_experts is not None)
    collective = sum(connections(ranks) for ranks in groups if ranks > 1) * sum(BUFFERS.values())
    messages = min(plan.pp - 1, MESSAGE_PEERS) * BUFFERS["SIMPLE"]
    return float(channels * (collective + messages))


def outside(s: Scenario) -> Float64:
    """Return the bytes in use on each rank's device beside what torch's allocator has reserved."""
    kinds = enumerate(s.cluster.kinds)
    return by_rank(s, [node.device.context + nccl_bytes(s, kind) for kind, node in kinds])


def capacity(s: Scenario) -> Float64:
    """Return the bytes of memory of each rank's device."""
    return by_rank(s, [node.device.memory for node in s.cluster.kinds])


def by_rank(s: Scenario, values: Sequence[float]) -> Float64:
    """Return for each rank the value of its kind of node."""
    if not s.cluster.is_mixed:
        return np.full(s.cluster.world_size, values[0], np.float64)
    return np.array(values, np.float64)[list(kind_of_ranks(s.plan, s.cluster))]
