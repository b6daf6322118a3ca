"""Compute beside communication: while flows move bytes on a rank, its kernels run slower.

Each rank's computing becomes a link of its own, and its kernels flows over it. A flow that runs on
SMs takes the share `slowdown` of that link on each of its ranks while it moves at the rate that it
has alone, and a smaller one where others hold it back: in all it costs each rank slowdown x its
time alone, as far as the rank has anything to compute meanwhile. The capacity of computing is
chosen so large, beside the bandwidth of any flow, that no flow is ever held back by it: kernels
have what flows leave. During its latency a flow takes nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.budget import require
from simulator.errors import DescriptionError
from simulator.hardware.nccl import COLLECTIVES
from simulator.kernels.spans import spans
from simulator.program import NONE, Groups, Int32, Int64, Program, Tiling, ranges
from simulator.traffic import Traffic
from simulator.units import TICKS_PER_SECOND

ON_SMS = frozenset({*COLLECTIVES, "send_recv", "shift", "push_pull"})
"""Flows that kernels on SMs carry: all of NCCL's, and what is built of its sends."""

MOST = 0.9
"""Share of a rank's computing that all flows which can move on it at once may take."""

HEADROOM = 100.0
"""Capacity of computing over the largest bandwidth of a flow; above 1 / (1 - `MOST`), so that all
flows have stopped, in the filling of `simulator.kernels.sharing`, before computing is full."""

Bool = npt.NDArray[np.bool_]


class _Beside(NamedTuple):
    """What can run at once on a rank."""

    works: Int64
    """Rows of work beside which flows may move."""
    joints: Bool
    """Whether each joint op may move beside work."""


def slowed(
    program: Program, ticks: Int64, traffic: Traffic, slowdown: float
) -> tuple[Program, Int64, Traffic]:
    """Return what engines run when flows slow the compute beside them.

    Rows keep their numbers. Work beside which a flow may move becomes a joint op of one member,
    and a demand on its rank's computing; all other rows stay as they are. The program is for
    engines only: reports go on to read the one given, in which work is work.

    Args:
        program: what is to run.
        ticks: (rows, tiles), as `contended` returns it.
        traffic: what flows put on links; each demand is that of one group.
        slowdown: share of a rank's computing that a flow takes.

    Raises:
        DescriptionError: when flows that may move at once would take more than `MOST` of a rank.
    """
    works, joints = _beside(program, traffic)
    if not len(works):
        return program, ticks, traffic
    cells = len(works) * program.num_tiles
    require(150.0 * cells, f"{cells:,} kernels that share their ranks", "simulate fewer steps")
    used = np.zeros(len(traffic.size) + 1, bool)  # NONE is the last
    used[np.append(traffic.demand[joints].ravel(), NONE)] = True
    used[NONE] = False
    _check_share(program, np.asarray(used[traffic.demand].any(axis=1)), slowdown)
    taken = ticks.copy()
    taken[works] = 0
    shared = _traffic(program, ticks[works], works, traffic, used[:-1], slowdown)
    return _program(program, works), taken, shared


def _beside(program: Program, traffic: Traffic) -> _Beside:
    """Return what dependencies and streams allow to run at once; all tiles have the same."""
    on_sms = np.array([cost.name in ON_SMS for cost in program.costs], bool)[program.cost]
    moves = np.append((traffic.demand != NONE).any(axis=1), False)[program.joint]
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
    meets = on_sms & moves & (before - after > 1)
    joints = np.zeros(len(program.joint_group), bool)
    joints[program.joint[meets]] = True
    covers = np.bincount(after[meets] + 1, minlength=len(rows) + 1)
    covers -= np.bincount(before[meets], minlength=len(rows) + 1)
    beside = rows[np.cumsum(covers)[:-1] > 0]
    if len(program.slot):  # what queues for a server holds it for a fixed time
        beside = beside[program.slot[beside] == NONE]
    return _Beside(beside, joints)


def _check_share(program: Program, joints: Bool, slowdown: float) -> None:
    """Check that a rank's flows, one of each stream, leave some of its computing."""
    rows = np.flatnonzero(np.append(joints, False)[program.joint])
    lane = program.rank[rows].astype(np.int64) * (len(program.streams) + 1) + program.stream[rows]
    ordered = program.stream[rows] != NONE
    _, one = np.unique(np.where(ordered, lane, -1 - rows), return_index=True)
    most = int(np.bincount(program.rank[rows[one]]).max())
    if most * slowdown > MOST:
        raise DescriptionError(
            f"run.overlap_slowdown {slowdown:g}: up to {most} flows may move on a rank at once and "
            f"would take {most * slowdown:.0%} of its computing; at most {MOST / most:.3g} fits"
        )


