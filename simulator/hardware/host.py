"""Seconds of what runs beside a device: copies to and from its host, and updates there.

All devices of a node in use do so at once: they share the links that lead to the host, and its
memory, evenly.
"""

from __future__ import annotations

from typing import NamedTuple

from simulator.describe.cluster import Node
from simulator.errors import DescriptionError
from simulator.program import Kernel


class HostShare(NamedTuple):
    """What one device has of its host, with so many of the node in use."""

    copy: float
    """Bytes/s of a copy, per direction: the slower of its share of the link and of the memory."""
    update: float
    """Bytes/s of its share of the memory, behind which the host's arithmetic is hidden."""
    memory: float
    """Bytes of memory of all hosts that are in use in its node."""


def host_share(node: Node, devices: int) -> HostShare:
    """Return what each of `devices` in use of a node has of its host; they fill hosts in turn."""
    host = node.host
    if host is None:
        raise DescriptionError(f"{node.name} does not say what its host offers; give it a host")
    each = -(-node.num_devices // host.count)  # devices of a host
    bandwidth = host.memory_bandwidth * host.memory_efficiency / host.count
    update = bandwidth / min(each, devices)
    link = host.bandwidth * host.efficiency / min(host.devices_per_link, devices)
    return HostShare(min(link, update), update, host.memory * -(-devices // each) / host.count)


def host_seconds(kernel: Kernel, node: Node, devices: int) -> float:
    """Return the seconds of a kernel of `program.OFF_DEVICE`, of one of `devices` in use."""
    share = host_share(node, devices)
    return kernel.bytes / (share.copy if kernel.dtype == "copy" else share.update)
