"""Pairs: a forward and a backward that a rank runs together, each hiding what the other waits for.

The kernels of both take turns on the compute stream, a run of kernels between two collectives each
(DeepSeek-AI, 2024, arXiv 2412.19437, section 3.2.1, overlaps so the all-to-alls of experts). Each
half waits for its own inputs and collectives only, and hands over its own results.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from simulator.lower.bodies import Body, Half
from simulator.lower.grid import Grid
from simulator.lower.segments import COMPUTE
from simulator.program import Cost, Int64, Work

if TYPE_CHECKING:
    from simulator.lower.pipeline import Template


def together(first: Body, second: Body) -> Body:
    """Return the body of a pair."""
    turn = np.concatenate([_turns(first), _turns(second)])
    half = np.repeat([0, 1], [len(first), len(second)])
    order = np.lexsort((half, turn))  # stable: each half keeps its order
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    need = np.concatenate([first.need, second.need]).astype(np.int64)
    need = place - place[np.arange(len(need)) - need]
    split = len(first)
    return Body(
        cost=np.concatenate([first.cost, second.cost])[order],
        stream=np.concatenate([first.stream, second.stream])[order],
        layer=np.concatenate([first.layer, second.layer])[order],
        need=need[order].astype(np.int16),
        exit=int(place[first.exit]),
        entry=int(place[first.entry]),
        tail=int(place[split - 1]),
        second=Half(
            of=half[order].astype(np.int16),
            exit=int(place[split + second.exit]),
            entry=int(place[split + second.entry]),
            tail=int(place[-1]),
        ),
    )


def as_one(pair: Body) -> Body:
    """Return the body of a pair whose halves begin together and end together."""
    assert pair.second is not None
    last = len(pair) - 1
    return replace(pair, exit=last, second=pair.second._replace(entry=pair.entry, exit=last))


def pair_takes(
    one: Template, grid: Grid, costs: list[Cost], seconds: float
) -> tuple[Template, list[Cost]]:
    """Return ops and costs in which pairs of one op each take stated seconds, in proportion.

    Args:
        one: ops of a bare schedule, each action one op.
        grid: its actions.
        costs: of its ops, which state their seconds.
        seconds: of a pair.
    """
    rows = np.flatnonzero(grid.paired[one.listed])
    rows = rows[one.stream[rows] == COMPUTE]
    first, second = rows[::2], rows[1::2]
    costs, cost = list(costs), one.cost.copy()
    for a, b in np.unique(np.stack([one.cost[first], one.cost[second]], axis=1), axis=0).tolist():
        works = [work for work in (costs[a], costs[b]) if isinstance(work, Work)]
        own, other = (work.seconds or 0.0 for work in works)
        share = round(seconds * own / (own + other), 12) if own + other else 0.0
        mine = (one.cost[first] == a) & (one.cost[second] == b)
        cost[first[mine]], cost[second[mine]] = len(costs), len(costs) + 1
        times = (share, seconds - share)
        costs += [replace(work, seconds=t) for work, t in zip(works, times, strict=True)]
    return replace(one, cost=cost), costs


def _turns(body: Body) -> Int64:
    """Return for each op when its turn is, between 0 and 1: all runs of kernels are as long."""
    computes = body.stream == COMPUTE
    begins = computes & ~np.concatenate([[True], computes[:-1]])
    turn = np.cumsum(begins)
    middle: Int64 = (turn + 0.5) / (turn.max(initial=0) + 1)
    return middle
