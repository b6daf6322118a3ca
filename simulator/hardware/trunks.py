"""Networks between nodes: which switch each adapter hangs on, and what joins the switches.

Adapters and switches share one numbering: adapter j of node n is n * adapters + j, and switches
follow after the last adapter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import product
from typing import NamedTuple

import numpy as np

from simulator.describe.cluster import Cluster
from simulator.describe.network import Edge
from simulator.errors import DescriptionError
from simulator.hardware.wiring import Floats, Ints


class Trunks(NamedTuple):
    """Switches, the home of each adapter, and the wires between switches."""

    names: tuple[str, ...]
    """Of the switches."""
    home: Ints
    """Where each adapter's port is; the adapter itself where `a` and `b` name adapters."""
    a: Ints
    b: Ints
    capacity: Floats
    """Bytes/s of each wire per direction."""
    latency: Floats
    """Seconds of each wire."""


def trunks(cluster: Cluster) -> Trunks:
    """Return the network of a cluster; of a torus, which has no switches, nothing."""
    return NETWORKS[cluster.network.layout](cluster)


def _total(cluster: Cluster) -> int:
    return cluster.num_nodes * cluster.node.nic.count


def _rate(cluster: Cluster) -> float:
    return cluster.node.nic.bandwidth * cluster.node.nic.efficiency


def _built(
    cluster: Cluster, names: list[str], home: Ints, ends: tuple[Ints, Ints], rate: object
) -> Trunks:
    """Return trunks from switch numbers that start at 0."""
    base = _total(cluster)
    a, b = ends
    return Trunks(
        tuple(names), home + base, a + base, b + base,
        np.broadcast_to(np.asarray(rate, np.float64), a.shape),
        np.full(a.shape, cluster.network.hop_latency),
    )  # fmt: skip


_NONE = np.zeros(0, np.int64)


def _crossbar(cluster: Cluster) -> Trunks:
    home = np.zeros(_total(cluster), np.int64)
    return _built(cluster, ["network"], home, (_NONE, _NONE), 0.0)


def _torus(cluster: Cluster) -> Trunks:
    return Trunks((), _NONE, _NONE, _NONE, np.zeros(0), np.zeros(0))


