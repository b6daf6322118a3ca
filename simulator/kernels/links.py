"""Which flows are on which links: lists in arrays, so that only what is touched is looked at."""

from __future__ import annotations

from simulator.kernels.jit import prepared_numba

njit = prepared_numba().njit


@njit(cache=True)
def enter_links(f, d, offset, links, first, pool, nodes, heads):  # type: ignore[no-untyped-def]
    """Put flow `f` of demand `d` on the lists of the links that it uses.

    `nodes` are rows (flow, link, next of the flow, next of the link, previous of the link), `first`
    the first node of each flow, `heads` that of each link, and `pool` (next free node, free nodes).
    """
    first[f] = -1
    for x in range(offset[d], offset[d + 1]):
        node = pool[0]
        pool[0] = nodes[node, 2]
        pool[1] -= 1
        link = links[x]
        nodes[node, 0] = f
        nodes[node, 1] = link
        nodes[node, 2] = first[f]
        nodes[node, 3] = heads[link]
        nodes[node, 4] = -1
        if heads[link] >= 0:
            nodes[heads[link], 4] = node
        heads[link] = node
        first[f] = node


@njit(cache=True)
def leave_links(f, first, nodes, heads):  # type: ignore[no-untyped-def]
    """Take flow `f` off the lists of its links; its nodes stay its own until they are freed."""
    node = first[f]
    while node >= 0:
        if nodes[node, 4] >= 0:
            nodes[nodes[node, 4], 3] = nodes[node, 3]
        else:
            heads[nodes[node, 1]] = nodes[node, 3]
        if nodes[node, 3] >= 0:
            nodes[nodes[node, 3], 4] = nodes[node, 4]
        node = nodes[node, 2]


@njit(cache=True)
def free_nodes(f, first, pool, nodes):  # type: ignore[no-untyped-def]
    """Give the nodes of flow `f` back to the pool."""
    node = first[f]
    while node >= 0:
        after = nodes[node, 2]
        nodes[node, 2] = pool[0]
        pool[0] = node
        pool[1] += 1
        node = after
    first[f] = -1


@njit(cache=True)
def component(f, seen, found, first, nodes, heads, walked):  # type: ignore[no-untyped-def]
    """Fill `found` with the flows that share links with `f`, directly or through others.

    `seen` marks flows that some call of this tick has found. `walked` is scratch, one a link, all
    zero and left so: a link on which many flows meet is looked at once.
    """
    count = 1
    found[0] = f
    seen[f] = True
    at = 0
    while at < count:
        node = first[found[at]]
        at += 1
        while node >= 0:
            link = nodes[node, 1]
            if walked[link] == 0:
                walked[link] = 1
                other = heads[link]
                while other >= 0:
                    g = nodes[other, 0]
                    if not seen[g]:
                        seen[g] = True
                        found[count] = g
                        count += 1
                    other = nodes[other, 3]
            node = nodes[node, 2]
    for k in range(count):
        node = first[found[k]]
        while node >= 0:
            walked[nodes[node, 1]] = 0
            node = nodes[node, 2]
    return count


@njit(cache=True)
def sort(flows):  # type: ignore[no-untyped-def]
    """Sort a few numbers in place."""
    if len(flows) > 48:
        flows.sort()
        return
    for k in range(1, len(flows)):
        f = flows[k]
        at = k
        while at > 0 and flows[at - 1] > f:
            flows[at] = flows[at - 1]
            at -= 1
        flows[at] = f
