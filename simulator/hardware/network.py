"""Seconds of a message or a collective over the links and adapters that the cluster describes.

A message is alpha-beta. A collective is what NCCL would run: `nccl` has its model, and this module
tells it where the group lies. Where a group crosses nodes, every node's share leaves through the
adapters of the devices that take part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from simulator.describe.cluster import Cluster
from simulator.hardware.collectives import push_seconds
from simulator.hardware.nccl import COLLECTIVES, Choice, choices
from simulator.hardware.nccl_constants import HARDWARE_LATENCY_US
from simulator.hardware.nccl_models import US, Group
from simulator.hardware.storage import rate as stored_rate
from simulator.program import ONE_SIDED, STORED, Flow, Groups, Int64, Program


class GroupShape(NamedTuple):
    """What the time of a collective depends on, besides its size."""

    ranks: int
    nodes: int
    """Nodes that the group's ranks lie on."""
    per_node: int
    """Fewest of its ranks on any of those nodes."""
    kinds: tuple[int, ...] = (0,)
    """Kinds of those nodes, as `Cluster.kinds` numbers them."""


def group_shapes(
    groups: Groups, cluster: Cluster, placement: Int64 | None = None
) -> tuple[list[GroupShape], Int64]:
    """Return the distinct shapes of groups, and for each group the index of its own.

    `placement` is the device of each rank; rank r is on device r when absent.
    """
    if not len(groups):
        return [], np.zeros(0, np.int64)
    size = np.diff(groups.offset)
    owner = np.repeat(np.arange(len(groups)), size)
    device = groups.ranks if placement is None else placement[groups.ranks]
    node = device // cluster.ranks_per_node
    # One row for each (group, node) pair that occurs, with the number of ranks it holds.
    pairs, count = np.unique(owner * np.int64(cluster.num_nodes) + node, return_counts=True)
    of_group = pairs // cluster.num_nodes
    nodes = np.bincount(of_group, minlength=len(groups))
    fewest = np.full(len(groups), np.iinfo(np.int64).max)
    np.minimum.at(fewest, of_group, count)
    width = int(size.max()) + 1
    key = (size * width + nodes) * width + fewest
    kinds = _kind_bits(of_group, pairs % cluster.num_nodes, len(groups), cluster)
    key = key * int(kinds.max() + 1) + kinds
    _, first, index = np.unique(key, return_index=True, return_inverse=True)
    rows = np.stack([size, nodes, fewest, kinds], axis=1)[first]
    shapes = [
        GroupShape(ranks, on, each, tuple(k for k in range(bits.bit_length()) if bits >> k & 1))
        for ranks, on, each, bits in rows.tolist()
    ]
    return shapes, index.reshape(-1)


def _kind_bits(group: Int64, node: Int64, groups: int, cluster: Cluster) -> Int64:
    """Return a bit for each kind of node that each group lies on, from pairs of group and node."""
    if not cluster.is_mixed:
        return np.ones(groups, np.int64)
    bits = np.zeros(groups, np.int64)
    np.bitwise_or.at(bits, group, np.int64(1) << np.array(cluster.kind_of_node, np.int64)[node])
    return bits


def shapes_by_tile(program: Program, shape_of_group: Int64) -> tuple[Int64, Int64]:
    """Return where the joint ops of a program lie on each tile.

    Joint ops with the same first group have the same groups on all tiles: they are of one kind.

    Args:
        program: whose joint ops are asked for.
        shape_of_group: number of the shape of each of its groups.

    Returns:
        (kinds, tiles) numbers of shapes, one column if all tiles agree, and each joint op's kind.
    """
    if not len(program.joint_group):
        return np.zeros((0, 1), np.int64), np.zeros(0, np.int64)
    groups, first, kind = np.unique(program.joint_group, return_index=True, return_inverse=True)
    by_kind = shape_of_group[groups[:, None] + program.classes[program.partition[first]]]
    if (by_kind == by_kind[:, :1]).all():
        by_kind = by_kind[:, :1]
    return by_kind, kind.reshape(-1)


