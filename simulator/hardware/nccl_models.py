"""Seconds of NCCL's algorithms: one function for each, over a group and the rates assumed of it.

All take the same five arguments (collective, bytes, group, protocol, rates), so that they stand in
one table, `nccl.ALGORITHMS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from simulator.hardware import nccl_constants as nccl
from simulator.hardware.collectives import (
    all_to_all_seconds,
    halving_doubling_seconds,
    hierarchical_seconds,
)
from simulator.hardware.nccl_constants import Rates
from simulator.units import UNITS

US = UNITS["seconds"]["us"]
GBS = UNITS["bytes/s"]["GB/s"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Where the ranks of a collective lie, and what joins them."""

    ranks: int
    nodes: int = 1
    per_node: int
    """Ranks on each node; the fewest where nodes differ."""
    intra: float
    """Bytes/s that a rank sends, and at once receives, within its node; achieved, not datasheet."""
    inter: float = math.inf
    """Bytes/s that the group's ranks of one node send to other nodes together; achieved."""
    adapters: float = 1.0
    """Adapters behind `inter`."""
    architecture: str = "ampere"
    """A key of `nccl_constants.ARCHITECTURES`."""
    link: str = "NVLINK"
    """NVLINK or PCI."""
    channels: int = 16
    """Channels that NCCL opens over the links."""
    in_switch_reduction: bool = False
    link_scale: float = 1.0
    """Latency of the node's links over NCCL's figure for them."""
    net_scale: float = 1.0
    """Latency of the network over NCCL's figure for it."""
    net_latency: float = 0.0
    """Seconds that the network plugin reports on top, each crossing."""
    net_ll128: bool = True
    """Whether LL128 may cross the network."""

    @property
    def crossing(self) -> float:
        """Bytes/s of one ring or tree out of a node; infinite within one node."""
        if self.nodes == 1:
            return math.inf
        return self.inter * min(1.0, nccl.CROSSING_ADAPTERS / self.adapters)

    @property
    def inside(self) -> float:
        """Bytes/s within a node; infinite where each node has one rank."""
        return self.intra if self.per_node > 1 else math.inf

    @property
    def scale(self) -> int:
        """Column of the tables by number of nodes: one, two, more."""
        return min(self.nodes, 3) - 1


STEPS: Mapping[str, Callable[[int], int]] = {
    "all_reduce": lambda n: 2 * (n - 1),
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: n - 1,
    "broadcast": lambda n: n,
    "reduce": lambda n: n,
}
"""Steps of a ring."""

PARTS = ("all_gather", "reduce_scatter")


def _hardware(kind: str, algorithm: str, protocol: str) -> float:
    return nccl.HARDWARE_LATENCY_US[kind][algorithm][nccl.PROTOCOLS.index(protocol)] * US


def _base(algorithm: str, protocol: str) -> float:
    return nccl.BASE_LATENCY_US[algorithm][nccl.PROTOCOLS.index(protocol)] * US


def _step_inside(g: Group, algorithm: str, protocol: str) -> float:
    return _hardware(g.link, algorithm, protocol) * g.link_scale


def _step_between(g: Group, algorithm: str, protocol: str) -> float:
    """One crossing: a tree's where each node has one rank; Simple also flushes, a latency more."""
    known = _hardware("NET", "TREE" if g.per_node == 1 else algorithm, protocol) * g.net_scale
    return known + g.net_latency * (2 if protocol == "SIMPLE" else 1)


