"""Flows from storage and to it: how long they take alone, and which links they load.

Storage is a link of its own, on which a byte counts as often as scattered access, the number of
reads and the rate of writing make it: disks of a node, or what all nodes share. Between shared
storage and a node data passes the adapter that the rank's device uses, as messages do, or a
network of its own. What requests wait, whoever else is served, is work before the flow.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from simulator.describe.cluster import Cluster
from simulator.describe.storage import Reading, Storage
from simulator.errors import DescriptionError
from simulator.hardware.fabric import Fabric
from simulator.hardware.wiring import Floats
from simulator.program import Flow


class StorageLinks(NamedTuple):
    """Links of all storage of a cluster, which follow those of its fabric."""

    names: tuple[str, ...]
    capacity: Floats
    first: dict[str, int]
    """Link of the disks of the first node, or of shared storage, by name of the storage."""
    path: dict[str, int]
    """Link to the first node of a network of its own, then from it, then to the next node."""


def storage_links(cluster: Cluster, count: int) -> StorageLinks:
    """Return the links of storage, numbered from `count`."""
    names: list[str] = []
    capacity: list[float] = []
    first, path = {}, {}
    nodes = range(cluster.num_nodes)
    for name, storage in cluster.storage.items():
        first[name] = count + len(names)
        local = storage.kind == "local"
        names += [f"node{n}/{name}" for n in nodes] if local else [name]
        capacity += [storage.bandwidth] * (len(nodes) if local else 1)
        if storage.node_bandwidth is not None:
            path[name] = count + len(names)
            names += [end for n in nodes for end in (f"{name}>node{n}", f"node{n}>{name}")]
            capacity += [storage.node_bandwidth] * (2 * len(nodes))
    return StorageLinks(tuple(names), np.array(capacity, np.float64), first, path)


def load_of(
    flow: Flow, rank: int, cluster: Cluster, fabric: Fabric, links: StorageLinks
) -> dict[int, float]:
    """Return the links that a flow of a rank loads, and bytes on each for a byte of its own.

    Raises:
        DescriptionError: when the rank's adapter has no link of its own to load.
    """
    name, storage = flow.storage, cluster.storage[flow.storage]
    slot = int(fabric.slot[rank])
    node, writes = slot // cluster.ranks_per_node, flow.name == "write"
    local = storage.kind == "local"
    load = {links.first[name] + node * local: weight(flow, storage)}
    if local:
        return load
    if name in links.path:
        load[links.path[name] + 2 * node + writes] = 1.0
        return load
    adapter = int(fabric.adapter[slot]) if len(fabric.port) else 0
    port = int(fabric.port[adapter]) if len(fabric.port) else -1
    if port < 0:
        raise DescriptionError(
            f"cluster.storage.{name}: adapters of this network have no link to a switch that data "
            "could come over; state its node_bandwidth, a network of its own"
        )
    load[port + (not writes)] = 1.0
    return load


def weight(flow: Flow, storage: Storage) -> float:
    """Return how many bytes of a long read a byte of a flow costs storage."""
    if flow.name == "write":
        return storage.bandwidth / (storage.write_bandwidth or storage.bandwidth)
    size = flow.bytes * flow.count
    what = Reading(size, flow.count, 1, 1, flow.name == "scattered_read")
    return storage.server_seconds(what) * storage.bandwidth / size


def rate(flow: Flow, cluster: Cluster) -> float:
    """Return the bytes/s of a flow when nothing else is in its way."""
    storage, nic = cluster.storage[flow.storage], cluster.node.nic
    served = storage.bandwidth / weight(flow, storage)
    path = storage.node_bandwidth or nic.bandwidth * nic.efficiency
    return served if storage.kind == "local" else min(served, path)
