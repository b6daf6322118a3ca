"""What communication took by kind: transfer, bandwidth, and how long members wait for each other.

A joint op starts when its last member arrives. A member arrives when the last of what it waits for
ends: its predecessors and the op before it in its stream. From there to the start it *waits*, from
the start to the end is *transfer*. A receive is posted ahead: its wait is no idle time by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.describe.cluster import Cluster
from simulator.describe.scenario import Scenario
from simulator.hardware.nccl import BUS_FACTORS, COLLECTIVES
from simulator.hardware.network import (
    GroupShape,
    collective_choice,
    group_shapes,
    shapes_by_tile,
)
from simulator.hardware.placement import devices
from simulator.program import NONE, Flow, Int64, Program
from simulator.report.breakdown import COMMUNICATION, Breakdown, stream_category
from simulator.report.text import table
from simulator.units import format_bytes, format_rate, format_seconds, to_seconds

if TYPE_CHECKING:
    from simulator.report.result import Result

BLOCK = 40_000
"""Ops that are looked at together; their times fit a core's cache."""


class FlowUse(NamedTuple):
    """All calls of one kind in the last step, over all groups: means are means over calls."""

    operation: str
    """As torch.distributed spells it, a message is a `send_recv`."""
    axis: str
    """Mesh axis that its groups lie along, tp, pp, dp, or tied embeddings."""
    payload_bytes: float
    """The full buffer of one rank, as nccl-tests counts."""
    ranks: int
    """Ranks of a group."""
    nodes: int | None
    """Nodes that a group lies on; None without a cluster."""
    ranks_per_node: int | None
    """Fewest of a group's ranks on any of those nodes; None without a cluster."""
    node_kinds: tuple[str, ...]
    """Names of the kinds of those nodes, in a cluster of several; empty elsewhere."""
    algorithm: str | None
    """None where NCCL chooses none: for messages, parameter servers and stated durations."""
    protocol: str | None
    calls: int
    transfer_mean_s: float
    transfer_max_s: float
    algbw_bytes_per_s: float | None
    """Payload over mean transfer; None where that is 0."""
    busbw_bytes_per_s: float | None
    """`algbw` times nccl-tests' factor; None for an operation that nccl-tests does not have."""
    wait_mean_s: float
    """Mean over the members of all calls; where one op is several calls, the first one waits."""
    wait_max_s: float
    transfer_per_rank_s: float
    """Of all calls that a rank is a member of, mean over all ranks of the run."""


@dataclass(slots=True)
class _Sum:
    """What is added up over the member ops of a kind, in ticks."""

    calls: float = 0.0
    transfer: float = 0.0
    wait: float = 0.0
    longest: float = 0.0
    """Transfer of one call."""
    longest_wait: int = 0


Key = tuple[str, str, float, int, bool, int]
"""Operation, axis, payload, servers, whether its duration is stated, number of the shape."""


def flow_use(result: Result) -> tuple[FlowUse, ...]:
    """Return each kind of communication of the last step, most time a rank first."""
    p, cluster = result.tiled, result.scenario.cluster if result.scenario else None
    shapes, shape_of_group = _shapes(p, result.scenario)
    by_kind, kind = shapes_by_tile(p, shape_of_group)
    patterns, pattern = np.unique(by_kind, axis=0, return_inverse=True)
    axes = [*map(stream_category, p.streams), "none"]  # the last is that of NONE, -1
    rows = np.flatnonzero((p.joint != NONE) & (p.step == p.step.max(initial=0)))
    lies = pattern.reshape(-1)[kind[p.joint[rows]]]
    found: dict[Key, _Sum] = {}
    for some in _alike(p.cost[rows], p.stream[rows], lies):
        first = some[0]
        flow, axis = p.costs[p.cost[rows[first]]], axes[p.stream[rows[first]]]
        assert isinstance(flow, Flow)  # a joint row is a flow: `check`
        measured = _measure(result, rows[some])
        for shape, weight in _weights(result, patterns[lies[first]]):
            key = (flow.name, axis, flow.bytes, flow.servers, flow.seconds is not None, shape)
            _add(found.setdefault(key, _Sum()), measured, weight, len(some), flow.count)
    uses = [_use(key, total, shapes[key[-1]], p, cluster) for key, total in found.items()]
    return tuple(sorted(uses, key=lambda use: -use.transfer_per_rank_s))


