"""Closed forms of collectives over an alpha-beta network: seconds a message, seconds a byte.

Thakur, Rabenseifner & Gropp, Optimization of Collective Communication Operations in MPICH, 2005;
the ring is Patarasuk & Yuan, 2009; parameter servers are Li et al., Scaling Distributed Machine
Learning with the Parameter Server, 2014.
"""

from __future__ import annotations


def ring_all_reduce_seconds(size: float, n: int, alpha: float, beta: float) -> float:
    """Seconds to all-reduce `size` bytes over `n` ranks in 2(n-1) rounds of size/n bytes."""
    return 2 * (n - 1) * (alpha + size / n * beta)


def halving_doubling_seconds(size: float, n: int, alpha: float, beta: float) -> float:
    """Seconds of recursive halving, then doubling: 2 log2(n) rounds, 2(n-1)/n of the bytes.

    Where n is no power of two, the ranks past it hand their message to a neighbour first and get
    the result last: two rounds more of the full size.
    """
    levels = n.bit_length() - 1
    power: int = 2**levels
    seconds = 2 * levels * alpha + 2 * (power - 1) / power * size * beta
    return seconds if power == n else seconds + 2 * (alpha + size * beta)


def hierarchical_seconds(
    size: float,
    nodes: int,
    per_node: int,
    *,
    intra: tuple[float, float],
    inter: tuple[float, float],
) -> float:
    """Seconds of an all-reduce in three phases: reduce-scatter, all-reduce, all-gather.

    Args:
        size: bytes of the buffer.
        nodes: nodes of the group.
        per_node: its ranks on each of them.
        intra: alpha and beta of a rank within its node; two of the phases.
        inter: alpha and beta of a rank to other nodes; all-reduces size/per_node bytes.
    """
    alpha, beta = intra
    inside = (per_node - 1) * (alpha + size / per_node * beta) if per_node > 1 else 0.0
    between = ring_all_reduce_seconds(size / per_node, nodes, *inter)
    return 2 * inside + between


def all_to_all_seconds(
    size: float, ranks: int, per_node: int, *, intra: float, inter: float
) -> float:
    """Seconds of the bytes of a pairwise all-to-all, in and between nodes at the same time.

    Args:
        size: bytes that a rank sends in all, its own part included.
        ranks: ranks of the group.
        per_node: ranks that share a node.
        intra: bytes/s of a rank within its node.
        inter: bytes/s of a rank to other nodes.
    """
    near = size * (per_node - 1) / ranks / intra
    return max(near, size * (ranks - per_node) / ranks / inter)


def push_seconds(
    size: float,
    ranks: int,
    per_node: int,
    servers: int,
    *,
    alpha: float,
    intra: float,
    inter: float,
) -> float:
    """Seconds to push `size` bytes from every rank to servers at once; a pull takes as long.

    A server's part is size/servers. It takes that from each other rank in the push and sends it to
    each in the pull, so its links carry (ranks - 1) parts a phase: of all ends it is the busiest,
    for a worker sends at most `servers` parts, and no more of them over a link than a server on it
    takes in. The textbook's 2 x N x size / bandwidth has the server apart from its N workers; here
    it is one of them, and its own gradients cross no link: 2 x (N - 1). With a server on every rank
    it is the ring's 2 x (N - 1) / N. Links carry both directions at once, but a rank's pull waits
    for its push.

    It is also what one rank takes when the links of a server are divided evenly among those who
    push through them: its part at 1/(ranks - per_node) of the adapter.

    Args:
        size: bytes that each rank pushes, and pulls.
        ranks: ranks of the group, servers among them.
        per_node: ranks that share a node.
        servers: ranks that are servers too.
        alpha: seconds of one message; the messages of a phase are under way together.
        intra: bytes/s of a rank within its node.
        inter: bytes/s of a rank to other nodes.
    """
    part = size / servers
    return alpha + max((per_node - 1) * part / intra, (ranks - per_node) * part / inter)
