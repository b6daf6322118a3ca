"""From a Program and a cluster to Traffic: the links of the fabric that every flow loads.

A flow takes the latency of the network model, then moves its bytes over the links on which its
algorithm lays them, at the model's rate when nothing is in its way. So where nothing contends,
and no link is degraded or oversubscribed, it takes exactly the time of the alpha-beta model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from simulator.describe.cluster import Cluster
from simulator.hardware.arriving import arriving
from simulator.hardware.fabric import Fabric, build
from simulator.hardware.nccl_models import STEPS
from simulator.hardware.network import GroupShape, flow_model, group_shapes
from simulator.hardware.patterns import ORDERED, PATTERNS, Messages, layout
from simulator.hardware.storage import load_of, storage_links
from simulator.program import NONE, ONE_SIDED, SERVED, Flow, Int32, Int64, Program
from simulator.traffic import Float64, Traffic
from simulator.units import TICKS_PER_SECOND


class Load(NamedTuple):
    """Links that a collective loads, and bytes on each for a byte of its size."""

    links: Int32
    coefficient: Float64


def contended(
    program: Program, ticks: Int64, cluster: Cluster, placement: Int64 | None = None
) -> tuple[Int64, Traffic]:
    """Return how long flows wait before they enter links, and what they put on them.

    Args:
        program: what is to run.
        ticks: its price, as `price` returns it: work keeps it, flows keep their latency of it.
        cluster: the hardware.
        placement: the device of each rank; rank r is on device r when absent.
    """
    fabric = build(cluster, placement)
    shapes, shape_of_group = group_shapes(program.groups, cluster, placement)
    demand, pairs = _demands(program)
    table = _Table(fabric, cluster)
    for cost, group in pairs.tolist():
        flow = program.costs[cost]
        assert isinstance(flow, Flow)  # `_demands` looks at flows only
        table.add(flow, program.groups[group].astype(np.int64), shapes[shape_of_group[group]])
    wide = np.array(
        np.broadcast_to(
            ticks.reshape(len(program.rank), -1), (len(program.rank), program.num_tiles)
        )
    )
    rows = np.flatnonzero(program.joint != NONE)
    joint = program.joint[rows]
    classes = program.classes[program.partition[joint]]
    wide[rows] = np.array(table.latency, np.int64)[demand[joint[:, None], classes]]
    moves = np.append(np.array(table.size) > 0, False)  # NONE is the last
    fluid = np.where(moves[demand], demand, NONE)
    return wide, table.traffic(fluid.astype(np.int32))


def _demands(program: Program) -> tuple[Int64, Int64]:
    """Return each joint op's demand on each class of tiles, and each demand's (cost, group)."""
    members, classes = program.joint_members, program.classes
    cost = program.cost[members.ranks[members.offset[:-1]]].astype(np.int64)
    width = classes.max(axis=1)[program.partition].astype(np.int64) + 1
    tiles = np.arange(program.num_tiles)
    group = program.joint_group[:, None].astype(np.int64) + tiles
    key = cost[:, None] * (len(program.groups) + 1) + group
    present = tiles < width[:, None]
    keys, number = np.unique(key[present], return_inverse=True)
    demand = np.full(present.shape, NONE, np.int64)
    demand[present] = number.reshape(-1)
    return demand, np.stack(np.divmod(keys, len(program.groups) + 1), axis=1)


class _Table:
    """Demands in the making, a row each; what a group's algorithm loads is found once."""

    def __init__(self, fabric: Fabric, cluster: Cluster) -> None:
        self.fabric, self.cluster = fabric, cluster
        network = cluster.network
        impaired = bool(network.degraded or network.failed)
        sound = replace(cluster, network=replace(network, degraded={}, failed=()))
        self.sound = build(sound, fabric.slot) if impaired else fabric
        self.latency: list[int] = []
        self.size: list[float] = []
        self.limit: list[float] = []
        self.arriving: list[float] = []
        self.loads: list[Load] = []
        self.storage = storage_links(cluster, len(fabric.capacity))
        self._known: dict[tuple[str, str, int, bytes], tuple[Load, Load]] = {}

    def add(self, flow: Flow, ranks: Int64, shape: GroupShape) -> None:
        """Add the demand of a flow over the ranks of a group."""
        model = flow_model(flow, shape, self.cluster)
        self.latency.append(round(model.latency * TICKS_PER_SECOND))
        self.size.append(flow.bytes * flow.count if model.algorithm != "NONE" else 0.0)
        self.limit.append(model.bytes_per_s)
        self.arriving.append(arriving(flow, model.algorithm, shape.ranks))
        if model.algorithm == "STORAGE":
            used = load_of(flow, int(ranks[0]), self.cluster, self.fabric, self.storage)
            self.loads.append(Load(np.array([*used], np.int32), np.array([*used.values()])))
            return
        key = (model.algorithm, flow.name, flow.servers, ranks.tobytes())
        if key not in self._known:
            load = self.load(self.fabric, model.algorithm, ranks, flow)
            if self.sound is self.fabric:
                self._known[key] = load, load
            else:
                self._known[key] = load, self.load(self.sound, model.algorithm, ranks, flow)
        load, sound = self._known[key]
        if flow.name not in SERVED:  # those are formulas, not measured: their routes decide
            excess = self._excess(sound, model.bytes_per_s)
            load = Load(load.links, load.coefficient / excess)
        if flow.name in ONE_SIDED and not len(load.links):  # the only server is the rank itself
            self.latency[-1], self.size[-1] = 0, 0.0
        self.loads.append(load)

    def _excess(self, load: Load, rate: float) -> float:
        """Return how far a model's rate is above what sound nodes can carry, or 1.

        What a collective achieves alone is measured; where that is more than the links of its
        nodes carry at their stated efficiency, its bytes count for less. Links between switches,
        and what is degraded or failed, have no part in that: they hold it back.
        """
        ends = self.sound.of_nodes[load.links]
        if not ends.any() or rate == np.inf:
            return 1.0
        capacity = self.sound.capacity[load.links[ends]]
        return max(float((load.coefficient[ends] * rate / capacity).max()), 1.0)

    def load(self, fabric: Fabric, algorithm: str, ranks: Int64, flow: Flow) -> Load:
        """Return the links of a fabric that a collective loads."""
        if algorithm == "NONE":
            return Load(np.zeros(0, np.int32), np.zeros(0))
        if algorithm in ORDERED:
            messages = ORDERED[algorithm](ranks, flow.servers)
        else:
            steps = STEPS[flow.name](len(ranks)) if flow.name in STEPS else flow.servers
            at = layout(ranks, self.cluster.ranks_per_node, fabric.slot)
            messages = PATTERNS[algorithm](at, steps)
        if flow.name == "gather":
            messages = Messages(messages.target, messages.source, messages.share)
        moving = messages.source != messages.target
        source, target, share = (column[moving] for column in messages)
        routes = fabric.routes(source, target)
        bytes_on = np.zeros(len(fabric.capacity))
        np.add.at(bytes_on, routes.links, np.repeat(share, np.diff(routes.offset)))
        used = np.flatnonzero(bytes_on)
        return Load(used.astype(np.int32), bytes_on[used])

    def traffic(self, demand: Int32) -> Traffic:
        """Return all demands as columns."""
        none = Load(np.zeros(0, np.int32), np.zeros(0))
        parts = [*self.loads, none]
        return Traffic(
            capacity=np.concatenate([self.fabric.capacity, self.storage.capacity]),
            names=(*self.fabric.names, *self.storage.names),
            offset=np.cumsum([0, *(len(load.links) for load in self.loads)]).astype(np.int64),
            links=np.concatenate([load.links for load in parts]),
            coefficient=np.concatenate([load.coefficient for load in parts]),
            size=np.array(self.size),
            limit=np.array(self.limit),
            demand=demand,
            arriving=np.array(self.arriving),
        )
