"""Storage: disks of a node, servers that all nodes share, stores of objects."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from simulator.describe.fields import BytesPerSecond, Fraction, Range, Seconds, validate
from simulator.errors import DescriptionError


class Reading(NamedTuple):
    """What is read at once, and by how many who share the storage evenly."""

    bytes: float
    reads: float
    """Requests that it takes, one after the other."""
    on_node: int
    """Readers of one node at once, itself included."""
    in_all: int
    random: bool
    """Whether reads are scattered over the storage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Where data lies, and how fast it comes from there."""

    kind: Literal["local", "shared", "object"]
    """`local`: disks of each node, for its own ranks. `shared`: a server or a parallel file system
    (NFS, Lustre) that all nodes share. `object`: a store behind requests, which all share too."""
    bandwidth: BytesPerSecond
    """Of long runs that are read: of the disks of a node, or of all servers together."""
    write_bandwidth: BytesPerSecond | None = None
    """Of long runs that are written; that of reading when absent."""
    random_access: Fraction = 1.0
    """Share of the bandwidth that scattered reads reach (the access factor)."""
    iops: Annotated[float, Range(0, 1e12, open_low=True)] | None = None
    """Reads a second, of whatever has the bandwidth; no limit when absent."""
    latency: Seconds = 0.0
    """From a request to its first byte."""
    request_bandwidth: BytesPerSecond | None = None
    """Most that one request gets (of an object store, a connection); no limit when absent."""
    node_bandwidth: BytesPerSecond | None = None
    """Of a storage network's link to each node; absent: data comes through the adapters of the
    compute network."""

    def __post_init__(self) -> None:
        validate(self)
        if self.kind == "local" and self.node_bandwidth is not None:
            raise DescriptionError(
                "Storage.node_bandwidth: disks of kind 'local' lie in the node itself; leave it out"
            )

    def server_seconds(self, what: Reading) -> float:
        """Return the seconds in which it serves a read alone: of bytes, or of their number."""
        share = self.random_access if what.random else 1.0
        return max(what.bytes / (self.bandwidth * share), what.reads / (self.iops or math.inf))

    def transfer_seconds(self, what: Reading, adapters: float, adapter: float) -> float:
        """Return the seconds of a read at its even share of storage and network, latency apart.

        Args:
            what: what is read, and with whom.
            adapters: bytes/s of a node's adapters together, through which it comes unless local.
            adapter: bytes/s of one of them, which is all that one reader uses.
        """
        served = self.server_seconds(what)
        if self.kind == "local":
            return served * what.on_node
        shared = (self.node_bandwidth or adapters) / what.on_node
        path = shared if self.node_bandwidth else min(shared, adapter)
        return max(served * what.in_all, what.bytes / path)

    def request_seconds(self, what: Reading, transfer: float) -> float:
        """Return what a reader waits beside the transfer, in which others may be served."""
        limit = self.request_bandwidth
        longer = max(0.0, what.bytes / limit - transfer) if limit else 0.0
        return what.reads * self.latency + longer
