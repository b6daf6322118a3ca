"""Who sends how much to whom in a collective, by algorithm: what becomes load on links.

A pattern is messages (source, target, share): over the whole collective, `share` bytes go from one
rank to another for each byte of its size, as nccl-tests counts sizes. Where several adapters of a
node take part, NCCL lays a ring or tree over each; here every local rank of a node leads one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.program import Int64

Float64 = npt.NDArray[np.float64]


class Messages(NamedTuple):
    """Messages between ranks, as columns."""

    source: Int64
    target: Int64
    share: Float64


class Layout(NamedTuple):
    """The ranks of a group, and where they lie."""

    ranks: Int64
    """In order of rank."""
    by_node: Int64
    """(nodes, ranks a node): nodes in the order of their first ranks, as NCCL counts them; inside a
    node in the order of devices, which NCCL's search of a node does not ask ranks for."""


def layout(ranks: Int64, per_node: int, placement: Int64 | None = None) -> Layout:
    """Return the layout of a group in a cluster that uses `per_node` devices of each node.

    `placement` is the device of each rank of the cluster; rank r is on device r when absent. Where
    nodes hold unequal numbers of the group's ranks, each rank counts as a node of its own.
    """
    ordered = np.sort(ranks)
    device = ordered if placement is None else placement[ordered]
    _, first, node, count = np.unique(
        device // per_node, return_index=True, return_inverse=True, return_counts=True
    )
    width = int(count[0]) if (count == count[0]).all() else 1
    by_node = ordered[np.lexsort((device, first[node.reshape(-1)]))]
    return Layout(ordered, by_node.reshape(-1, width))


def _join(*parts: tuple[Int64, Int64, Float64 | float]) -> Messages:
    columns = [
        (s.ravel(), t.ravel(), np.broadcast_to(np.asarray(share, np.float64), s.shape).ravel())
        for s, t, share in parts
    ]
    source, target, shares = zip(*columns, strict=True)
    return Messages(np.concatenate(source), np.concatenate(target), np.concatenate(shares))


def rings(at: Layout) -> Int64:
    """Return (rings, ranks) orders: one ring for each local rank, which leads in every other node.

    A ring enters a node where it left the one before, so that it stays on its rail.
    """
    nodes, local = at.by_node.shape
    if nodes == 1:
        return at.by_node
    step = np.arange(local)
    orders = []
    for lead in range(local):
        forward = (lead + step) % local
        rows = [at.by_node[n, forward if n % 2 == 0 else forward[::-1]] for n in range(nodes)]
        orders.append(np.concatenate(rows))
    return np.array(orders)


def ring(at: Layout, steps: float) -> Messages:
    """Send `steps` of n parts of the size from each rank to the next, over all rings."""
    orders = rings(at)
    share = steps / orders.shape[1] / len(orders)
    return _join((orders, np.roll(orders, -1, axis=1), share))


def chain(at: Layout, _steps: float = 0.0) -> Messages:
    """Send everything along each ring from its first rank to its last: broadcast and reduce."""
    orders = rings(at)
    return _join((orders[:, :-1], orders[:, 1:], 1.0 / len(orders)))


def tree_parents(nodes: int) -> tuple[list[int], list[int]]:
    """Return the parent of each node in the two trees of a double binary tree, -1 at a root.

    The first is NCCL's in-order binary tree (`ncclGetBtree`); the second mirrors it, or shifts it
    by one where the number of nodes is odd, so that inner nodes of one are leaves of the other.
    """
    first = [_parent(node, nodes) for node in range(nodes)]
    second = [-1] * nodes
    for node in range(nodes):
        if nodes % 2 == 0:
            other = first[nodes - 1 - node]
            second[node] = -1 if other < 0 else nodes - 1 - other
        else:
            other = first[(node - 1) % nodes]
            second[node] = -1 if other < 0 else (other + 1) % nodes
    return first, second


def _parent(node: int, nodes: int) -> int:
    if node == 0:
        return -1
    bit = node & -node
    up = (node ^ bit) | (bit << 1)
    return node ^ bit if up >= nodes else up


def tree(at: Layout, _steps: float = 0.0) -> Messages:
    """Send half of the size up and down each of two trees of nodes, along a chain in each node."""
    local = at.by_node.shape[1]
    parts: list[tuple[Int64, Int64, Float64 | float]] = []
    if local > 1:
        down, up = at.by_node[:, :-1], at.by_node[:, 1:]
        parts += [(down, up, 1.0), (up, down, 1.0)]
    parts += _between(at, 0.5)
    return _join(*parts)


def _between(at: Layout, share: float) -> list[tuple[Int64, Int64, Float64 | float]]:
    """Return messages up and down both trees of nodes, divided over the local ranks."""
    nodes, local = at.by_node.shape
    parts: list[tuple[Int64, Int64, Float64 | float]] = []
    for parents in tree_parents(nodes):
        child = np.array([n for n in range(nodes) if parents[n] >= 0], np.int64)
        parent = np.array([p for p in parents if p >= 0], np.int64)
        a, b = at.by_node[child], at.by_node[parent]
        parts += [(a, b, share / local), (b, a, share / local)]
    return parts


