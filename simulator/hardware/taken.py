"""What flows take of the computing of their ranks: SMs that kernels of NCCL hold, and memory.

NCCL starts a block for each channel, and a block has an SM to itself. Which flows are carried so,
how many channels each has, what of the memory bandwidth the bytes that arrive take (`arriving`),
and beside which work a flow may move at all.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.describe.cluster import Cluster, Device
from simulator.describe.scenario import Scenario
from simulator.hardware.arriving import arriving
from simulator.hardware.nccl import COLLECTIVES
from simulator.hardware.network import GroupShape, flow_model, group_shapes
from simulator.kernels.spans import spans
from simulator.program import NONE, Flow, Groups, Int32, Int64, Program, Work, ranges
from simulator.units import TICKS_PER_SECOND

ON_SMS = frozenset({*COLLECTIVES, "send_recv", "shift", "push_pull"})
"""Flows that kernels on SMs carry: all of NCCL's, and what is built of its sends."""

NET_CHANNELS = 16
"""Most channels of a collective over several nodes: "16 coll channels" in logs of 2 x 8 H100 and of
other nodes of 8 devices and adapters, which have 24 within a node (README of nccl-test in
github.com/aws-samples/aws-do-eks)."""

MOST = 0.9
"""Share of a rank's computing that all flows which move on it at once may take."""

WHOLE = 10**9
"""Of this many parts is a rank's computing, where whole numbers count shares."""

Bool = npt.NDArray[np.bool_]
Float64 = npt.NDArray[np.float64]


class Taken(NamedTuple):
    """Which flows take some of their ranks, and how much."""

    flows: Bool
    """Whether each row of the program does while it moves bytes."""
    near: Float64
    """Share of the SMs of each rank that such a flow within a node holds."""
    far: Float64
    """The same of a flow over several nodes."""
    node: Int64
    """Of each rank."""
    copied: Bool
    """Rows that copy engines carry: they hold no SMs."""
    bandwidth: Float64
    """Bytes/s of the memory of each rank; infinite where what arrives takes nothing."""
    is_stated: bool = False
    """Whether `run.overlap_slowdown` says so."""

    @classmethod
    def stated(cls, program: Program, share: float) -> Taken:
        """Return that all flows on SMs take a share of their ranks, messages too."""
        count = program.num_ranks
        same, nowhere = np.full(count, share), np.zeros(count, np.int64)
        flows, endless = _named(program, ON_SMS), np.full(count, np.inf)
        return cls(flows, same, same, nowhere, np.zeros_like(flows), endless, is_stated=True)

    def crosses(self, groups: Groups) -> Bool:
        """Return whether each group lies on several nodes."""
        node, size = self.node[groups.ranks], np.diff(groups.offset)
        first = np.repeat(node[np.minimum(groups.offset[:-1], len(node) - 1)], size)
        owner = np.repeat(np.arange(len(groups)), size)
        return np.bincount(owner, node != first, minlength=len(groups)) > 0

    def shares(self, ranks: Int64 | Int32, crosses: Bool, copied: Bool, rate: Float64) -> Float64:
        """Return what flows take of the computing of ranks; the arguments broadcast.

        What is left of the SMs runs at what is left of the memory bandwidth.

        Args:
            ranks: to take from.
            crosses: whether the flow lies on several nodes.
            copied: whether copy engines carry it.
            rate: bytes/s that arrive at each of its ranks.
        """
        held = np.where(copied, 0.0, np.where(crosses, self.far[ranks], self.near[ranks]))
        written = np.minimum(rate / self.bandwidth[ranks], 1.0)
        found: Float64 = held + written - held * written
        return found


def _named(program: Program, names: frozenset[str]) -> Bool:
    """Return whether each row is a flow of some names."""
    has = [isinstance(cost, Flow) and cost.name in names for cost in program.costs]
    found: Bool = np.array(has, bool)[program.cost]
    return found


