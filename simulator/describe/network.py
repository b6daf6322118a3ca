"""What joins nodes to nodes: the shape of the network, and edges drawn by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

from simulator.describe.fields import BytesPerSecond, Count, Fraction, Range, Seconds, validate
from simulator.errors import DescriptionError


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """A two-way link of a graph drawn by hand."""

    a: str
    b: str
    count: Count = 1
    """Parallel links; a message is spread over all of them."""
    bandwidth: BytesPerSecond | None = None
    """Of one link per direction; the pair bandwidth of the node's link, or its NIC's, if absent."""
    efficiency: Fraction | None = None
    """Share of the rate that is reached; that of the node's link, or of its NIC, when absent."""
    latency: Seconds | None = None
    """Of a message that passes the edge; by default a path costs what Link and Nic say."""

    def __post_init__(self) -> None:
        validate(self)
        if self.a == self.b:
            raise DescriptionError(f"Edge.b: {self.b!r} is joined to itself")


def edge_problems(edges: tuple[Edge, ...]) -> Iterator[str]:
    """Name the pairs that edges join more than once."""
    seen = set()
    for edge in edges:
        pair = frozenset((edge.a, edge.b))
        if pair in seen:
            yield f"edges: {edge.a!r} and {edge.b!r} are joined twice; use count"
        seen.add(pair)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What joins the adapters of the nodes; by default one switch that never blocks."""

    layout: Literal["crossbar", "rail", "fat-tree", "pods", "dragonfly", "torus", "graph"] = (
        "crossbar"
    )
    """`rail`: adapter i of each node on leaf i of its pod, spines above. `fat-tree`: k-ary, three
    tiers. `pods`: all adapters of a node on its pod's leaf, spines above. `dragonfly`: groups of
    routers, all pairs of groups joined. `torus`: the devices' own links. `graph`: `edges`."""
    radix: Count = 64
    """Ports of a switch (k of a fat tree)."""
    oversubscription: Annotated[float, Range(1)] = 1.0
    """What the adapters of a switch may send over what its uplinks carry (of a dragonfly: over
    what its links to other groups carry)."""
    spines: Count | None = None
    """Of `rail` and `pods`; as many as a leaf has uplinks of an adapter's rate when absent. A
    spine stands for a plane with a port for each leaf."""
    shape: tuple[Count, ...] = ()
    """Of `torus`: devices along each dimension; an extent of 2 is one link, not two."""
    edges: tuple[Edge, ...] = ()
    """Of `graph`: between `node3` (each of its adapters), `node3/nic0` and switches of any name."""
    hop_latency: Seconds = 0.0
    """Added by each link between two switches; `Nic.latency` covers a path over one switch."""
    routing: Literal["shortest", "ecmp", "static"] = "ecmp"
    """Which of equally short routes is taken between nodes: always the first; by hash of source,
    destination and a key; by destination alone, as InfiniBand's forwarding tables (d mod k)."""
    degraded: dict[str, Fraction] = field(default_factory=dict)
    """Share of its rate that is left to a link `leaf0>spine1`, to both directions
    `leaf0<>spine1`, or to all links of a vertex `node3/nic2`."""
    failed: tuple[str, ...] = ()
    """Links and vertices that are down, named as in `degraded`."""

    def __post_init__(self) -> None:
        validate(self)
        problems = [f"Network.{p}" for p in edge_problems(self.edges)]
        for name, layout in (("shape", "torus"), ("edges", "graph")):
            if bool(getattr(self, name)) != (self.layout == layout):
                need = "needs" if self.layout == layout else "has no"
                problems.append(f"Network.{name}: layout {self.layout!r} {need} {name}")
        if self.spines is not None and self.layout not in ("rail", "pods"):
            problems.append(f"Network.spines: layout {self.layout!r} has no spines")
        if self.layout == "fat-tree" and self.radix % 2:
            problems.append(f"Network.radix: {self.radix} is odd; half the ports of a switch go up")
        if self.layout == "dragonfly" and self.radix < 3:
            problems.append(f"Network.radix: {self.radix} is less than the 3 a dragonfly needs")
        if problems:
            raise DescriptionError(problems)

    def __hash__(self) -> int:
        return hash((self.layout, self.radix, self.shape, tuple(self.degraded.items())))

    @property
    def leaf_ports(self) -> int:
        """Ports of a leaf that adapters use, so that uplinks of the same rate take the rest."""
        share = self.oversubscription / (1 + self.oversubscription)
        return max(1, math.floor(self.radix * share + 1e-9))

    @property
    def dragonfly_shape(self) -> tuple[int, int, int]:
        """Adapters a router, routers a group, links a router to other groups: p, 2p, p.

        The balanced dragonfly of Kim, Dally, Scott and Abts (ISCA 2008); radix 4p - 1.
        """
        p = (self.radix + 1) // 4
        return p, 2 * p, p

    def complaint(self, num_nodes: int, adapters: int, devices: int) -> str | None:
        """Say why nodes with so many adapters and used devices each do not fit, if they do not."""
        total = num_nodes * adapters
        if self.layout == "torus" and math.prod(self.shape) != num_nodes * devices:
            return (
                f"network.shape: {' x '.join(map(str, self.shape))} = {math.prod(self.shape)} "
                f"devices, but the cluster uses {num_nodes} x {devices} = {num_nodes * devices}"
            )
        if self.layout == "pods" and adapters > self.leaf_ports:
            return (
                f"network.radix: {self.radix} leaves {self.leaf_ports} ports of a leaf for "
                f"adapters, but a node has {adapters}"
            )
        room = total
        if self.layout == "fat-tree":
            room = self.radix**3 // 4
        elif self.layout == "dragonfly":
            p, routers, up = self.dragonfly_shape
            room = (routers * up + 1) * routers * p
        if total > room:
            return (
                f"network.radix: a {self.layout} of {self.radix} ports holds {room} adapters, but "
                f"the cluster has {num_nodes} x {adapters} = {total}"
            )
        return None