def in_switch(at: Layout, _steps: float = 0.0) -> Messages:
    """Send everything from each rank to its node's switch, which sums, and back once.

    Between nodes the sums go up and down two trees.
    """
    nodes = len(at.by_node)
    parts: list[tuple[Int64, Int64, Float64 | float]] = [
        (at.by_node, np.roll(at.by_node, -1, axis=1), 1.0)
    ]
    return _join(*parts, *(_between(at, 0.5) if nodes > 1 else []))


def pairwise(at: Layout, _steps: float = 0.0) -> Messages:
    """Send a part from each rank to each other."""
    ranks, n = at.ranks, len(at.ranks)
    source = np.repeat(ranks, n - 1)
    target = np.concatenate([np.roll(ranks, -k)[:, None] for k in range(1, n)], axis=1).ravel()
    return _join((source, target, 1.0 / n))


def star(at: Layout, _steps: float = 0.0) -> Messages:
    """Send a part from the first rank to each other: scatter; gather is its reverse."""
    others = at.ranks[1:]
    return _join((np.repeat(at.ranks[:1], len(others)), others, 1.0 / len(at.ranks)))


def parameter_server(at: Layout, servers: float) -> Messages:
    """Push a part from each rank to each of the first `servers` ranks, and pull as much back."""
    ranks, count = at.ranks, int(servers)
    worker, server = np.repeat(ranks, count), np.tile(ranks[:count], len(ranks))
    apart = worker != server
    worker, server = worker[apart], server[apart]
    return _join((worker, server, 1.0 / count), (server, worker, 1.0 / count))


def hierarchical(at: Layout, _steps: float = 0.0) -> Messages:
    """Sum over each node's ring, then over rings of one rank a node, then spread in each node."""
    nodes, local = at.by_node.shape
    inside, across = 2 * (local - 1) / local, 2 * (nodes - 1) / nodes / local
    parts: list[tuple[Int64, Int64, Float64 | float]] = [
        (at.by_node, np.roll(at.by_node, -1, axis=0), across)
    ]
    if local > 1:
        parts.append((at.by_node, np.roll(at.by_node, -1, axis=1), inside))
    return _join(*parts)


def halving_doubling(at: Layout, _steps: float = 0.0) -> Messages:
    """Exchange halves, quarters, ... with partners ever further away, and back."""
    ranks, n = at.ranks, len(at.ranks)
    parts: list[tuple[Int64, Int64, Float64 | float]] = []
    distance, share = 1, 0.5
    while distance < n:
        partner = np.arange(n) ^ distance
        has = partner < n
        parts.append((ranks[has], ranks[partner[has]], 2 * share))
        distance, share = 2 * distance, share / 2
    return _join(*parts)


def doubling(at: Layout, _steps: float = 0.0) -> Messages:
    """Send what is held to partners 1, 2, 4, ... ranks on: PAT's aggregated trees."""
    ranks, n = at.ranks, len(at.ranks)
    parts: list[tuple[Int64, Int64, Float64 | float]] = []
    distance = 1
    while distance < n:
        held = min(distance, n - distance)
        parts.append((ranks, np.roll(ranks, -distance), held / n))
        distance *= 2
    return _join(*parts)


def shift(at: Layout, _steps: float = 0.0) -> Messages:
    """Send everything from each rank to the next one, and from the last to the first."""
    return _join((at.ranks, np.roll(at.ranks, -1), 1.0))


def send(ranks: Int64, _servers: int = 0) -> Messages:
    """Send everything from the first rank to the second."""
    return Messages(ranks[:1], ranks[1:], np.ones(1))


def push(ranks: Int64, servers: int) -> Messages:
    """Push a part from the first rank to each of the lowest `servers` ranks but itself."""
    others = np.sort(ranks)[:servers]
    others = others[others != ranks[0]]
    return _join((np.repeat(ranks[:1], len(others)), others, 1.0 / servers))


def pull(ranks: Int64, servers: int) -> Messages:
    """Pull to the first rank what `push` takes from it."""
    pushed = push(ranks, servers)
    return Messages(pushed.target, pushed.source, pushed.share)


PATTERNS: Mapping[str, Callable[[Layout, float], Messages]] = {
    "RING": ring,
    "CHAIN": chain,
    "TREE": tree,
    "NVLS": in_switch,
    "NVLS_TREE": in_switch,
    "PAT": doubling,
    "PAIRWISE": pairwise,
    "SHIFT": shift,
    "STAR": star,
    "PARAMETER_SERVER": parameter_server,
    "HIERARCHICAL": hierarchical,
    "HALVING_DOUBLING": halving_doubling,
}
"""Messages by algorithm, of a layout and the steps of a ring or the number of parameter servers.

Rings of broadcast and reduce are chains.
"""

ORDERED: Mapping[str, Callable[[Int64, int], Messages]] = {
    "SEND": send,
    "PUSH": push,
    "PULL": pull,
}
"""Messages of flows whose first rank is apart, of the ranks in order and the number of servers."""