def nic_share(cluster: Cluster) -> float:
    """Return the bytes/s that one rank may send to other nodes while all ranks of its node do.

    A rank uses one adapter at most; ranks share evenly where there are fewer adapters than ranks.
    """
    nic = cluster.node.nic
    return min(1.0, nic.count / cluster.ranks_per_node) * nic.bandwidth * nic.efficiency


def group_of(shape: GroupShape, cluster: Cluster) -> Group:
    """Return what NCCL's model needs to know of a group of this shape."""
    link, nic = cluster.node.link, cluster.node.nic
    rate = link.bandwidth if shape.ranks > 2 else link.pair_bandwidth
    known = HARDWARE_LATENCY_US
    return Group(
        ranks=shape.ranks,
        nodes=shape.nodes,
        per_node=shape.per_node,
        intra=rate * link.efficiency,
        inter=shape.per_node * nic_share(cluster),
        adapters=shape.per_node * min(1.0, nic.count / cluster.ranks_per_node),
        architecture=cluster.node.device.architecture,
        link=link.kind,
        channels=link.channels,
        in_switch_reduction=link.in_switch_reduction,
        link_scale=link.latency / (known[link.kind]["RING"][-1] * US),
        net_scale=nic.latency / (known["NET"]["RING"][-1] * US),
        net_latency=nic.plugin_latency,
        net_ll128=nic.ll128,
    )


def collective_choice(name: str, size: float, shape: GroupShape, cluster: Cluster) -> Choice:
    """Return how NCCL would run a collective, or how the cluster forces it.

    Among unlike nodes that is how it would run if all were of the kind that takes longest.
    """
    forced = cluster.nccl_algorithm, cluster.nccl_protocol
    groups = (group_of(shape, cluster.only(kind)) for kind in shape.kinds)
    choices_of_kinds = [_chosen(name, size, group, *forced) for group in groups]
    return max(choices_of_kinds, key=lambda choice: choice.seconds)


@lru_cache(maxsize=4096)
def _chosen(
    name: str, size: float, group: Group, algorithm: str | None, protocol: str | None
) -> Choice:
    forced = choices(name, size, group, algorithm=algorithm, protocol=protocol)
    return (forced or choices(name, size, group))[0]


def collective_seconds(name: str, size: float, shape: GroupShape, cluster: Cluster) -> float:
    """Return the seconds of a collective as NCCL would run it, or as the cluster forces it."""
    return collective_choice(name, size, shape, cluster).seconds


def send_recv_seconds(size: float, shape: GroupShape, cluster: Cluster) -> float:
    """Return the seconds of one message between two ranks."""
    link, nic = cluster.node.link, cluster.node.nic
    if shape.nodes == 1:
        return link.latency + size / (link.pair_bandwidth * link.efficiency)
    return nic.latency + size / nic_share(cluster)


def _shift(flow: Flow, shape: GroupShape, cluster: Cluster) -> float:
    """Return the seconds in which every rank sends to the next one: those of the slowest message.

    Where a group lies on several nodes some ranks send to another node, each with its even share of
    the adapters.
    """
    if shape.ranks == 1:
        return 0.0
    near = send_recv_seconds(flow.bytes, shape._replace(nodes=1), cluster)
    far = send_recv_seconds(flow.bytes, shape, cluster)
    seconds = far if shape.nodes == shape.ranks else max(near, far)
    return max(seconds, cluster.node.host_launch)


def _push(flow: Flow, shape: GroupShape, cluster: Cluster) -> float:
    """Return the seconds of a push to parameter servers among the ranks, or of a pull from them."""
    if shape.ranks == 1:
        return 0.0
    link, nic = cluster.node.link, cluster.node.nic
    return push_seconds(
        flow.bytes, shape.ranks, shape.per_node, flow.servers,
        alpha=link.latency if shape.nodes == 1 else nic.latency,
        intra=group_of(shape, cluster).intra,
        inter=nic_share(cluster),
    )  # fmt: skip


