"""Compute beside communication: while flows move bytes on a rank, its kernels run slower.

Each rank's computing becomes a link of its own, and its kernels flows over it. A collective takes
its share of that link on each of its ranks while it moves at the rate that it has alone,
and a smaller one where others hold it back: in all it costs each rank that share of its time
alone, as far as the rank has anything to compute meanwhile. The capacity of computing is
chosen so large, beside the bandwidth of any flow, that no flow is ever held back by it: kernels
have what flows leave. During its latency a flow takes nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from simulator.budget import require
from simulator.errors import DescriptionError
from simulator.hardware.taken import MOST, Bool, Float64, Taken, beside
from simulator.program import NONE, Groups, Int32, Int64, Program, Tiling, ranges
from simulator.traffic import Traffic
from simulator.units import TICKS_PER_SECOND

HEADROOM = 100.0
"""Capacity of computing over the largest bandwidth of a flow; above 1 / (1 - `MOST`), so that all
flows have stopped, in the filling of `simulator.kernels.sharing`, before computing is full."""


def slowed(
    program: Program, ticks: Int64, traffic: Traffic, taken: Taken
) -> tuple[Program, Int64, Traffic]:
    """Return what engines run when flows slow the compute beside them.

    Rows keep their numbers. Work beside which a flow may move becomes a joint op of one member,
    and a demand on its rank's computing; all other rows stay as they are. The program is for
    engines only: reports go on to read the one given, in which work is work.

    Args:
        program: what is to run.
        ticks: (rows, tiles), as `contended` returns it.
        traffic: what flows put on links; each demand is that of one group.
        taken: share of its ranks' computing that each flow takes.

    Raises:
        DescriptionError: when flows that may move at once would take more than `MOST` of a rank by
            a share that was stated; else all take as much less as it needs.
    """
    moves = np.append((traffic.demand != NONE).any(axis=1), False)[program.joint]
    works, flows = beside(program, taken.flows & moves)
    joints = np.zeros(len(program.joint_group), bool)
    joints[program.joint[flows]] = True
    if not len(works):
        return program, ticks, traffic
    cells = len(works) * program.num_tiles
    require(150.0 * cells, f"{cells:,} kernels that share their ranks", "simulate fewer steps")
    used = np.zeros(len(traffic.size) + 1, bool)  # NONE is the last
    used[np.append(traffic.demand[joints].ravel(), NONE)] = True
    used[NONE] = False
    joints = np.asarray(used[traffic.demand].any(axis=1))
    held, shares = _shares(program, traffic, used[:-1], taken)
    shares = _fitting(program, joints, shares, taken.is_stated)
    alone = ticks.copy()
    alone[works] = 0
    shared = _traffic(program, ticks[works], works, traffic, used[:-1], held, shares)
    return _program(program, works), alone, shared


def _fitting(program: Program, joints: Bool, shares: Float64, is_stated: bool) -> Float64:
    """Return shares with which a rank's flows, one of each stream, leave some of its computing."""
    rows = np.flatnonzero(np.append(joints, False)[program.joint])
    lane = program.rank[rows].astype(np.int64) * (len(program.streams) + 1) + program.stream[rows]
    ordered = program.stream[rows] != NONE
    _, one = np.unique(np.where(ordered, lane, -1 - rows), return_index=True)
    most = int(np.bincount(program.rank[rows[one]]).max())
    share = float(shares.max(initial=0.0))
    if most * share <= MOST:
        return shares
    if is_stated:
        raise DescriptionError(
            f"run.overlap_slowdown {share:g}: up to {most} flows may move on a rank at once and "
            f"would take {most * share:.0%} of its computing; at most {MOST / most:.3g} fits"
        )
    return shares * (MOST / (most * share))


def _shares(program: Program, traffic: Traffic, used: Bool, taken: Taken) -> tuple[Groups, Float64]:
    """Return the ranks that each demand takes computing of, none of those that take none, and the
    share that it takes of each while it moves at the rate that it has alone.
    """
    held, group, joint = _ranks_of_demands(program, traffic, used)
    count = np.diff(held.offset)
    rate = np.zeros(len(used))
    if traffic.arriving is not None:
        rate[used] = traffic.arriving[used] * traffic.solo[used]
    row = program.joint_members.ranks[program.joint_members.offset[joint]]
    crosses, copied = taken.crosses(program.groups)[group], taken.copied[row]
    return held, taken.shares(
        held.ranks, np.repeat(crosses, count), np.repeat(copied, count), np.repeat(rate, count)
    )


def _traffic(
    program: Program, seconds: Int64, works: Int64, traffic: Traffic, used: Bool, held: Groups,
    share: Float64,
) -> Traffic:  # fmt: skip
    """Return the traffic with the computing of each rank as links, and kernels as demands.

    Half a tick is taken off a kernel: alone it then ends at its own tick, whatever is rounded.
    """
    capacity = HEADROOM * float((traffic.solo * traffic.weight)[used].max())
    links = len(traffic.capacity)
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
    coefficient[new] = share * capacity / np.repeat(traffic.solo, more)
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


def _ranks_of_demands(
    program: Program, traffic: Traffic, used: Bool
) -> tuple[Groups, Int64, Int64]:
    """Return the ranks of the group of each demand, none of those that take no computing, the
    group, and one of its joint ops.
    """
    joint, number = np.nonzero(traffic.demand != NONE)
    made, first = np.unique(traffic.demand[joint, number], return_index=True)
    group, one = np.zeros((2, len(used)), np.int64)
    group[made], one[made] = program.joint_group[joint[first]] + number[first], joint[first]
    size = np.where(used, np.diff(program.groups.offset)[group], 0)
    ranks: Int32 = program.groups.ranks[ranges(program.groups.offset[group], size)]
    return Groups(np.concatenate([[0], np.cumsum(size)]), ranks), group, one


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
