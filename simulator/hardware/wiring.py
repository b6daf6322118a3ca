"""Descriptions to links: which vertices a node and a network have, and what joins them.

Every wire is two links, one a direction. Rates are datasheet rate times the efficiency that the
description states; latencies are such that a message inside a node costs `Link.latency` and a
message between nodes `Nic.latency`, whatever lies on the way (`Network.hop_latency` and
`Pcie.socket_latency` are added).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import combinations
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from simulator.describe.cluster import Cluster, Node

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]


class Wire(NamedTuple):
    """A two-way wire inside a node."""

    a: str
    b: str
    capacity: float
    """Bytes/s per direction."""
    latency: float
    """Seconds."""


class Links(NamedTuple):
    """One-way links as columns; vertices by number."""

    tail: Ints
    head: Ints
    capacity: Floats
    latency: Floats

    @classmethod
    def both_ways(cls, a: Ints, b: Ints, capacity: object, latency: object) -> Links:
        """Return two links for each wire, those from a to b at even places."""
        return cls(
            np.stack([a, b], axis=1).reshape(-1),
            np.stack([b, a], axis=1).reshape(-1),
            np.repeat(np.broadcast_to(np.asarray(capacity, np.float64), a.shape), 2),
            np.repeat(np.broadcast_to(np.asarray(latency, np.float64), a.shape), 2),
        )

    @classmethod
    def joined(cls, parts: Iterable[Links]) -> Links:
        """Return the links of all parts."""
        return cls(*(np.concatenate(column) for column in zip(*parts, strict=True)))


HYBRID_CUBE_MESH = {
    (0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 2,
    (2, 6): 1, (3, 7): 1, (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 2,
}  # fmt: skip
"""NVLinks of each pair of a DGX-1 V100, as `nvidia-smi topo -m` prints them; devices 0 to 3 also
stand in an NCCL topology file of such a node (NVIDIA/nccl, issue 671)."""


def _switch(node: Node) -> Iterator[Wire]:
    link = node.link
    for i in range(node.num_devices):
        yield Wire(f"gpu{i}", "nvswitch", link.bandwidth * link.efficiency, link.latency / 2)


def _pairs(node: Node, counts: Mapping[tuple[int, int], int]) -> Iterator[Wire]:
    link = node.link
    for (i, j), count in counts.items():
        rate = count * link.pair_bandwidth * link.efficiency
        yield Wire(f"gpu{i}", f"gpu{j}", rate, link.latency)


def _full_mesh(node: Node) -> Iterator[Wire]:
    return _pairs(node, dict.fromkeys(combinations(range(node.num_devices), 2), 1))


def _grid(node: Node) -> Iterator[Wire]:
    a, b = grid_pairs(node.shape, wrap=node.layout == "torus")
    return _pairs(node, dict.fromkeys(zip(a.tolist(), b.tolist(), strict=True), 1))


def grid_pairs(shape: tuple[int, ...], wrap: bool) -> tuple[Ints, Ints]:
    """Return the neighbours in a grid, each pair once; extents of 3 and more may wrap around."""
    place = np.arange(np.prod(shape, dtype=np.int64)).reshape(shape)
    a, b = [], []
    for axis, extent in enumerate(shape):
        last = extent if wrap and extent > 2 else extent - 1
        a.append(np.take(place, range(last), axis).reshape(-1))
        b.append(np.take(np.roll(place, -1, axis), range(last), axis).reshape(-1))
    return np.concatenate(a), np.concatenate(b)


def _pcie(node: Node) -> Iterator[Wire]:
    link, pcie = node.link, node.pcie
    assert pcie is not None, "Node has checked it"
    rate = link.bandwidth * link.efficiency
    switches = -(-node.num_devices // pcie.devices_per_switch)
    for i in range(node.num_devices):
        yield Wire(f"gpu{i}", f"pcie{i // pcie.devices_per_switch}", rate, link.latency / 2)
    for k in range(switches):
        yield Wire(f"pcie{k}", f"cpu{k * pcie.sockets // switches}", rate, 0.0)
    between = pcie.socket_bandwidth * pcie.socket_efficiency
    for i, j in combinations(range(pcie.sockets), 2):
        yield Wire(f"cpu{i}", f"cpu{j}", between, pcie.socket_latency)


def _drawn(node: Node) -> Iterator[Wire]:
    for edge in node.edges:
        kinds = [end[:3] if end[3:].isdecimal() else "" for end in (edge.a, edge.b)]
        # Half of alpha at each device's end, so that every path between devices costs alpha once.
        latency = node.link.latency * kinds.count("gpu") / 2 if "nic" not in kinds else 0.0
        link = node.nic if "nic" in kinds else node.link
        rate = node.nic.bandwidth if "nic" in kinds else node.link.pair_bandwidth
        yield Wire(
            edge.a,
            edge.b,
            edge.count * (edge.bandwidth or rate) * (edge.efficiency or link.efficiency),
            latency if edge.latency is None else edge.latency,
        )


LAYOUTS: Mapping[str, Callable[[Node], Iterator[Wire]]] = {
    "switch": _switch,
    "hybrid-cube-mesh": lambda node: _pairs(node, HYBRID_CUBE_MESH),
    "full-mesh": _full_mesh,
    "pcie": _pcie,
    "mesh": _grid,
    "torus": _grid,
    "graph": _drawn,
}
"""Wires between the devices of a node by its layout."""


def adapter_of(cluster: Cluster) -> Ints:
    """Return the adapter of each used device of a node: i * adapters // devices.

    Where there are fewer adapters than devices, the devices in use share them evenly.
    """
    node = cluster.node
    enough = node.nic.count >= node.num_devices
    devices = node.num_devices if enough else max(cluster.ranks_per_node, node.nic.count)
    return np.arange(cluster.ranks_per_node) * node.nic.count // devices


def _adapters(cluster: Cluster, drawn: set[str]) -> Iterator[Wire]:
    """Join the adapters to what they sit beside; `drawn` have their wires already."""
    node, count = cluster.node, cluster.node.nic.count
    rate = node.nic.bandwidth * node.nic.efficiency  # the slot is as fast as the adapter
    if node.pcie is not None:
        for j in range(count):
            first = j * node.num_devices // count
            switch = first // node.pcie.devices_per_switch
            yield Wire(f"pcie{switch}", f"nic{j}", rate, 0.0)
        return
    for device, adapter in enumerate(adapter_of(cluster).tolist()):
        if f"nic{adapter}" not in drawn:
            yield Wire(f"gpu{device}", f"nic{adapter}", rate, 0.0)


def node_links(cluster: Cluster) -> tuple[tuple[str, ...], Links]:
    """Return the vertices of one node, devices first and adapters last, and its links."""
    node = cluster.node
    wires = list(LAYOUTS[node.layout](node)) if node.num_devices > 1 else []
    devices = [f"gpu{i}" for i in range(node.num_devices)]
    adapters = [f"nic{j}" for j in range(node.nic.count)]
    wires += _adapters(cluster, {end for wire in wires for end in wire[:2]} & set(adapters))
    ends = dict.fromkeys(end for wire in wires for end in wire[:2])
    inner = [end for end in ends if end not in {*devices, *adapters}]
    names = (*devices, *inner, *adapters)
    number = {name: i for i, name in enumerate(names)}
    return names, Links.both_ways(
        np.array([number[wire.a] for wire in wires], np.int64),
        np.array([number[wire.b] for wire in wires], np.int64),
        np.array([wire.capacity for wire in wires], np.float64),
        np.array([wire.latency for wire in wires], np.float64),
    )