def default_shares(device: Device) -> tuple[float, float]:
    """Return what a collective takes of a device within a node, and over several."""
    near, units = device.communication_share, device.communication_units or 0
    return near, near * min(1.0, NET_CHANNELS / max(units, 1))


def _takes(s: Scenario) -> bool:
    """Return whether flows of a run may take anything.

    Under jitter every sample is another timeline: where links are shared, work would have to share
    its rank with flows in each.
    """
    if s.run.overlap_slowdown is None:
        return s.jitter is None or s.run.network != "fluid"
    return s.run.overlap_slowdown > 0


def taken(program: Program, s: Scenario, placement: Int64) -> Taken | None:
    """Return what flows take of computing in a run of a scenario; None where it is nothing.

    Unless `run.overlap_slowdown` says otherwise, collectives take what the device of each rank
    states, and so do shifts within a node. Other messages take nothing: between nodes NCCL gives
    them 2 channels a peer, within one they are short. Tensor-parallel collectives in pieces
    (`plan.tp_overlap` all), which copy engines carry, take memory bandwidth only. Where a device
    states no SMs of collectives, flows take nothing.
    """
    stated = s.run.overlap_slowdown
    if not _takes(s):
        return None
    if stated is not None:
        found = Taken.stated(program, stated)
        return found if found.flows.any() else None
    by_kind = np.array([default_shares(node.device) for node in s.cluster.kinds])
    flows, shifts = _named(program, frozenset(COLLECTIVES)), _named(program, frozenset({"shift"}))
    if not (by_kind.any() and (flows.any() or shifts.any())):
        return None
    copied = np.zeros_like(flows)
    if s.plan.tp_overlap == "all" and "tp" in program.streams:
        copied = flows & (program.stream == program.streams.index("tp"))
    node = placement[: program.num_ranks] // s.cluster.ranks_per_node
    kind = np.array(s.cluster.kind_of_node)[node]
    near, far = by_kind[kind].T
    memory = np.array([each.device.memory_bandwidth for each in s.cluster.kinds])[kind]
    memory[near == 0] = np.inf
    found = Taken(flows, near, far, node, copied, memory)
    if shifts.any():
        joint = program.joint[shifts]
        group = program.joint_group[joint][:, None] + program.classes[program.partition[joint]]
        flows[shifts] = ~found.crosses(program.groups)[group].any(axis=1)
    return found


class Beside(NamedTuple):
    """What can run at once on a rank."""

    works: Int64
    """Rows of work beside which flows may move, ordered by rank."""
    flows: Bool
    """Whether each row is a flow that may move beside work."""


def beside(program: Program, flows: Bool) -> Beside:
    """Return what dependencies and streams allow to run beside some flows; all tiles agree."""
    work = ~program.is_flow & (program.stream == program.streams.index("compute"))
    rows = np.flatnonzero(work)
    rows = rows[np.argsort(program.rank[rows], kind="stable")]
    place = np.full(len(work), NONE, np.int64)
    place[rows] = np.arange(len(rows))
    first = np.searchsorted(program.rank[rows], np.arange(len(program.tile_ranks) + 1))
    after, before = first[program.rank] - 1, first[program.rank + 1]
    spans(
        len(program.preds) + len(work), program.units[1], place, program.rank, program.pred_offset,
        program.preds, program.stream_previous, after, before,
    )  # fmt: skip
    meets = flows & (before - after > 1)
    covers = np.bincount(after[meets] + 1, minlength=len(rows) + 1)
    covers -= np.bincount(before[meets], minlength=len(rows) + 1)
    found = rows[np.cumsum(covers)[:-1] > 0]
    if len(program.slot):  # what queues for a server holds it for a fixed time
        found = found[program.slot[found] == NONE]
    return Beside(found, meets)