def ring(collective: str, size: float, g: Group, protocol: str, rates: Rates) -> float:
    """Seconds of a ring; a message of n parts goes round in `STEPS`."""
    steps, n = STEPS[collective](g.ranks), g.ranks
    bus = min(g.inside, g.crossing)
    if protocol == "SIMPLE" and collective in PARTS:
        bus = min(g.inside * rates.parts_share.get(g.architecture, 1.0), g.crossing)
    elif protocol == "LL":
        bus = _net_share(g, rates) * min(bus / 2, nccl.LL_MAX_GBS[g.architecture][g.scale] * GBS)
    elif protocol == "LL128":
        most = nccl.RING_LL128_CHANNEL_GBS[g.architecture][g.scale] * GBS
        bus = _net_share(g, rates) * min(bus * 0.92, g.channels * most)
    crossings = steps * (g.nodes - 1) // max(1, n - 1) if g.nodes > 1 else 0
    inside = _step_inside(g, "RING", protocol)
    if g.nodes > 1:
        inside = max(inside, nccl.NET_OVERHEAD_US * US * (3 if protocol == "SIMPLE" else 1))
    latency = _base("RING", protocol) + (steps - crossings) * inside
    latency += crossings * _step_between(g, "RING", protocol) if crossings else 0.0
    plateau = g.nodes > 1 and protocol == "SIMPLE" and collective == "all_reduce"
    if plateau and size >= 64 * g.channels * n:
        latency *= nccl.PLATEAU[g.architecture]
    return latency + size * steps / n / bus + _own_copy(size, g, rates)


def _own_copy(size: float, g: Group, rates: Rates) -> float:
    rate = rates.local_copy_gbs.get(g.architecture, math.inf) * GBS
    return size / g.ranks / rate


def _net_share(g: Group, rates: Rates) -> float:
    return 1.0 if g.nodes == 1 else rates.net_ll_share