def _collective(flow: Flow, shape: GroupShape, cluster: Cluster) -> float:
    """Return the seconds of a collective, which the host issues like any kernel."""
    if shape.ranks == 1:
        return 0.0
    seconds = collective_seconds(flow.name, flow.bytes, shape, cluster)
    return max(seconds, cluster.node.host_launch)


def _stored(flow: Flow, _shape: GroupShape, cluster: Cluster) -> float:
    """Return the seconds of one request of storage, alone."""
    return flow.bytes / stored_rate(flow, cluster)


Model = Callable[[Flow, GroupShape, Cluster], float]

MODELS: Mapping[str, Model] = {
    **dict.fromkeys(COLLECTIVES, _collective),
    "send_recv": lambda f, shape, cluster: send_recv_seconds(f.bytes, shape, cluster),
    "shift": _shift,
    "push_pull": lambda f, shape, cluster: 2 * _push(f, shape, cluster),
    **dict.fromkeys(ONE_SIDED, _push),
    **dict.fromkeys(STORED, _stored),
}
"""Seconds of a flow by its name."""


def flow_seconds(flow: Flow, shape: GroupShape, cluster: Cluster) -> float:
    """Return the seconds from the last member's arrival to the end of a flow.

    Among unlike nodes it takes as long as if all were of the kind that takes longest.
    """
    if flow.seconds is not None:
        return flow.seconds
    model = MODELS[flow.name]
    return flow.count * max(model(flow, shape, cluster.only(kind)) for kind in shape.kinds)


DIRECT: Mapping[str, str] = {
    "send_recv": "SEND",
    "shift": "SHIFT",
    "push_pull": "PARAMETER_SERVER",
    "push": "PUSH",
    "pull": "PULL",
}
"""The one algorithm of flows that NCCL does not choose for."""


class FlowModel(NamedTuple):
    """A flow as a latency and, after it, bytes that move at a rate."""

    algorithm: str
    """How its bytes are laid on links, a key of `patterns.PATTERNS` or `patterns.ORDERED`."""
    latency: float
    """Seconds before its bytes move."""
    bytes_per_s: float
    """Rate of its payload when nothing is in its way."""


def flow_model(flow: Flow, shape: GroupShape, cluster: Cluster) -> FlowModel:
    """Return a flow's time taken apart: that of nothing, and of its bytes.

    A flow of a stated duration, of one rank or of no bytes is all latency. A one-sided flow has no
    rate of its own: its closed form divides links among all who use them, as links themselves do.
    """
    seconds = flow_seconds(flow, shape, cluster)
    if flow.name in STORED and flow.seconds is None:
        return FlowModel("STORAGE", 0.0, stored_rate(flow, cluster))
    if flow.seconds is not None or shape.ranks == 1 or not flow.bytes:
        return FlowModel("NONE", seconds, math.inf)
    if flow.name in DIRECT:
        algorithm = DIRECT[flow.name]
        nothing = MODELS[flow.name](replace(flow, bytes=0.0), shape, cluster)
    else:
        chosen = collective_choice(flow.name, flow.bytes, shape, cluster)
        algorithm = chosen.algorithm
        (empty, *_) = choices(
            flow.name, 0.0, group_of(shape, cluster), algorithm=algorithm, protocol=chosen.protocol
        )
        nothing = min(empty.seconds, chosen.seconds)
        if algorithm == "RING" and flow.name in ("broadcast", "reduce"):
            algorithm = "CHAIN"
    latency = flow.count * nothing
    if flow.name in ONE_SIDED:
        return FlowModel(algorithm, latency, math.inf)
    moving = max(seconds - latency, 1e-12)
    return FlowModel(algorithm, latency, flow.count * flow.bytes / moving)