def _traffic(
    program: Program, seconds: Int64, works: Int64, traffic: Traffic, used: Bool, slowdown: float
) -> Traffic:
    """Return the traffic with the computing of each rank as links, and kernels as demands.

    Half a tick is taken off a kernel: alone it then ends at its own tick, whatever is rounded.
    """
    capacity = HEADROOM * float((traffic.solo * traffic.weight)[used].max())
    links = len(traffic.capacity)
    held = _ranks_of_demands(program, traffic, used)
    count, more = np.diff(traffic.offset), np.diff(held.offset)
    ranks = program.tile_ranks[program.rank[works]]
    lengths, kind = np.unique(seconds, return_inverse=True)
    key = kind.reshape(seconds.shape) * np.int64(program.num_ranks) + ranks
    keys, number = np.unique(key, return_inverse=True)
    length, rank = lengths[keys // program.num_ranks], keys % program.num_ranks
    demand = np.where(seconds > 0, number.reshape(seconds.shape) + len(used), NONE)
    offset = np.cumsum(np.concatenate([[0], count + more, np.ones(len(keys), np.int64)]))
    used_links = np.empty(offset[-1], np.int32)
    coefficient = np.ones(offset[-1])
    old = ranges(offset[: len(used)], count)
    new = ranges(offset[: len(used)] + count, more)
    used_links[old], coefficient[old] = traffic.links, traffic.coefficient
    used_links[new] = links + held.ranks
    coefficient[new] = slowdown * capacity / np.repeat(traffic.solo, more)
    used_links[offset[len(used)] :] = links + rank
    whole = np.full(program.num_ranks, capacity)
    return Traffic(
        capacity=np.concatenate([traffic.capacity, whole]),
        names=(*traffic.names, *(f"computing of rank {r}" for r in range(program.num_ranks))),
        offset=offset,
        links=used_links,
        coefficient=coefficient,
        size=np.concatenate([traffic.size, (length - 0.5) * (capacity / TICKS_PER_SECOND)]),
        limit=np.concatenate([traffic.limit, np.full(len(keys), capacity)]),
        demand=np.concatenate([traffic.demand, demand]).astype(np.int32),
        private=program.num_ranks,
    )


def _ranks_of_demands(program: Program, traffic: Traffic, used: Bool) -> Groups:
    """Return the ranks of the group of each demand, none of those that take no computing."""
    joint, number = np.nonzero(traffic.demand != NONE)
    made, first = np.unique(traffic.demand[joint, number], return_index=True)
    group = np.zeros(len(used), np.int64)
    group[made] = program.joint_group[joint[first]] + number[first]
    size = np.where(used, np.diff(program.groups.offset)[group], 0)
    ranks: Int32 = program.groups.ranks[ranges(program.groups.offset[group], size)]
    return Groups(np.concatenate([[0], np.cumsum(size)]), ranks)


def _program(program: Program, works: Int64) -> Program:
    """Return the program with some rows as joint ops of their own, each on its own tile."""
    joint = program.joint.copy()
    joint[works] = len(program.joint_group) + np.arange(len(works))
    own, tiles = program.tile_ranks.ravel(), program.num_tiles
    alone: dict[str, Any] = {}
    if program.tiling is not None:
        classes = np.concatenate([program.classes, np.arange(tiles, dtype=np.int32)[None]])
        alone["tiling"] = Tiling(program.tiling.axes, program.tiling.ranks, classes)
        partition = np.full(len(works), len(program.classes), np.int8)
        alone["joint_partition"] = np.concatenate([program.joint_partition, partition])
    group = len(program.groups) + program.rank[works] * tiles
    ends = program.groups.offset[-1] + 1 + np.arange(len(own))
    groups = Groups(
        np.concatenate([program.groups.offset, ends]),
        np.concatenate([program.groups.ranks, own]).astype(np.int32),
    )
    return replace(
        program,
        joint=joint,
        joint_group=np.concatenate([program.joint_group, group]).astype(np.int32),
        groups=groups,
        **alone,
    )