def tree(_collective: str, size: float, g: Group, protocol: str, rates: Rates) -> float:
    """Seconds of an all-reduce over a double binary tree of nodes, a chain in each node.

    Over two nodes every byte crosses once in each direction; over more, an inner node passes on
    what two others send, so its adapters carry twice.
    """
    most = nccl.TREE_CHANNEL_GBS[g.architecture][g.scale] * GBS
    bus = min(g.inside * 0.92, g.crossing * (2 if g.nodes == 2 else 1), g.channels * most)
    if protocol == "LL":
        bus = _net_share(g, rates) * min(bus / 3.8, nccl.LL_MAX_GBS[g.architecture][g.scale] * GBS)
    elif protocol == "LL128":
        most = nccl.TREE_LL128_CHANNEL_GBS[g.architecture][g.scale] * GBS
        share = 7 / 9 if g.nodes == 1 else 120 / 128
        bus = _net_share(g, rates) * min(bus * share, g.channels * most)
    inside = (g.ranks // g.nodes - 1) * _step_inside(g, "TREE", protocol)
    between = _levels(g.nodes) * _step_between(g, "TREE", protocol)
    latency = _base("TREE", protocol) + 2 * (inside + between)
    return latency + size / (bus / 2 * _tree_correction(size, protocol))


def _levels(nodes: int) -> int:
    return nodes.bit_length() - 1


def _tree_correction(size: float, protocol: str) -> float:
    table = nccl.TREE_CORRECTION[protocol]
    place = min(max(math.log2(max(size, 1.0)) - 6, 0.0), len(table) - 1.0)
    low = int(place)
    high = min(low + 1, len(table) - 1)
    return table[low] + (place - low) * (table[high] - table[low])


def _in_switch(g: Group, rates: Rates) -> float:
    """Bytes/s of the message that the switches of a node reduce."""
    head = nccl.NVLS_HEAD_GBS[g.architecture] * GBS
    return rates.nvls_share[g.architecture] * min(head * g.per_node, g.intra)


def _fill(size: float, stages: int, g: Group, rates: Rates) -> float:
    """Bytes that stand in the stages of an NVLS pipeline while it fills."""
    places = g.channels * g.per_node
    chunk = nccl.NVLS_CHUNK
    for rounds, smaller in nccl.NVLS_SMALLER_CHUNKS:
        if size < rounds * places * chunk:
            chunk = smaller
    return stages * min(size, rates.nvls_fill * places * chunk)


def nvls(collective: str, size: float, g: Group, protocol: str, rates: Rates) -> float:
    """Seconds in one node whose switches reduce: every rank sends and gets each byte once."""
    rate = _in_switch(g, rates)
    if collective != "all_reduce":
        rate *= (g.ranks - 1) / g.ranks
    return _step_inside(g, "NVLS", protocol) + (size + _fill(size, 1, g, rates)) / rate


def nvls_tree(_collective: str, size: float, g: Group, protocol: str, rates: Rates) -> float:
    """Seconds of an all-reduce in the switches of each node, then over a tree of nodes."""
    ratio = g.ranks / STEPS["all_reduce"](g.ranks)
    channels = g.channels * nccl.NVLS_TREE_CHANNEL_GBS[g.architecture][g.scale] * GBS
    crossing = g.crossing * (2 if g.nodes == 2 else 1)
    inside = 2 * _in_switch(g, rates) * (g.per_node - 1) / g.per_node
    rate = min(inside, crossing, channels) * ratio
    levels = _levels(g.nodes)
    latency = _step_inside(g, "NVLS_TREE", protocol)
    latency += 2 * levels * _step_between(g, "NVLS_TREE", protocol)
    return latency + (size + _fill(size, 1 + levels, g, rates)) / rate


def pat(_collective: str, size: float, g: Group, protocol: str, rates: Rates) -> float:
    """Seconds of PAT (parallel aggregated trees): logarithmic, for one rank a node."""
    between = _step_between(g, "PAT", protocol)
    latency = _base("PAT", protocol) + _levels(g.nodes) * between / 3.5 + g.ranks * 2.8 * US
    return latency + size / (g.crossing * 0.75)


def pairwise(_collective: str, size: float, g: Group, protocol: str, rates: Rates) -> float:
    """Seconds of an all-to-all: each rank sends n-1 messages, all links and adapters at once."""
    inside = _step_inside(g, "RING", protocol)
    latency = _base("RING", protocol) + (g.per_node - 1) * inside
    if g.nodes > 1:
        latency += (g.ranks - g.per_node) * 3 * nccl.NET_OVERHEAD_US * US
        latency += _step_between(g, "RING", protocol)
    intra = g.inside * rates.pairs_share.get(g.architecture, 1.0)
    return (
        latency
        + _own_copy(size, g, rates)
        + all_to_all_seconds(size, g.ranks, g.per_node, intra=intra, inter=g.inter / g.per_node)
    )


def star(_collective: str, size: float, g: Group, protocol: str, rates: Rates) -> float:
    """Seconds of a gather or scatter: the root's link and its one adapter carry n-1 messages."""
    latency = pairwise("all_to_all", 0.0, g, protocol, rates)
    share = g.inter / max(1.0, g.adapters)
    return latency + all_to_all_seconds(size, g.ranks, g.per_node, intra=g.inside, inter=share)


def hierarchical(_collective: str, size: float, g: Group, protocol: str, rates: Rates) -> float:
    """Seconds of reduce-scatter in nodes, rings of one rank a node, all-gather in nodes."""
    return _base("RING", protocol) + hierarchical_seconds(
        size, g.nodes, g.per_node,
        intra=(_step_inside(g, "RING", protocol), 1 / g.inside),
        inter=(_step_between(g, "RING", protocol), g.per_node / g.inter),
    )  # fmt: skip


def halving_doubling(_collective: str, size: float, g: Group, protocol: str, rates: Rates) -> float:
    """Seconds of recursive halving and doubling; rounds between nodes leave all at once."""
    far = g.nodes > 1
    alpha = (_step_between if far else _step_inside)(g, "RING", protocol)
    beta = max(1 / g.inside, g.per_node / g.inter if far else 0.0)
    return _base("RING", protocol) + halving_doubling_seconds(size, g.ranks, alpha, beta)
