"""The fabric of a cluster: every link with its rate and latency, and the route of any message.

Routes are hierarchical. Inside a node, and from a device to its adapter, they are searched on one
node's links, once for all nodes alike; between adapters on the switches alone; so a cluster of
16,384 devices needs a search for each leaf, not for each device. Vertices are named `node3/gpu5`,
`node3/nic2`, `leaf4`, links `node3/nic2>leaf4`. networkx enters for `graph` only, to draw.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.describe.cluster import Cluster
from simulator.errors import DescriptionError, suggestion
from simulator.hardware.routing import Hash, Paths, Router, end_to_end, mixed
from simulator.hardware.torus import Torus
from simulator.hardware.trunks import Trunks, trunks
from simulator.hardware.wiring import Floats, Ints, Links, adapter_of, grid_pairs, node_links

if TYPE_CHECKING:
    import networkx

SPREAD: Mapping[str, Callable[[Ints, Ints, Ints], Hash]] = {
    "shortest": lambda source, target, key: np.zeros(len(source), np.uint64),
    "static": lambda source, target, key: target.astype(np.uint64),
    "ecmp": lambda source, target, key: mixed(key, source, target),
}
"""The number that chooses among equal routes, from source and target device and key."""


class Route(NamedTuple):
    """The links of one message, in order, and its latency in seconds."""

    links: npt.NDArray[np.int32]
    latency: float


class Routes(NamedTuple):
    """Routes of many messages: links of route i are `links[offset[i]:offset[i + 1]]`."""

    offset: Ints
    links: npt.NDArray[np.int32]
    latency: Floats
    """Seconds of each route."""


@dataclass(frozen=True, eq=False)
class Fabric:
    """Links as columns, and the routes over them; see `build`."""

    cluster: Cluster
    inside: tuple[str, ...]
    """Vertices of one node; those of node n are numbered from n * len(inside)."""
    node_wires: Links
    """Links of one node; those of node n are numbered from n times their number."""
    trunks: Trunks
    tail: Ints
    head: Ints
    capacity: Floats
    """Bytes/s of each link: datasheet rate x efficiency x what degradation leaves; 0 if failed."""
    latency: Floats
    """Seconds of each link."""
    port: Ints
    """Link from each adapter to its switch; the next link leads back. -1 where it has none."""
    slot: Ints
    """Device slot (node * devices in use + device) of each rank."""

    @cached_property
    def vertices(self) -> tuple[str, ...]:
        """Names of all vertices by number."""
        nodes = range(self.cluster.num_nodes)
        return (*(f"node{n}/{name}" for n in nodes for name in self.inside), *self.trunks.names)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of all links by number."""
        ends, tails, heads = self.vertices, self.tail.tolist(), self.head.tolist()
        return tuple(f"{ends[a]}>{ends[b]}" for a, b in zip(tails, heads, strict=True))

    def links_named(self, name: str) -> Ints:
        """Return the links of `a>b`, of both directions `a<>b`, or of a vertex.

        Raises:
            DescriptionError: when there are none.
        """
        ends = name.replace("<>", ">").split(">")
        for end in ends:
            if end not in self._number:
                hint = suggestion(end, self._number)
                raise DescriptionError(f"network: no vertex {end!r} in {name!r}{hint}")
        at = [self._number[end] for end in ends]
        if len(at) == 1:
            return np.flatnonzero((self.tail == at[0]) | (self.head == at[0]))
        found = (self.tail == at[0]) & (self.head == at[1])
        if "<>" in name:
            found |= (self.tail == at[1]) & (self.head == at[0])
        if len(at) > 2 or not found.any():
            near = [self.vertices[v] for v in self.head[self.tail == at[0]][:8].tolist()]
            raise DescriptionError(
                f"network: no link {name!r}; links of {ends[0]} lead to {', '.join(near)}"
            )
        return np.flatnonzero(found)

    @cached_property
    def _number(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.vertices)}

    def vertex(self, rank: int) -> str:
        """Return the name of the device of a rank."""
        node, device = divmod(int(self.slot[rank]), self.cluster.ranks_per_node)
        return f"node{node}/gpu{device}"

    def route(self, source: int, target: int, key: int = 0) -> Route:
        """Return the route of one message between two ranks; see `routes`."""
        return self._route(source, target, key)

    @cached_property
    def _route(self) -> Callable[[int, int, int], Route]:
        @lru_cache(maxsize=65536)
        def one(source: int, target: int, key: int) -> Route:
            found = self.routes(np.array([source]), np.array([target]), key)
            return Route(found.links, float(found.latency[0]))

        return one

    def routes(self, source: Ints, target: Ints, key: int | Ints = 0) -> Routes:
        """Return the route from each source rank to each target rank.

        `key` tells flows of the same pair apart (queue pairs), for ECMP. A rank reaches itself
        over no link.

        Raises:
            DescriptionError: when a pair is not connected, with what has failed.
        """
        source, target = np.asarray(source, np.int64), np.asarray(target, np.int64)
        keys = np.broadcast_to(np.asarray(key, np.int64), source.shape)
        a, b = self.slot[source], self.slot[target]
        pick = SPREAD[self.cluster.network.routing](a, b, keys)
        paths, lost = self._between(a, b, pick)
        if len(lost):
            self._refuse(int(source[lost[0]]), int(target[lost[0]]), len(lost))
        offset = np.concatenate([[0], np.cumsum(paths.length)])
        owner = np.repeat(np.arange(len(source)), paths.length)
        seconds: Floats = np.zeros(len(source))
        np.add.at(seconds, owner, self.latency[paths.links])
        return Routes(offset, paths.links.astype(np.int32), seconds)

    def _between(self, a: Ints, b: Ints, pick: Hash) -> tuple[Paths, Ints]:
        """Return the routes between device slots, and the pairs that have none."""
        if self._torus is not None:
            return self._torus.paths(a, b, pick), np.zeros(0, np.int64)
        if self.cluster.network.layout == "torus":
            return self._whole.paths(self._device(a), self._device(b), pick)
        across = a // self.cluster.ranks_per_node != b // self.cluster.ranks_per_node
        near, far = np.flatnonzero(~across), np.flatnonzero(across)
        within, lost_near = self._local(self._device(a[near]), self._device(b[near]))
        out, into = self.adapter[a[far]], self.adapter[b[far]]
        trunk, lost_trunk = self._whole.paths(self._home(out), self._home(into), pick[far])
        if len(lost_trunk):  # rails that never meet: leave by the target's rail, as NCCL's PXN does
            count = self.cluster.node.nic.count
            out[lost_trunk] = out[lost_trunk] // count * count + into[lost_trunk] % count
            trunk, lost_trunk = self._whole.paths(self._home(out), self._home(into), pick[far])
        first, lost_first = self._local(self._device(a[far]), self._adapter(out))
        last, lost_last = self._local(self._adapter(into), self._device(b[far]))
        ports = (self._port(out, 0), self._port(into, 1))
        beyond = end_to_end([first, ports[0], trunk, ports[1], last])
        row = np.empty(len(a), np.int64)
        row[np.concatenate([near, far])] = np.arange(len(a))
        both = Paths(
            np.concatenate([within.length, beyond.length]),
            np.concatenate([within.links, beyond.links]),
        )
        lost = [near[lost_near], *(far[rows] for rows in (lost_first, lost_trunk, lost_last))]
        return both.take(row), np.unique(np.concatenate(lost))

    def _device(self, slot: Ints) -> Ints:
        node, device = np.divmod(slot, self.cluster.ranks_per_node)
        return node * len(self.inside) + device

    def _adapter(self, adapter: Ints) -> Ints:
        count = self.cluster.node.nic.count
        node, nth = np.divmod(adapter, count)
        return (node + 1) * len(self.inside) - count + nth

    def _home(self, adapter: Ints) -> Ints:
        """Return the vertex at which the network begins for an adapter."""
        at = self.port[adapter]
        return np.where(at < 0, self._adapter(adapter), self.head[np.maximum(at, 0)])

    def _port(self, adapter: Ints, back: int) -> Paths:
        at = self.port[adapter]
        return Paths((at >= 0).astype(np.int64), at[at >= 0] + back)

    @cached_property
    def adapter(self) -> Ints:
        """Adapter of each device slot: its own, or the next of its node that is not cut off."""
        cluster, count = self.cluster, self.cluster.node.nic.count
        node = np.repeat(np.arange(cluster.num_nodes), cluster.ranks_per_node)
        own = node * count + np.tile(adapter_of(cluster), cluster.num_nodes)
        down = np.flatnonzero(self.capacity == 0)
        if not len(down):
            return own
        every = np.arange(cluster.num_nodes * count)
        vertex, cut = self._adapter(every), np.zeros(len(every), bool)
        cut[self.port >= 0] = np.isin(self.port[self.port >= 0], down)
        cut[self.port >= 0] |= np.isin(self.port[self.port >= 0] + 1, down)
        for ends in (self.tail, self.head):  # nothing leads to it, or away from it
            cut |= ~np.isin(vertex, ends[(self.capacity > 0) & self._inner])
        chosen = own
        for turn in range(1, count):
            chosen = np.where(cut[chosen], own // count * count + (own + turn) % count, chosen)
        return chosen

    @cached_property
    def _inner(self) -> npt.NDArray[np.bool_]:
        size = len(self.node_wires.tail) * self.cluster.num_nodes
        return np.arange(len(self.tail)) < size

    @cached_property
    def of_nodes(self) -> npt.NDArray[np.bool_]:
        """Whether a link is a node's own or an adapter's, not between switches; all of a torus."""
        if self.cluster.network.layout == "torus":
            return np.ones(len(self.tail), bool)
        own = self._inner.copy()
        own[self.port[self.port >= 0]] = own[self.port[self.port >= 0] + 1] = True
        return own

    def _local(self, a: Ints, b: Ints) -> tuple[Paths, Ints]:
        """Return routes inside nodes between vertices of the same node, each by its first."""
        size, wires = len(self.inside), len(self.node_wires.tail)
        node = a // size
        plan = np.where(np.isin(node, self._damaged), node, -1)
        key = ((plan + 1) * size + a % size) * size + b % size
        unique, row = np.unique(key, return_inverse=True)
        source, target = unique // size % size, unique % size
        none = np.zeros(len(unique), np.uint64)
        count, lost, parts = np.zeros(len(unique), np.int64), np.zeros(len(unique), bool), []
        of = unique // (size * size) - 1
        for which in np.unique(of).tolist():  # sorted, as `unique` is
            rows = np.flatnonzero(of == which)
            found, without = self._router(which).paths(source[rows], target[rows], none[rows])
            count[rows] = found.length
            lost[rows[without]] = True
            parts.append(found.links)
        links = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        paths = Paths(count, links).take(row)
        shifted = paths.links + np.repeat(node * wires, paths.length)
        return Paths(paths.length, shifted), np.flatnonzero(lost[row])

    @cached_property
    def _damaged(self) -> Ints:
        """Nodes inside which a link has failed."""
        down = np.flatnonzero((self.capacity == 0) & self._inner)
        return np.unique(down // max(1, len(self.node_wires.tail)))

    @cached_property
    def _routers(self) -> dict[int, Router]:
        return {}

    def _router(self, node: int) -> Router:
        """Return the router of one damaged node, or with -1 of all others."""
        if node not in self._routers:
            tail, head = self.node_wires.tail, self.node_wires.head
            links = np.arange(len(tail))
            if node >= 0:
                links = links[self.capacity[node * len(tail) + links] > 0]
            adapters = len(self.inside) - 1 - np.arange(self.cluster.node.nic.count)
            self._routers[node] = Router(tail, head, links, stubs=adapters)
        return self._routers[node]

    @cached_property
    def _whole(self) -> Router:
        """The router of the switches; of a torus, of all its devices."""
        alive = self.capacity > 0
        alive &= ~self._inner
        alive[np.concatenate([self.port[self.port >= 0], self.port[self.port >= 0] + 1])] = False
        return Router(self.tail, self.head, np.flatnonzero(alive))

    @cached_property
    def _torus(self) -> Torus | None:
        network = self.cluster.network
        if network.layout != "torus" or network.failed:
            return None
        return Torus(network.shape, *grid_pairs(network.shape, wrap=True), first_link=0)

    @property
    def searches(self) -> int:
        """Searches made so far, over all routers."""
        return self._whole.searches + sum(r.searches for r in self._routers.values())

    def _refuse(self, source: int, target: int, count: int) -> None:
        failed = self.cluster.network.failed
        why = f"; failed: {', '.join(failed)}" if failed else ""
        more = f" (and {count - 1} other pairs)" if count > 1 else ""
        raise DescriptionError(
            f"network: no route from rank {source} ({self.vertex(source)}) to rank {target} "
            f"({self.vertex(target)}){more}{why}"
        )

    def graph(self) -> networkx.DiGraph[str]:
        """Return the fabric as a networkx graph: capacity and latency on each link."""
        import networkx

        graph: networkx.DiGraph[str] = networkx.DiGraph()
        graph.add_nodes_from(self.vertices)
        columns = (self.tail.tolist(), self.head.tolist(), self.capacity.tolist(),
                   self.latency.tolist())  # fmt: skip
        for tail, head, capacity, latency in zip(*columns, strict=True):
            if capacity > 0:
                graph.add_edge(
                    self.vertices[tail], self.vertices[head], capacity=capacity, latency=latency
                )
        return graph


def build(cluster: Cluster, placement: npt.ArrayLike | None = None) -> Fabric:
    """Return the fabric of a cluster.

    Args:
        cluster: the nodes and their network.
        placement: device slot of each rank, a permutation; rank r is on device r % devices in
            use of node r // devices in use when absent.

    Raises:
        DescriptionError: when nodes are of several kinds, when names of failed or degraded links
            are unknown, when the ranks are not connected, or when `placement` is no permutation.
    """
    if cluster.is_mixed:
        raise DescriptionError(
            "cluster.nodes: links between nodes of several kinds "
            f"({', '.join(node.name for node in cluster.kinds)}) are not modelled; they have no "
            'fabric to show, and run.network must be "alpha-beta"'
        )
    fabric = _damaged(_intact(cluster, _slots(cluster, placement)))
    drawn = "graph" in (cluster.network.layout, cluster.node.layout)
    if drawn or cluster.network.failed:  # who reaches rank 0 and is reached from it reaches all
        others, first = np.arange(cluster.world_size), np.zeros(cluster.world_size, np.int64)
        fabric.routes(others, first)
        fabric.routes(first, others)
    return fabric


def _slots(cluster: Cluster, placement: npt.ArrayLike | None) -> Ints:
    if placement is None:
        return np.arange(cluster.world_size)
    slots = np.asarray(placement, np.int64)
    if not np.array_equal(np.sort(slots.reshape(-1)), np.arange(cluster.world_size)):
        raise DescriptionError(
            f"placement: must hold each of the slots 0 to {cluster.world_size - 1} once"
        )
    return slots.reshape(-1)


def _intact(cluster: Cluster, slot: Ints) -> Fabric:
    """Return the fabric as it was built, nothing failed."""
    nodes, nic = cluster.num_nodes, cluster.node.nic
    if cluster.network.layout == "torus":
        inside: tuple[str, ...] = tuple(f"gpu{i}" for i in range(cluster.ranks_per_node))
        empty = np.zeros(0, np.int64)
        wires, port = Links(empty, empty, np.zeros(0), np.zeros(0)), empty
        link = cluster.node.link
        parts = [Links.both_ways(*grid_pairs(cluster.network.shape, wrap=True),
                                 link.pair_bandwidth * link.efficiency, link.latency)]  # fmt: skip
        return Fabric(cluster, inside, wires, trunks(cluster), *Links.joined(parts), port, slot)
    inside, wires = node_links(cluster)
    size, count = len(inside), len(wires.tail)
    shift = np.repeat(np.arange(nodes) * size, count)
    parts = [Links(np.tile(wires.tail, nodes) + shift, np.tile(wires.head, nodes) + shift,
                   np.tile(wires.capacity, nodes), np.tile(wires.latency, nodes))]  # fmt: skip
    net, total = trunks(cluster), nodes * nic.count
    every = np.arange(total)
    number = np.concatenate([
        every // nic.count * size + size - nic.count + every % nic.count,
        nodes * size + np.arange(len(net.names)),
    ])  # fmt: skip
    port = np.full(total, -1)
    if not np.array_equal(net.home, every):
        port = nodes * count + 2 * every
        rate = nic.bandwidth * nic.efficiency
        alpha = max(0.0, nic.latency / 2 - _to_adapter(cluster, inside, wires))
        parts.append(Links.both_ways(number[every], number[net.home], rate, alpha))
    parts.append(Links.both_ways(number[net.a], number[net.b], net.capacity, net.latency))
    return Fabric(cluster, inside, wires, net, *Links.joined(parts), port, slot)


def _to_adapter(cluster: Cluster, inside: tuple[str, ...], wires: Links) -> float:
    """Return the seconds from the first device to its adapter, a part of the NIC's latency."""
    adapters = len(inside) - cluster.node.nic.count
    own = np.array([adapters + int(adapter_of(cluster)[0])])
    router = Router(wires.tail, wires.head, np.arange(len(wires.tail)))
    found, _ = router.paths(np.array([0]), own, np.zeros(1, np.uint64))
    return float(wires.latency[found.links].sum())


def _damaged(fabric: Fabric) -> Fabric:
    """Lower the rates of degraded links, and take those of failed ones."""
    network = fabric.cluster.network
    for name, share in network.degraded.items():
        fabric.capacity[fabric.links_named(name)] *= share
    for name in network.failed:
        fabric.capacity[fabric.links_named(name)] = 0.0
    return fabric
