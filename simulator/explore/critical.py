"""The critical path of a step: what its last op waited for, and what that one, back to its start.

Each op starts when the last of what it waits for ends, so the path has no gaps and is as long as
the step. The *main* rank is the one with most of its work. Work of other ranks on it, while the
main rank idles, is the pipeline's bubble: (p-1)/(m+p-1) of a plain 1F1B; while it works too, it
counts as work. Communication counts wherever it lies, so that no step can gain more
from free communication along an axis than that has of the path.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from simulator.describe.scenario import Scenario
from simulator.errors import DescriptionError
from simulator.hardware.compute import kernel_seconds, work_seconds
from simulator.program import NONE, OFF_DEVICE, Work
from simulator.report.breakdown import moves, stream_category
from simulator.report.result import Result
from simulator.units import to_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """The critical path of the last step."""

    step_s: float
    owners_s: dict[str, float]
    """Seconds by owner, a key of `report.summary.OWNERS`, largest first; they sum to the step."""
    kernels_s: dict[str, float]
    """Of its work by kernel, largest first, launch gaps not counted."""
    groups_s: dict[str, float]
    """Of the communication by axis and stage, largest first."""
    main_stages: tuple[int, ...]
    """Stages of the main rank."""


def critical_path(result: Result) -> Path:
    """Return the critical path of a result's last step.

    Raises:
        DescriptionError: for runs whose replicas are not in step, or whose ops queue.
    """
    s, p = result.scenario, result.tiled
    if s is None or result.is_asynchronous or len(p.servers):
        raise DescriptionError("a critical path is of scenarios whose replicas are in step")
    pieces = _pieces(result)
    is_flow = moves(p)
    on: dict[int, int] = defaultdict(int)
    for row, _, begin, end in pieces:
        on[int(p.rank[row])] += 0 if is_flow[row] else end - begin
    main = max(on, key=lambda rank: (on[rank], -rank))
    owners: dict[str, float] = defaultdict(float)
    kernels: dict[str, float] = defaultdict(float)
    groups: dict[str, float] = defaultdict(float)
    busy = _busy(result, main)
    for row, column, begin, end in pieces:
        seconds, cost = to_seconds(end - begin), p.costs[p.cost[row]]
        axis = stream_category(p.streams[p.stream[row]]) if p.stream[row] != NONE else "pp"
        if is_flow[row]:
            owners[axis] += seconds
            stage = f" of stage {p.stage[row]}" if p.stage[row] != NONE else ""
            groups[f"{axis}{stage}"] += seconds
        elif isinstance(cost, Work):
            if p.rank[row] != main:
                idle = seconds - to_seconds(busy(column, begin, end))
                owners["bubble"] += idle
                seconds -= idle
            _share(cost, s, seconds, owners, kernels)
    return Path(
        step_s=to_seconds(sum(end - begin for *_, begin, end in pieces)),
        owners_s=_sorted(owners),
        kernels_s=_sorted(kernels),
        groups_s=_sorted(groups),
        main_stages=tuple(result.stages[main]),
    )


def _sorted(parts: dict[str, float]) -> dict[str, float]:
    return {k: v for k, v in sorted(parts.items(), key=lambda item: -item[1]) if v}


def _share(
    cost: Work, s: Scenario, seconds: float, owners: dict[str, float], kernels: dict[str, float]
) -> None:  # fmt: skip
    """Divide the seconds of work by what bounds it, and by its kernels."""
    node = s.cluster.node
    by_bound = work_seconds(cost, node, s.cluster.ranks_per_node)
    whole = sum(by_bound.values())
    if not whole:
        owners["compute"] += seconds
        return
    for bound, part in by_bound.items():
        owners[bound] += seconds * part / whole
    for kernel in cost.kernels:
        if kernel.dtype not in OFF_DEVICE:
            each, _ = kernel_seconds(kernel, node.device)
            kernels[kernel.name] += seconds * kernel.count * each / whole


def _busy(result: Result, rank: int) -> Callable[[int, int, int], int]:
    """Return the function that says how many ticks a rank computes on a column between two."""
    p, (start, end) = result.tiled, result.times.columns
    rows = np.flatnonzero((p.rank == rank) & (p.stream == p.streams.index("compute")))

    def between(column: int, begin: int, until: int) -> int:
        first = np.maximum(start[rows, column], begin)
        last = np.minimum(end[rows, column], until)
        return int(np.maximum(last - first, 0).sum())

    return between


def _pieces(result: Result) -> list[tuple[int, int, int, int]]:
    """Return row, column, begin and end of what is on the path of the last step, last one first."""
    p, (start, end) = result.tiled, result.times.columns
    column_of_tile = result.times.column_of_tile
    if column_of_tile is None:
        column_of_tile = np.zeros(1, np.int64)
    tile_of_column = [int(np.argmax(column_of_tile == c)) for c in range(start.shape[1])]
    begin, finish = result.window
    members, previous = p.joint_members, p.stream_previous
    row, column = (int(x[0]) for x in np.nonzero(end == finish))
    pieces = []
    while True:
        since, until = max(int(start[row, column]), begin), int(end[row, column])
        if until > since:
            pieces.append((row, column, since, until))
        if start[row, column] <= begin:
            return pieces
        best = (-1, NONE, NONE)
        rows, columns = [row], [column]
        joint = int(p.joint[row])
        if joint != NONE:
            rows = members[joint].tolist()
            classes = p.classes[p.partition[joint]]
            mine = classes[tile_of_column[column]]
            columns = [c for c, t in enumerate(tile_of_column) if classes[t] == mine]
        for r in rows:
            waits = [int(x) for x in p.predecessors(r)]
            if previous[r] != NONE:
                waits.insert(0, int(previous[r]))
            for before in waits:
                for c in columns:
                    if int(end[before, c]) > best[0]:
                        best = (int(end[before, c]), before, c)
        if best[1] == NONE:
            return pieces
        row, column = best[1], best[2]
