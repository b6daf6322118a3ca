"""The device that each rank runs on; devices in use are numbered node by node.

Device d is number d % n of node d // n, where n are in use in each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simulator.describe.cluster import Cluster
    from simulator.describe.plan import Plan


def _cyclic(rank: Any, cluster: Cluster) -> Any:
    return rank % cluster.num_nodes * cluster.ranks_per_node + rank // cluster.num_nodes


PLACEMENTS: Mapping[str, Callable[[Any, Cluster], Any]] = {
    "block": lambda rank, cluster: rank,
    "cyclic": _cyclic,
}
"""Device of a rank, or of an array of ranks, by the name of a placement."""


def kind_of_ranks(plan: Plan, cluster: Cluster) -> tuple[int, ...]:
    """Return the kind of each rank's node, an index of `Cluster.kinds`."""
    ranks = range(cluster.world_size)
    if not cluster.is_mixed:
        return (0,) * len(ranks)
    placed = plan.placement
    if isinstance(placed, str):
        placed = tuple(PLACEMENTS[placed](rank, cluster) for rank in ranks)
    kind, per_node = cluster.kind_of_node, cluster.ranks_per_node
    return tuple(kind[device // per_node] for device in placed)