def _shapes(program: Program, s: Scenario | None) -> tuple[list[GroupShape], Int64]:
    """Return the shapes of groups and that of each; without a cluster all on one node."""
    if s is not None:
        return group_shapes(program.groups, s.cluster, devices(s.plan, s.cluster))
    sizes, index = np.unique(np.diff(program.groups.offset), return_inverse=True)
    return [GroupShape(size, 1, size) for size in sizes.tolist()], index.reshape(-1)


def _alike(*labels: npt.NDArray[np.integer[Any]]) -> list[Int64]:
    """Return the positions at which all labels agree, a list for each set of labels."""
    order = np.lexsort(labels)
    new = np.any([np.diff(label[order]) != 0 for label in labels], axis=0)
    return np.split(order, np.flatnonzero(new) + 1) if len(order) else []


class _Measured(NamedTuple):
    """By column of the timeline, over some rows."""

    transfer: npt.NDArray[np.float64]
    longest: Int64
    wait: npt.NDArray[np.float64]
    longest_wait: Int64


def _measure(result: Result, rows: Int64) -> _Measured:
    """Return the sums and the largest of the transfers and waits of rows, in ticks."""
    start, end = result.times.columns
    columns = start.shape[1]
    out = _Measured(*(np.zeros(columns, kind) for kind in (float, np.int64, float, np.int64)))
    height = max(1, BLOCK // columns)
    for first in range(0, len(rows), height):
        some = rows[first : first + height]
        begin = start[some]
        wait, transfer = begin - _arrival(result.tiled, end, some), end[some] - begin
        np.add(out.transfer, transfer.sum(axis=0, dtype=float), out=out.transfer)
        np.maximum(out.longest, transfer.max(axis=0), out=out.longest)
        np.add(out.wait, wait.sum(axis=0, dtype=float), out=out.wait)
        np.maximum(out.longest_wait, wait.max(axis=0), out=out.longest_wait)
    return out


def _arrival(program: Program, end: Int64, rows: Int64) -> Int64:
    """Return (rows, columns): when the last of what each row waits for ended."""
    arrival: Int64 = end[program.stream_previous[rows]]
    arrival[program.stream_previous[rows] == NONE] = 0
    begin, stop = program.pred_offset[rows], program.pred_offset[rows + 1]
    for k in range(int((stop - begin).max(initial=0))):
        has = np.flatnonzero(begin + k < stop)
        some = slice(None) if len(has) == len(rows) else has
        arrival[some] = np.maximum(arrival[some], end[program.preds[begin[has] + k]])
    return arrival


def _weights(result: Result, pattern: Int64) -> list[tuple[int, Int64]]:
    """Return each shape of a pattern by tile, with its tiles in each column of the timeline."""
    columns = result.times.columns[0].shape[1]
    column = result.times.column_of_tile
    if column is None:
        column = np.zeros(1, np.int64)
    by_tile = np.broadcast_to(pattern, column.shape)
    return [
        (shape, np.bincount(column[by_tile == shape], minlength=columns))
        for shape in np.unique(by_tile).tolist()
    ]


def _add(total: _Sum, measured: _Measured, weight: Int64, rows: int, count: int) -> None:
    """Add rows of a timeline's columns, each column `weight` times; an op is `count` calls."""
    there = weight > 0
    total.calls += rows * int(weight.sum()) * count
    total.transfer += float(measured.transfer @ weight)
    total.wait += float(measured.wait @ weight)
    total.longest = max(total.longest, int(measured.longest[there].max()) / count)
    total.longest_wait = max(total.longest_wait, int(measured.longest_wait[there].max()))


def _use(
    key: Key, total: _Sum, shape: GroupShape, program: Program, cluster: Cluster | None
) -> FlowUse:
    name, axis, size, _, stated, _ = key
    chosen = None
    kinds = cluster.kinds if cluster is not None and cluster.is_mixed else ()
    if cluster is not None and name in COLLECTIVES and not stated:
        chosen = collective_choice(name, size, shape, cluster)
    mean = to_seconds(total.transfer / total.calls)
    algbw = size / mean if mean else None
    busbw = None
    if algbw is not None and name in BUS_FACTORS:
        busbw = algbw * BUS_FACTORS[name](shape.ranks)
    return FlowUse(
        operation=name,
        axis=axis,
        payload_bytes=size,
        ranks=shape.ranks,
        nodes=shape.nodes if cluster else None,
        ranks_per_node=shape.per_node if cluster else None,
        node_kinds=tuple(kinds[kind].name for kind in shape.kinds) if kinds else (),
        algorithm=chosen.algorithm if chosen else None,
        protocol=chosen.protocol if chosen else None,
        calls=round(total.calls / shape.ranks),
        transfer_mean_s=mean,
        transfer_max_s=to_seconds(total.longest),
        algbw_bytes_per_s=algbw,
        busbw_bytes_per_s=busbw,
        wait_mean_s=to_seconds(total.wait / total.calls),
        wait_max_s=to_seconds(total.longest_wait),
        transfer_per_rank_s=to_seconds(total.transfer) / program.num_ranks,
    )


def flows_text(uses: Sequence[FlowUse], b: Breakdown, most: int = 6) -> str:
    """Return the kinds with the most time as a table, the others and the axes in words.

    Args:
        uses: all kinds, most time first.
        b: says how much of each axis is exposed.
        most: how many kinds the table shows.
    """
    header = ["communication", "payload", "ranks", "nodes", "calls", "by", "transfer", "algbw",
              "busbw", "wait", "longest", "a rank"]  # fmt: skip
    rest = sum(use.transfer_per_rank_s for use in uses[most:])
    lines = [table([header, *map(_cells, uses[:most])])]
    if uses[most:]:
        lines.append(f"and {len(uses) - most} more kinds: {format_seconds(rest)} a rank")
    axes = [f"{axis} {_of_axis(uses, b, axis)}" for axis in dict.fromkeys(u.axis for u in uses)]
    return "\n".join([
        *lines,
        "transfer: of a call, from its last member's arrival; wait: of a member until then; "
        "a rank: all its transfers",
        "mean over ranks: " + "; ".join(axes),
    ])  # fmt: skip


def _cells(use: FlowUse) -> list[str]:
    rates = (use.algbw_bytes_per_s, use.busbw_bytes_per_s)
    return [
        f"{use.axis} {use.operation}",
        format_bytes(use.payload_bytes) if use.payload_bytes else "-", str(use.ranks),
        _nodes(use), f"{use.calls:,}",
        " ".join(filter(None, (use.algorithm, use.protocol))) or "-",
        format_seconds(use.transfer_mean_s),
        *(format_rate(rate, "B") if rate else "-" for rate in rates),
        format_seconds(use.wait_mean_s), format_seconds(use.wait_max_s),
        format_seconds(use.transfer_per_rank_s),
    ]  # fmt: skip


def _nodes(use: FlowUse) -> str:
    kinds = f" ({' + '.join(use.node_kinds)})" if use.node_kinds else ""
    return f"{use.nodes or '-'}{kinds}"


def _of_axis(uses: Sequence[FlowUse], b: Breakdown, axis: str) -> str:
    total = format_seconds(sum(u.transfer_per_rank_s for u in uses if u.axis == axis))
    if axis not in COMMUNICATION:
        return total
    return f"{total}, {format_seconds(to_seconds(float(b.of(axis).mean())))} of it exposed"