class Moving(NamedTuple):
    """Flows of fixed times that may move beside work, and that work; both ordered by rank."""

    works: Int64
    """Rows."""
    work_offset: Int64
    """Those of rank k of a tile are ``works[work_offset[k]:work_offset[k + 1]]``."""
    flows: Int64
    """Rows."""
    flow_offset: Int64
    latency: Int64
    """(flows, tiles or 1): ticks between the start of a flow and its bytes' first move."""
    share: Int64
    """(flows, tiles or 1): what it takes of its rank's computing, of `WHOLE` parts."""


def moving(program: Program, s: Scenario, placement: Int64) -> Moving | None:
    """Return which flows of a run may slow which work, where flows take fixed times, if any do."""
    found = taken(program, s, placement)
    if found is None:
        return None
    works, meets = beside(program, found.flows)
    if not len(works):
        return None
    flows = np.flatnonzero(meets)
    flows = flows[np.argsort(program.rank[flows], kind="stable")]
    ranks = np.arange(len(program.tile_ranks) + 1)
    shapes, shape = _shapes(program, s, placement, flows)
    latency, rate = _times(program, s.cluster, flows, shapes, shape)
    crosses = np.array([one.nodes > 1 for one in shapes], bool)[shape]
    return Moving(
        works, np.searchsorted(program.rank[works], ranks),
        flows, np.searchsorted(program.rank[flows], ranks),
        latency, _shares(program, found, flows, crosses, rate),
    )  # fmt: skip


def _shapes(
    program: Program, s: Scenario, placement: Int64, flows: Int64
) -> tuple[list[GroupShape], Int64]:
    """Return the shapes of the groups of some flows, and which each has, (flows, tiles or 1)."""
    joint = program.joint[flows]
    _, at, kind = np.unique(program.joint_group[joint], return_index=True, return_inverse=True)
    first = joint[at]  # of joint ops with the same first group, which have the same on all tiles
    group = program.joint_group[first][:, None] + program.classes[program.partition[first]]
    groups, number = np.unique(group, return_inverse=True)
    offset, size = program.groups.offset[groups], np.diff(program.groups.offset)[groups]
    some = Groups(
        np.concatenate([[0], np.cumsum(size)]), program.groups.ranks[ranges(offset, size)]
    )
    shapes, shape_of_group = group_shapes(some, s.cluster, placement)
    shape = shape_of_group[number.reshape(group.shape)]
    if (shape == shape[:, :1]).all():
        shape = shape[:, :1]
    return shapes, shape[kind.reshape(-1)]


def _times(
    program: Program, cluster: Cluster, flows: Int64, shapes: list[GroupShape], shape: Int64
) -> tuple[Int64, Float64]:
    """Return the ticks that flows of some shapes (flows, tiles or 1) wait before bytes move, and
    the bytes/s that then arrive at each rank.
    """
    cost = program.cost[flows][:, None]
    pairs, number = np.unique(cost * np.int64(len(shapes)) + shape, return_inverse=True)
    ticks, rate = [], []
    for each, at in zip(*(part.tolist() for part in np.divmod(pairs, len(shapes))), strict=True):
        flow = program.costs[each]
        assert not isinstance(flow, Work)  # a joint row is a flow
        model = flow_model(flow, shapes[at], cluster)
        ticks.append(round(model.latency * TICKS_PER_SECOND))
        share = arriving(flow, model.algorithm, shapes[at].ranks)
        rate.append(share * model.bytes_per_s if share else 0.0)
    number = number.reshape(shape.shape)
    return np.array(ticks, np.int64)[number], np.array(rate)[number]


def _shares(program: Program, found: Taken, flows: Int64, crosses: Bool, rate: Float64) -> Int64:
    """Return what flows (flows, tiles or 1) take of their ranks."""
    alike = all((part == part[0]).all() for part in (found.near, found.far, found.bandwidth))
    ranks = np.zeros((1, 1), np.int64) if alike else program.tile_ranks[program.rank[flows]]
    share = found.shares(ranks, crosses, found.copied[flows][:, None], rate)
    parts: Int64 = np.rint(share * WHOLE).astype(np.int64)
    return parts