def _rail(cluster: Cluster) -> Trunks:
    rails = cluster.node.nic.count
    node, rail = np.divmod(np.arange(_total(cluster)), rails)
    return _leaf_spine(cluster, node // cluster.network.leaf_ports * rails + rail)


def _pods(cluster: Cluster) -> Trunks:
    node = np.arange(_total(cluster)) // cluster.node.nic.count
    return _leaf_spine(cluster, node // (cluster.network.leaf_ports // cluster.node.nic.count))


def _leaf_spine(cluster: Cluster, leaf: Ints) -> Trunks:
    """Join each leaf to each spine; its uplinks carry what a full leaf sends / oversubscription."""
    network, leaves = cluster.network, int(leaf.max()) + 1
    full = int(np.bincount(leaf).max())
    spines = network.spines or max(1, round(full / network.oversubscription))
    spines = spines if leaves > 1 else 0
    names = [f"leaf{i}" for i in range(leaves)] + [f"spine{i}" for i in range(spines)]
    a = np.repeat(np.arange(leaves), spines)
    b = leaves + np.tile(np.arange(spines), leaves)
    rate = full * _rate(cluster) / network.oversubscription / max(1, spines)
    return _built(cluster, names, leaf, (a, b), rate)


def _fat_tree(cluster: Cluster) -> Trunks:
    """Three tiers of k-port switches (Al-Fares, Loukissas and Vahdat, SIGCOMM 2008).

    A pod has k/2 edge and k/2 aggregation switches, all joined; aggregation switch j of each pod
    is joined to cores j*k/2 .. (j+1)*k/2 - 1. Only pods that hold adapters are built.
    """
    network, half = cluster.network, cluster.network.radix // 2
    edge = np.arange(_total(cluster)) // half
    edges = int(edge[-1]) + 1
    pods = -(-edges // half)
    aggregations, cores = (pods * half if edges > 1 else 0), (half * half if pods > 1 else 0)
    names = [f"edge{i}" for i in range(edges)]
    names += [f"agg{i}" for i in range(aggregations)]
    names += [f"core{i}" for i in range(cores)]
    up, down = _NONE, _NONE
    if aggregations:
        up = np.repeat(np.arange(edges), half)
        down = edges + up // half * half + np.tile(np.arange(half), edges)
    if cores:
        high = np.repeat(np.arange(aggregations), half)
        core = high % half * half + np.tile(np.arange(half), aggregations)
        up = np.concatenate([up, edges + high])
        down = np.concatenate([down, edges + aggregations + core])
    return _built(cluster, names, edge, (up, down), _rate(cluster) / network.oversubscription)


def _dragonfly(cluster: Cluster) -> Trunks:
    """Join routers of a group all to all, and every two groups by as many links as ports allow."""
    p, routers, up = cluster.network.dragonfly_shape
    router = np.arange(_total(cluster)) // p
    groups = -(-(int(router[-1]) + 1) // routers)
    names = [f"group{g}/router{r}" for g in range(groups) for r in range(routers)]
    first, second = np.triu_indices(routers, 1)
    base = np.arange(groups)[:, None] * routers
    wires = {
        pair: _rate(cluster)
        for pair in zip((base + first).ravel().tolist(), (base + second).ravel().tolist(),
                        strict=True)
    }  # fmt: skip
    copies = routers * up // max(1, groups - 1)
    between = _rate(cluster) / cluster.network.oversubscription
    for i in range(groups):
        for j in range(i + 1, groups):
            for c in range(copies):  # ports of i go to i+1, i+2, ... in turn, those of j likewise
                out = ((j - i - 1) * copies + c) // up
                back = ((i - j) % groups - 1) * copies + c
                pair = (i * routers + out, j * routers + back // up)
                wires[pair] = wires.get(pair, 0.0) + between
    ends = np.array(list(wires), np.int64).reshape(-1, 2)
    return _built(cluster, names, router, (ends[:, 0], ends[:, 1]), list(wires.values()))


_ADAPTER = re.compile(r"node(\d+)(?:/nic(\d+))?")


def _drawn(cluster: Cluster) -> Trunks:
    """Take the edges as they are drawn; an edge of `node3` stands for one of each adapter."""
    network, nic, total = cluster.network, cluster.node.nic, _total(cluster)
    switches: dict[str, int] = {}
    wires: dict[tuple[int, int], tuple[float, float]] = {}
    for edge in network.edges:
        ends = [_adapters(end, edge, cluster) for end in (edge.a, edge.b)]
        for end, found in zip((edge.a, edge.b), ends, strict=True):
            if found is None:
                switches.setdefault(end, total + len(switches))
        sides = [found or [switches.get(end, -1)]
                 for end, found in zip((edge.a, edge.b), ends, strict=True)]  # fmt: skip
        both = None not in ends
        pairs = zip(*sides, strict=True) if both and len(sides[0]) > 1 else product(*sides)
        rate = edge.count * (edge.bandwidth or nic.bandwidth) * (edge.efficiency or nic.efficiency)
        ports = sum(found is not None for found in ends)
        latency = nic.latency * ports / 2 if ports else network.hop_latency
        for a, b in pairs:
            wires[a, b] = (rate, latency if edge.latency is None else edge.latency)
    ends_of = np.array(list(wires), np.int64).reshape(-1, 2)
    values = np.array(list(wires.values())).reshape(-1, 2)
    return Trunks(
        tuple(switches), np.arange(total), ends_of[:, 0], ends_of[:, 1], values[:, 0], values[:, 1]
    )


def _adapters(end: str, edge: Edge, cluster: Cluster) -> list[int] | None:
    """Return the adapters that an end of an edge names, or None where it is a switch."""
    match, count = _ADAPTER.fullmatch(end), cluster.node.nic.count
    if match is None:
        return None
    node, adapter = int(match[1]), match[2]
    if node >= cluster.num_nodes or (adapter is not None and int(adapter) >= count):
        raise DescriptionError(
            f"network.edges: {edge.a!r} to {edge.b!r}: there is no {end!r} in "
            f"{cluster.num_nodes} nodes of {count} adapters"
        )
    chosen = range(count) if adapter is None else [int(adapter)]
    return [node * count + j for j in chosen]


NETWORKS: Mapping[str, Callable[[Cluster], Trunks]] = {
    "crossbar": _crossbar,
    "rail": _rail,
    "fat-tree": _fat_tree,
    "pods": _pods,
    "dragonfly": _dragonfly,
    "torus": _torus,
    "graph": _drawn,
}
"""Networks by layout."""
