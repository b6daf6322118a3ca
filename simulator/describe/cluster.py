"""The machine: devices in nodes, joined by links inside a node and by NICs between nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from simulator.describe.fields import (
    Bytes,
    BytesPerSecond,
    Catalogued,
    Count,
    FlopsPerSecond,
    Fraction,
    Seconds,
    validate,
)
from simulator.errors import DescriptionError, suggestion

DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8")
"""Precisions that a device may state a peak rate for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where facts of a file come from."""

    what: str
    title: str
    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator."""

    name: str
    memory: Bytes
    memory_bandwidth: BytesPerSecond
    matmul_efficiency: Fraction
    """Share of the peak rate that large matrix products sustain."""
    memory_efficiency: Fraction
    """Share of the memory bandwidth that streaming kernels reach."""
    launch_overhead: Seconds
    """Gap between two dependent kernels of one stream."""
    peak: dict[str, FlopsPerSecond]
    """Dense peak rate by precision, a key of `DTYPES`."""
    architecture: Literal["volta", "ampere", "hopper", "blackwell"] = "ampere"
    """Generation, by which NCCL's tuner constants are chosen."""
    sources: tuple[Source, ...] = ()

    def __post_init__(self) -> None:
        validate(self)
        unknown = [dtype for dtype in self.peak if dtype not in DTYPES]
        if unknown:
            raise DescriptionError(
                f"Device.peak: unknown precision {unknown[0]!r}{suggestion(unknown[0], DTYPES)}"
            )

    def __hash__(self) -> int:
        return hash((self.name, self.memory, tuple(self.peak.items())))


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What joins the devices of one node."""

    name: str
    bandwidth: BytesPerSecond
    """Per device and direction, over all its links together, as the datasheet says."""
    pair_bandwidth: BytesPerSecond
    """From one device to one other, per direction."""
    efficiency: Fraction
    """Share of the datasheet rate that long messages reach."""
    latency: Seconds
    """Of one message between two devices (alpha)."""
    kind: Literal["NVLINK", "PCI"] = "NVLINK"
    """Which of NCCL's latencies apply."""
    channels: Count = 16
    """Channels that NCCL opens over the links."""
    in_switch_reduction: bool = False
    """Whether the switch sums what devices send (NVLink SHARP, NCCL's NVLS)."""

    def __post_init__(self) -> None:
        validate(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """What joins nodes: the compute network's adapters of one node."""

    name: str
    count: Count
    """Adapters of one node; its devices share them evenly."""
    bandwidth: BytesPerSecond
    """Per adapter and direction."""
    efficiency: Fraction
    latency: Seconds
    """Of one message between two nodes (alpha)."""
    plugin_latency: Seconds = 0.0
    """What NCCL's network plugin adds to each crossing, over NCCL's own figure for InfiniBand."""
    ll128: bool = True
    """Whether NCCL's LL128 protocol may use this network."""

    def __post_init__(self) -> None:
        validate(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One server."""

    name: str
    device: Annotated[Device, Catalogued("devices")]
    num_devices: Count
    link: Link
    nic: Nic
    sources: tuple[Source, ...] = ()

    def __post_init__(self) -> None:
        validate(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal nodes on a network that gives every NIC its full rate."""

    node: Annotated[Node, Catalogued("nodes")]
    num_nodes: Count = 1
    devices_per_node: Count | None = None
    """Devices used in each node; all of them when absent."""
    nccl_algorithm: str | None = None
    """Run collectives by this algorithm where it can (NCCL_ALGO); NCCL's choice when absent."""
    nccl_protocol: Literal["LL", "LL128", "SIMPLE"] | None = None
    """Run collectives by this protocol where it can (NCCL_PROTO); NCCL's choice when absent."""

    def __post_init__(self) -> None:
        validate(self)
        if self.devices_per_node is not None and self.devices_per_node > self.node.num_devices:
            raise DescriptionError(
                f"Cluster.devices_per_node: {self.devices_per_node} is more than the "
                f"{self.node.num_devices} devices of {self.node.name}"
            )

    @property
    def ranks_per_node(self) -> int:
        """Devices used in each node."""
        return self.devices_per_node or self.node.num_devices

    @property
    def world_size(self) -> int:
        """Devices used in all nodes."""
        return self.num_nodes * self.ranks_per_node
