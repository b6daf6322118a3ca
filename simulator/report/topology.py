"""A cluster as text: its devices, its links, and what of them is impaired."""

from __future__ import annotations

from collections import Counter

from simulator.describe.cluster import Cluster, Node
from simulator.units import format_bytes, format_rate, format_seconds

MAX_IMPAIRED = 8
"""Degraded and failed links that are listed; the rest is counted."""


def topology_text(cluster: Cluster) -> str:
    """Return the hardware of a cluster, a kind of node after the other."""
    used, count = cluster.ranks_per_node, Counter(cluster.kind_of_node)
    kinds = [_node(node, count[kind], used) for kind, node in enumerate(cluster.kinds)]
    sources = [s for node in cluster.kinds for s in (*node.device.sources, *node.sources)]
    return "\n".join([
        *(line for lines in kinds for line in lines),
        *_network(cluster),
        "sources",
        *dict.fromkeys(f"  {s.what}: {s.title}, {s.url}" for s in sources),
    ])  # fmt: skip


def _node(node: Node, count: int, used: int) -> list[str]:
    """Return lines about one kind of node, of which so many devices are used in each."""
    device = node.device
    peaks = ", ".join(f"{k} {format_rate(v, 'FLOP')}" for k, v in device.peak.items())
    return [
        f"{count} x {node.name}, {used} of {node.num_devices} "
        f"devices used in each: {count * used} ranks",
        f"device  {device.name}: {format_bytes(device.memory)} at "
        f"{format_rate(device.memory_bandwidth, 'B')}; {peaks}",
        f"link    {node.link.name}: {format_rate(node.link.bandwidth, 'B')} a device and "
        f"direction, {format_rate(node.link.pair_bandwidth, 'B')} a pair, "
        f"{node.link.efficiency:.0%} reached, {format_seconds(node.link.latency)}",
        f"nic     {node.nic.count} x {node.nic.name}: {format_rate(node.nic.bandwidth, 'B')} each "
        f"and direction, {node.nic.efficiency:.0%} reached, {format_seconds(node.nic.latency)}",
        f"layout  {_layout(node)}",
    ]


def _layout(node: Node) -> str:
    shape = f" {' x '.join(map(str, node.shape))}" if node.shape else ""
    edges = f", {len(node.edges)} edges" if node.edges else ""
    return f"{node.layout}{shape}{edges} inside a node"


def _network(cluster: Cluster) -> list[str]:
    """Return what joins the nodes in a line, and what of it is impaired in another."""
    network = cluster.network
    words: list[str] = [network.layout]
    if network.shape:
        words[0] += f" {' x '.join(map(str, network.shape))}"
    if network.layout not in ("crossbar", "torus", "graph"):
        words.append(f"switches of {network.radix} ports")
        words.append(f"oversubscribed {network.oversubscription:g} to 1")
    if network.spines is not None:
        words.append(f"{network.spines} spines")
    if network.edges:
        words.append(f"{len(network.edges)} edges")
    words.append(f"{network.routing} routing")
    impaired = [f"{name} at {share:.0%}" for name, share in network.degraded.items()]
    impaired += [f"{name} failed" for name in network.failed]
    rest = len(impaired) - MAX_IMPAIRED
    impaired[MAX_IMPAIRED:] = [f"and {rest} more"] if rest > 0 else []
    lines = [f"network {', '.join(words)}"]
    return [*lines, f"        impaired: {', '.join(impaired)}"] if impaired else lines
