"""Seconds of a message or a collective: alpha-beta over the links that the cluster describes.

A ring over n ranks runs rounds of size/n bytes; each round costs the latency alpha and its bytes
over the ring's bandwidth (Patarasuk & Yuan, 2009). Where a ring stays within a node it uses the
device's links; where it crosses nodes, every node's share of it leaves through the NICs of the
devices that take part, so its bandwidth is the smaller of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.describe.cluster import Cluster
from simulator.program import Flow, Groups


class GroupShape(NamedTuple):
    """What the time of a collective depends on, besides its size."""

    ranks: int
    nodes: int
    """Nodes that the group's ranks lie on."""
    per_node: int
    """Fewest of its ranks on any of those nodes."""


def group_shapes(
    groups: Groups, cluster: Cluster
) -> tuple[list[GroupShape], npt.NDArray[np.int64]]:
    """Return the distinct shapes of groups, and for each group the index of its own."""
    if not len(groups):
        return [], np.zeros(0, np.int64)
    size = np.diff(groups.offset)
    owner = np.repeat(np.arange(len(groups)), size)
    node = groups.ranks // cluster.ranks_per_node
    # One row for each (group, node) pair that occurs, with the number of ranks it holds.
    pairs, count = np.unique(owner * np.int64(cluster.num_nodes) + node, return_counts=True)
    of_group = pairs // cluster.num_nodes
    nodes = np.bincount(of_group, minlength=len(groups))
    fewest = np.full(len(groups), np.iinfo(np.int64).max)
    np.minimum.at(fewest, of_group, count)
    width = int(size.max()) + 1
    key = (size * width + nodes) * width + fewest
    _, first, index = np.unique(key, return_index=True, return_inverse=True)
    rows = np.stack([size, nodes, fewest], axis=1)[first]
    return [GroupShape(*row) for row in rows.tolist()], index.reshape(-1)


def ring_link(shape: GroupShape, cluster: Cluster) -> tuple[float, float]:
    """Return alpha (seconds a round) and bandwidth (bytes/s) of a ring over a group."""
    link, nic = cluster.node.link, cluster.node.nic
    device = (link.bandwidth if shape.ranks > 2 else link.pair_bandwidth) * link.efficiency
    if shape.nodes == 1:
        return link.latency, device
    outgoing = shape.per_node * nic_share(cluster)
    return nic.latency, outgoing if shape.per_node == 1 else min(device, outgoing)


def nic_share(cluster: Cluster) -> float:
    """Return the bytes/s that one rank may send to other nodes while all ranks of its node do.

    A rank uses one adapter at most; ranks share evenly where there are fewer adapters than ranks.
    """
    nic = cluster.node.nic
    return min(1.0, nic.count / cluster.ranks_per_node) * nic.bandwidth * nic.efficiency


def all_reduce_seconds(size: float, shape: GroupShape, cluster: Cluster) -> float:
    """Return the seconds of a ring all-reduce of `size` bytes: 2(n-1) rounds of size/n bytes."""
    n = shape.ranks
    if n == 1:
        return 0.0
    alpha, bandwidth = ring_link(shape, cluster)
    return 2 * (n - 1) * (alpha + size / n / bandwidth)


def send_recv_seconds(size: float, shape: GroupShape, cluster: Cluster) -> float:
    """Return the seconds of one message between two ranks."""
    link, nic = cluster.node.link, cluster.node.nic
    if shape.nodes == 1:
        return link.latency + size / (link.pair_bandwidth * link.efficiency)
    return nic.latency + size / nic_share(cluster)


MODELS: Mapping[str, Callable[[float, GroupShape, Cluster], float]] = {
    "all_reduce": all_reduce_seconds,
    "send_recv": send_recv_seconds,
}
"""Seconds of a flow by its name."""


def flow_seconds(flow: Flow, shape: GroupShape, cluster: Cluster) -> float:
    """Return the seconds from the last member's arrival to the end of a flow."""
    if flow.seconds is not None:
        return flow.seconds
    return flow.count * MODELS[flow.name](flow.bytes, shape, cluster)
