"""Fair sharing of links among fluid flows: weighted max-min by progressive filling.

**What is fair.** The bandwidth of a flow is that on the link which binds it when it is alone (its
`weight` bytes there for a byte of payload). All flows raise their bandwidths together from zero.
When a link is full, the flows that use it stop, and the others go on; so does a flow that reaches
its own limit. In the end no link carries more than its capacity, and each flow is stopped by its
limit or by a full link, on which no flow that stopped later has less bandwidth.

**Why it is one function.** The reference engine and the event engine call the same lines in the
same order of flows, so their rates are the same floats and their ticks equal.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def share(
    flows: Any, demand: Any, offset: Any, links: Any, coefficient: Any, weight: Any, limit: Any,
    capacity: Any, left: Any, pressure: Any, users: Any, rate: Any,
) -> None:  # fmt: skip
    """Fill `rate` (bytes/s of payload) of some flows that share links with each other only.

    Args:
        flows: numbers of the flows, in the order in which ties are broken.
        demand: of each flow, by number.
        offset: with `links` and `coefficient`, what each demand uses.
        links: see `offset`.
        coefficient: see `offset`.
        weight: of each demand.
        limit: of each demand.
        capacity: of each link.
        left: scratch, one a link: capacity that is not given away.
        pressure: scratch, one a link: bytes on it for a byte of everybody's bandwidth.
        users: scratch of int, one a link, all zero and left so: flows that have not stopped.
        rate: by number of flow; filled for `flows`.
    """
    n = len(flows)
    used = 0
    for k in range(n):
        used += offset[demand[flows[k]] + 1] - offset[demand[flows[k]]]
    touched = np.empty(used, np.int32)
    count = 0
    for k in range(n):
        d = demand[flows[k]]
        rate[flows[k]] = -1.0
        for x in range(offset[d], offset[d + 1]):
            link = links[x]
            if users[link] == 0:
                left[link] = capacity[link]
                pressure[link] = 0.0
                touched[count] = link
                count += 1
            users[link] += 1
            pressure[link] += coefficient[x] / weight[d]
    going = n
    while going > 0:
        level = np.inf
        full = -1
        for k in range(count):
            link = touched[k]
            if users[link] > 0 and left[link] / pressure[link] < level:
                level = left[link] / pressure[link]
                full = link
        for k in range(n):  # who reaches the own limit before a link is full
            d = demand[flows[k]]
            if rate[flows[k]] < 0.0 and limit[d] * weight[d] <= level:
                level = limit[d] * weight[d]
                full = -1
        level = max(level, 0.0)
        for k in range(n):
            f = flows[k]
            d = demand[f]
            if rate[f] >= 0.0:
                continue
            reaches = limit[d] * weight[d] <= level
            stops = reaches
            if not stops and full >= 0:
                for x in range(offset[d], offset[d + 1]):
                    if links[x] == full:
                        stops = True
                        break
            if stops:
                rate[f] = limit[d] if reaches else min(level / weight[d], limit[d])
                going -= 1
                for x in range(offset[d], offset[d + 1]):
                    link = links[x]
                    users[link] -= 1
                    pressure[link] -= coefficient[x] / weight[d]
                    left[link] = max(left[link] - coefficient[x] * rate[f], 0.0)


def advance(flows: Any, now: Any, remaining: Any, since: Any, rate: Any) -> None:
    """Bring `remaining` (bytes of payload) of flows, by number, from `since` up to a tick."""
    for k in range(len(flows)):
        f = flows[k]
        remaining[f] -= rate[f] * (now - since[f]) / 1e12
        since[f] = now


def foresee(flows: Any, now: Any, remaining: Any, rate: Any, finish: Any) -> None:
    """Fill `finish` with the tick at which each flow ends at its rate, a tick from now at least."""
    for k in range(len(flows)):
        f = flows[k]
        finish[f] = now + max(int(np.ceil(remaining[f] * 1e12 / rate[f])), 1)
