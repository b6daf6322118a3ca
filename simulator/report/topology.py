"""A cluster as text: devices, links, and which rank lies where."""

from __future__ import annotations

from simulator.describe.cluster import Cluster
from simulator.describe.scenario import Scenario
from simulator.lower.mesh import Mesh
from simulator.report.text import table
from simulator.units import format_bytes, format_rate, format_seconds

MAX_NODES = 16
"""Nodes whose ranks are listed; the rest is counted."""


def topology_text(cluster: Cluster) -> str:
    """Return the hardware of a cluster."""
    node, device = cluster.node, cluster.node.device
    peaks = ", ".join(f"{k} {format_rate(v, 'FLOP')}" for k, v in device.peak.items())
    return "\n".join([
        f"{cluster.num_nodes} x {node.name}, {cluster.ranks_per_node} of {node.num_devices} "
        f"devices used in each: {cluster.world_size} ranks",
        f"device  {device.name}: {format_bytes(device.memory)} at "
        f"{format_rate(device.memory_bandwidth, 'B')}; {peaks}",
        f"link    {node.link.name}: {format_rate(node.link.bandwidth, 'B')} a device and "
        f"direction, {format_rate(node.link.pair_bandwidth, 'B')} a pair, "
        f"{node.link.efficiency:.0%} reached, {format_seconds(node.link.latency)}",
        f"nic     {node.nic.count} x {node.nic.name}: {format_rate(node.nic.bandwidth, 'B')} each "
        f"and direction, {node.nic.efficiency:.0%} reached, {format_seconds(node.nic.latency)}",
        "sources",
        *(f"  {s.what}: {s.title}, {s.url}" for s in (*device.sources, *node.sources)),
    ])  # fmt: skip


def placement_text(s: Scenario) -> str:
    """Return which rank lies on which device, with its coordinates in the mesh."""
    mesh, per_node = Mesh.of(s.plan), s.cluster.ranks_per_node
    shown = min(s.cluster.num_nodes, MAX_NODES)
    rows = [["node", *(f"gpu {i}" for i in range(per_node))]]
    for node in range(shown):
        cells = []
        for local in range(per_node):
            at = mesh.coordinates(node * per_node + local)
            cells.append(f"{node * per_node + local}:d{at['dp']}p{at['pp']}t{at['tp']}")
        rows.append([str(node), *cells])
    rest = s.cluster.num_nodes - shown
    more = f"\n... and {rest} nodes more" if rest else ""
    return f"placement (rank:dp,pp,tp; axes {' > '.join(s.plan.order)})\n{table(rows)}{more}"
