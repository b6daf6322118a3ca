"""The machine: devices in nodes, joined by links inside a node and by NICs between nodes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from simulator.describe.calibration import Calibration
from simulator.describe.fields import (
    Bytes,
    BytesPerSecond,
    Catalogued,
    Count,
    FlopsPerSecond,
    Fraction,
    Seconds,
    Watts,
    validate,
)
from simulator.describe.network import Edge, Network, edge_problems
from simulator.describe.power import Power, limit_problems
from simulator.describe.storage import Storage
from simulator.errors import DescriptionError, suggestion

DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8")
"""Precisions that a device may state a peak rate for."""

MEMORY_KINDS = ("stream", "permutation", "scatter")
"""Kinds of memory-bound kernels that a device may state a rate of their own for: one that passes
once over whole buffers of weights, gradients, states or logits, as a copy or STREAM's Triad does;
one that copies rows of tokens to their places or sums them from there; and torch's `index_add_` and
`scatter_add_` of such rows, whose sums are atomic."""


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
    matmul_efficiency_in: dict[str, Fraction] = field(default_factory=dict)
    """The same by precision, a key of `peak`, where it is another."""
    memory_efficiency: Fraction
    """Share of the memory bandwidth that memory-bound kernels (norms, dropouts, ...) reach."""
    memory_efficiency_in: dict[str, Fraction] = field(default_factory=dict)
    """The same of some kinds of kernel, a key of `MEMORY_KINDS`, where it is another."""
    launch_overhead: Seconds
    """Gap between two dependent kernels of one stream."""
    peak: dict[str, FlopsPerSecond]
    """Dense peak rate by precision, a key of `DTYPES`."""
    compute_units: Count | None = None
    """Units (SMs) over which a product's tiles are spread; absent where tiles do not matter."""
    communication_units: Count | None = None
    """Of them, how many a collective within a node holds while it moves bytes (a block of NCCL's
    kernel for each channel); absent where it takes none from computing."""
    sustained_clock: Fraction = 1.0
    """Share of the best rate that is left when the power limit holds the clock down for minutes."""
    fused: dict[str, Fraction] = field(default_factory=dict)
    """Share of the peak rate that a fused algorithm reaches on long sequences, by its name: `flash
    forward`, `flash backward` (the best), `flash2 ...`, `flash1 ...` as in `Run.attention`."""
    architecture: Literal["volta", "ampere", "hopper", "blackwell"] = "ampere"
    """Generation, by which NCCL's tuner constants are chosen."""
    tdp: Watts | None = None
    """Thermal design power, which computing is taken to draw; needed where energy is counted."""
    idle_power: Watts | None = None
    """What it draws with a context on it and nothing to do; needed where energy is counted."""
    power: Power | None = None
    """Where its power goes; needed where `power_limit` is set."""
    power_limit: Watts | None = None
    """Limit that is set on the board, at most `tdp`, where that is absent; it lowers the clock."""
    context: Bytes = 500 * 2**20
    """What the driver's context and the code of loaded kernels take of the memory. ASSUMED where a
    file does not state it: no vendor prints it, and it depends on driver and libraries."""
    calibration: Annotated[Calibration, Catalogued("calibrations")] | None = None
    """Times of kernels measured on it, a file of ``trainsim calibrate --kernels``: they stand in
    place of what the facts above give, between the sizes that were measured."""
    sources: tuple[Source, ...] = ()

    def __post_init__(self) -> None:
        validate(self)
        if "fp32" not in self.peak:
            raise DescriptionError("Device.peak: fp32 is missing; element-wise work runs at it")
        kinds = [kind for kind in self.memory_efficiency_in if kind not in MEMORY_KINDS]
        if kinds:
            raise DescriptionError(
                f"Device.memory_efficiency_in: unknown kind of kernel {kinds[0]!r}"
                f"{suggestion(kinds[0], MEMORY_KINDS)}"
            )
        if self.communication_units is not None and self.communication_share > 0.5:
            raise DescriptionError(
                f"Device.communication_units: {self.communication_units} must be at most half of "
                f"compute_units, which is {self.compute_units or 'not stated'}"
            )
        unknown = [d for d in (*self.peak, *self.matmul_efficiency_in) if d not in DTYPES]
        if unknown:
            raise DescriptionError(
                f"Device.peak: unknown precision {unknown[0]!r}{suggestion(unknown[0], DTYPES)}"
            )
        known = self.calibration is not None
        for problem in limit_problems(
            self.power_limit, self.power, self.tdp, self.memory_bandwidth, known
        ):
            raise DescriptionError(f"Device.power_limit: {problem}")

    def __hash__(self) -> int:
        return hash((self.name, self.memory, tuple(self.peak.items())))

    @property
    def communication_share(self) -> float:
        """Share of its computing that a collective within a node holds."""
        return (self.communication_units or 0) / (self.compute_units or 1)


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
        if self.pair_bandwidth > self.bandwidth:
            raise DescriptionError(
                f"Link.pair_bandwidth: {self.pair_bandwidth:g} bytes/s is more than the "
                f"{self.bandwidth:g} of all links of a device together"
            )


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
class Pcie:
    """How PCIe switches and sockets join the devices of a node with the layout `pcie`."""

    devices_per_switch: Count = 4
    """Devices below one PCIe switch; at 1 the switch is a port of the socket."""
    sockets: Count = 2
    """NUMA nodes; switches are spread over them evenly."""
    socket_bandwidth: BytesPerSecond
    """Between two sockets, per direction (UPI, xGMI)."""
    socket_efficiency: Fraction
    """Share of it that peer-to-peer traffic reaches."""
    socket_latency: Seconds = 0.0
    """Added to a message that crosses from one socket to another."""

    def __post_init__(self) -> None:
        validate(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What the processors of a node offer devices that keep something in their memory."""

    count: Count = 1
    """Hosts of the node, as of a rack's trays: each has an even part of devices and memory."""
    bandwidth: BytesPerSecond
    """Of the link between host and devices (PCIe x16, NVLink-C2C), per direction."""
    efficiency: Fraction
    """Share of it that long copies from and to pinned memory reach."""
    devices_per_link: Count = 1
    """Devices that share one such link, below one PCIe switch; they share it evenly."""
    memory: Bytes
    """Of the node."""
    memory_bandwidth: BytesPerSecond
    """Of the node, all sockets together; the devices of a host share its part evenly."""
    memory_efficiency: Fraction
    """Share of it that streams (STREAM, an update by all cores) reach."""
    cores: Count | None = None
    """Of the node, all sockets together; where workers of loaders are more, they take turns."""

    def __post_init__(self) -> None:
        validate(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One server, or whatever else its own links join: a rack, a wafer."""

    name: str
    device: Annotated[Device, Catalogued("devices")]
    num_devices: Count
    link: Link
    nic: Nic
    host_launch: Seconds = 0.0
    """Time in which the host issues one kernel; 0 where it never holds the device back, as with
    CUDA graphs. A shorter kernel, or a collective, takes as long, whatever came before it: a host
    that runs ahead while kernels are long is not credited with it, so gaps are an upper bound."""
    host: Host | None = None
    """Needed where something is offloaded to it."""
    layout: Literal["switch", "hybrid-cube-mesh", "full-mesh", "pcie", "mesh", "torus", "graph"] = (
        "switch"
    )
    """`switch`: all on one crossbar. `hybrid-cube-mesh`: DGX-1 V100. `full-mesh`: each pair has a
    link of its own. `pcie`: see `pcie`. `mesh`, `torus`: neighbours in `shape`. `graph`: `edges`.
    A link between neighbours has the pair bandwidth."""
    shape: tuple[Count, ...] = ()
    """Of `mesh` and `torus`: devices along each dimension, the last one varies fastest."""
    pcie: Pcie | None = None
    edges: tuple[Edge, ...] = ()
    """Of `graph`: between `gpu0`, `nic0` and inner vertices of any other name. Adapters that no
    edge names sit beside the devices that use them."""
    sources: tuple[Source, ...] = ()

    def __post_init__(self) -> None:
        validate(self)
        problems = [f"Node.{p}" for p in (*_layout_problems(self), *edge_problems(self.edges))]
        if problems:
            raise DescriptionError(problems)


def _layout_problems(node: Node) -> Iterator[str]:
    """Say which fields the layout of a node lacks, cannot use, or contradicts."""
    for name, layouts in (("shape", ("mesh", "torus")), ("pcie", ("pcie",)), ("edges", ("graph",))):
        if bool(getattr(node, name)) != (node.layout in layouts):
            need = "needs" if node.layout in layouts else "has no"
            yield f"{name}: layout {node.layout!r} {need} {name}"
    if node.shape and math.prod(node.shape) != node.num_devices:
        yield (
            f"shape: {' x '.join(map(str, node.shape))} = {math.prod(node.shape)}, but "
            f"num_devices is {node.num_devices}"
        )
    if node.layout == "hybrid-cube-mesh" and node.num_devices != 8:
        yield f"num_devices: {node.num_devices}, but a hybrid cube mesh has 8"
    parts = {"gpu": node.num_devices, "nic": node.nic.count}
    for end in (end for edge in node.edges for end in (edge.a, edge.b)):
        kind, number = end[:3], end[3:]
        if kind in parts and number.isdecimal() and int(number) >= parts[kind]:
            yield f"edges: there is no {end!r}; the last one is '{kind}{parts[kind] - 1}'"
        if "/" in end or ">" in end:
            yield f"edges: the name {end!r} must hold no '/' and no '>'"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Nodes of one kind that follow each other in the numbers of a cluster's nodes."""

    node: Annotated[Node, Catalogued("nodes")]
    count: Count = 1

    def __post_init__(self) -> None:
        validate(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Nodes on a network: equal ones, or groups of several kinds."""

    node: Annotated[Node, Catalogued("nodes")] = None  # type: ignore[assignment] # or `nodes`
    """Where there are several kinds, the first one."""
    num_nodes: Count = 1
    nodes: tuple[NodeGroup, ...] = ()
    """In place of `node` and `num_nodes`: groups of nodes, numbered one group after the other."""
    devices_per_node: Count | None = None
    """Devices used in each node; all of them when absent."""
    network: Network = field(default_factory=Network)
    """Joins the nodes' adapters; without a word of it, every adapter gets its full rate."""
    nccl_algorithm: str | None = None
    """Run collectives by this algorithm where it can (NCCL_ALGO); NCCL's choice when absent."""
    nccl_protocol: Literal["LL", "LL128", "SIMPLE"] | None = None
    """Run collectives by this protocol where it can (NCCL_PROTO); NCCL's choice when absent."""
    storage: dict[str, Annotated[Storage, Catalogued("storage")]] = field(
        default_factory=dict, hash=False
    )
    """Where data lies, by a name that `data.storage` gives."""

    def __post_init__(self) -> None:
        self._take_groups()
        validate(self)
        for node in self.kinds:
            if self.devices_per_node is not None and self.devices_per_node > node.num_devices:
                raise DescriptionError(
                    f"Cluster.devices_per_node: {self.devices_per_node} is more than the "
                    f"{node.num_devices} devices of {node.name}"
                )
        if self.is_mixed:
            self._check_kinds()
        wrong = self.network.complaint(self.num_nodes, self.node.nic.count, self.ranks_per_node)
        if wrong is not None:
            raise DescriptionError(f"Cluster.{wrong}")

    def _take_groups(self) -> None:
        """Set `node` and `num_nodes` from groups, where nodes are listed so."""
        if not self.nodes:
            if self.node is None:
                raise DescriptionError("Cluster.node: is missing; name a node, or list nodes")
            return
        total = sum(group.count for group in self.nodes)
        for name, plain, taken in (
            ("node", None, self.nodes[0].node), ("num_nodes", 1, total),
        ):  # fmt: skip
            value = getattr(self, name)
            if value not in (plain, taken):
                shown = value.name if isinstance(value, Node) else value
                raise DescriptionError(
                    f"Cluster.{name}: {shown!r} is not what nodes lists; leave it out"
                )
            object.__setattr__(self, name, taken)

    def _check_kinds(self) -> None:
        """Check what nodes of several kinds must agree on."""
        sizes = {node.num_devices: node.name for node in self.kinds}
        if self.devices_per_node is None and len(sizes) > 1:
            named = ", ".join(f"{count} of {name}" for count, name in sizes.items())
            raise DescriptionError(
                f"Cluster.nodes: unlike numbers of devices ({named}); "
                f"set devices_per_node = {min(sizes)}"
            )
        if self.network != Network():
            raise DescriptionError(
                "Cluster.network: routes between nodes of several kinds are not modelled; "
                "leave it out"
            )

    @property
    def kinds(self) -> tuple[Node, ...]:
        """The kinds of its nodes, in the order in which they come."""
        return tuple(dict.fromkeys(g.node for g in self.nodes)) or (self.node,)

    @property
    def is_mixed(self) -> bool:
        """Whether its nodes are of several kinds."""
        return len(self.nodes) > 1 and len(self.kinds) > 1

    @property
    def kind_of_node(self) -> tuple[int, ...]:
        """The kind of each node, an index of `kinds`."""
        if not self.nodes:
            return (0,) * self.num_nodes
        kinds = self.kinds
        return tuple(kinds.index(group.node) for group in self.nodes for _ in range(group.count))

    def only(self, kind: int) -> Cluster:
        """Return the cluster as if all of its nodes were of one kind."""
        return replace(self, node=self.kinds[kind], nodes=()) if self.is_mixed else self

    @property
    def ranks_per_node(self) -> int:
        """Devices used in each node."""
        return self.devices_per_node or self.node.num_devices

    @property
    def world_size(self) -> int:
        """Devices used in all nodes."""
        return self.num_nodes * self.ranks_per_node

    def peak(self, precision: str) -> float:
        """Return the FLOP/s of all devices used."""
        per_kind = [node.device.peak[precision] for node in self.kinds]
        if not self.is_mixed:
            return self.world_size * per_kind[0]
        return self.ranks_per_node * sum(per_kind[kind] for kind in self.kind_of_node)
