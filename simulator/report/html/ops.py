"""The ops of a result as columns for a page: what runs alike is kept once.

The ranks at one place of their pipelines have the same ops. A *sheet* is a place with one set of
times; ranks whose times are equal share a sheet. Sheets are kept op by op until a page is full, and
the others as sums over pieces of time (`density`), which the page says.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from simulator.errors import DescriptionError
from simulator.program import ACTIONS, NONE, Flow, Int64, Program
from simulator.report.breakdown import CATEGORIES, binding, moves, stream_category
from simulator.report.html.density import density
from simulator.timeline import Timeline

if TYPE_CHECKING:
    from simulator.report.result import Result

MOST_OPS = 400_000
"""Ops with times of their own that a page holds."""

WORK_KINDS = {"F": "forward", "B": "backward", "I": "I", "W": "W"}
"""Kind of work by action; any other is the optimizer."""

KINDS = ("forward", "backward", "I", "W", "optimizer")
"""Kinds of work, as figures colour them; kinds of communication follow."""

LABELS = ("action", "stage", "microbatch", "layer", "step", "cost")
"""Columns of the program that a page shows."""

Columns = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, eq=False)
class Ops:
    """Ops of a result, in the order in which a page holds them."""

    rows: Int64
    """Rows of the program by place, track and time; `place_offset` says where a place begins."""
    place_offset: Int64
    kind: Int64
    """Of each of `rows`: index into `kinds`."""
    kinds: tuple[str, ...]
    track: Int64
    """Of each of `rows`: index into `tracks`."""
    tracks: tuple[str, ...]
    """Streams that have ops, and "no stream" where some have none, from the top."""
    sheets: Int64
    """(sheets, 2): the place of each, and the column of the timeline with its times."""
    sheet_of: Int64
    """(places, tiles): the sheet of each rank."""
    exact: int
    """The first so many sheets are kept op by op."""

    def of_sheet(self, sheet: int) -> tuple[slice, Int64]:
        """Return where in `rows` the ops of a sheet stand, and the rows themselves."""
        place = int(self.sheets[sheet, 0])
        where = slice(int(self.place_offset[place]), int(self.place_offset[place + 1]))
        return where, self.rows[where]


def ops_of(result: Result, most: int = MOST_OPS) -> Ops:
    """Return the ops of a result in order, and which ranks run alike.

    Raises:
        DescriptionError: when a single rank has more than `most` ops.
    """
    p, (start, _) = result.tiled, result.times.columns
    track, tracks = _tracks(p)
    kind, kinds = _kinds(p)
    rows = np.lexsort((np.arange(len(track)), start[:, 0], track, p.rank))
    offset = np.searchsorted(p.rank[rows], np.arange(len(p.tile_ranks) + 1))
    sheets, sheet_of = _sheets(result, rows, offset)
    sizes = np.diff(offset)[sheets[:, 0]]
    if len(sizes) and sizes.max() > most:
        raise DescriptionError(
            f"a page holds {most:,} ops, and one rank alone has {int(sizes.max()):,}; fewer steps "
            "or microbatches (run.num_steps, run.global_batch_size) make it smaller"
        )
    exact = int(np.searchsorted(np.cumsum(sizes), most, side="right"))
    return Ops(rows, offset, kind[rows], kinds, track[rows], tracks, sheets, sheet_of, exact)


def ops_columns(result: Result, ops: Ops) -> Columns:
    """Return the columns that a page holds: labels by place, times and sums by sheet."""
    p = result.tiled
    out: Columns = {name: getattr(p, name)[ops.rows] for name in LABELS}
    out |= {"kind": ops.kind, "track": ops.track, "members": _members(p)[ops.rows]}
    out |= {"placeOffset": ops.place_offset, "sheets": ops.sheets, "sheetOf": ops.sheet_of}
    out |= {"tileRanks": p.tile_ranks}
    gaps, lasts, waits = [], [], []
    for sheet in range(ops.exact):
        gap, duration, wait = _times(result, ops, sheet)
        gaps.append(gap)
        lasts.append(duration)
        waits.append(wait)
    none = np.zeros(0, np.int64)
    out |= {"gap": np.concatenate([none, *gaps]), "duration": np.concatenate([none, *lasts])}
    out |= {"wait": np.concatenate([none, *waits])}
    until = result.times.makespan
    rest = [_density(result, ops, sheet, until) for sheet in range(ops.exact, len(ops.sheets))]
    return out | {"density": np.array(rest, np.uint8)}


def _times(result: Result, ops: Ops, sheet: int) -> tuple[Int64, Int64, Int64]:
    """Return the gap before each op of a sheet in its track, its duration, and a flow's wait.

    The gap of a track's first op counts from 0.
    """
    p, column = result.tiled, int(ops.sheets[sheet, 1])
    where, rows = ops.of_sheet(sheet)
    start, end = (times[:, column] for times in result.times.columns)
    track = ops.track[where]
    before = np.append(0, end[rows[:-1]])[: len(rows)]
    before[np.flatnonzero(np.append(True, track[1:] != track[:-1]))[: len(rows)]] = 0
    wait = np.zeros(len(rows), np.int64)
    flows = np.flatnonzero(p.is_flow[rows])
    last = binding(p, Timeline(start, end), rows[flows], streams=True)
    wait[flows] = start[rows[flows]] - np.where(last == NONE, 0, end[last])
    return start[rows] - before, end[rows] - start[rows], wait


def _density(result: Result, ops: Ops, sheet: int, until: int) -> npt.NDArray[np.uint8]:
    """Return the share of each piece of the run in which a sheet does each kind, 255 for all."""
    where, rows = ops.of_sheet(sheet)
    start, end = (times[rows, ops.sheets[sheet, 1]] for times in result.times.columns)
    share = density(ops.kind[where], len(ops.kinds), start, end, until)
    return np.minimum(np.rint(255 * share), 255).astype(np.uint8)


def _tracks(p: Program) -> tuple[Int64, tuple[str, ...]]:
    """Return the track of each row and the names of tracks: compute first, then as `CATEGORIES`."""

    def position(stream: int) -> tuple[int, int]:
        name = p.streams[stream]
        category = stream_category(name)
        at = CATEGORIES.index(category) if category in CATEGORIES else len(CATEGORIES)
        return (NONE if name == "compute" else at), stream

    present = np.unique(p.stream)
    order = sorted((s for s in present.tolist() if s != NONE), key=position)
    names = [p.streams[s] for s in order] + ["no stream"] * bool((present == NONE).any())
    place = np.full(len(p.streams) + 1, len(order), np.int64)  # NONE is -1, the last one
    place[order] = np.arange(len(order))
    return place[p.stream], tuple(names)


def _kinds(p: Program) -> tuple[Int64, tuple[str, ...]]:
    """Return the kind of each row, and the names of the kinds there are, as `COLOURS` has them."""
    work = [KINDS.index(WORK_KINDS.get(action, "optimizer")) for action in ACTIONS]
    names = [
        *KINDS,
        *dict.fromkeys(stream_category(s) for s in p.streams if s != "compute"),
        "flow",
    ]
    of_stream = [names.index(stream_category(s)) if s != "compute" else len(names) - 1
                 for s in p.streams]  # fmt: skip
    of_stream.append(len(names) - 1)  # NONE is -1, the last one
    moving = moves(p)
    kind = np.where(moving, np.array(of_stream)[p.stream], np.array(work)[p.action])
    present, number = np.unique(kind, return_inverse=True)
    return number.reshape(-1), tuple(names[k] for k in present.tolist())


def _members(p: Program) -> Int64:
    """Return how many ranks each row's flow joins; 0 for work."""
    sizes = np.append(np.diff(p.groups.offset), 0)
    members: Int64 = np.where(p.joint == NONE, 0, sizes[p.joint_group[p.joint]]) if len(
        p.joint_group
    ) else np.zeros(len(p.rank), np.int64)  # fmt: skip
    return members


def _sheets(result: Result, rows: Int64, offset: Int64) -> tuple[Int64, Int64]:
    """Return (place, column) of every sheet, in order of the tiles, and the sheet of each rank."""
    p, (start, end) = result.tiled, result.times.columns
    column = result.times.column_of_tile
    if column is None:
        column = np.zeros(1, np.int64)
    found: dict[tuple[int, bytes], int] = {}
    places, count = len(p.tile_ranks), start.shape[1]
    number = np.zeros((places, count), np.int64)
    sheets: list[tuple[int, int]] = []
    for c in dict.fromkeys(column.tolist()):
        for place in range(places):
            mine = rows[offset[place] : offset[place + 1]]
            digest = _digest(start[mine, c], end[mine, c]) if count > 1 else b""
            if (place, digest) not in found:
                found[place, digest] = len(sheets)
                sheets.append((place, c))
            number[place, c] = found[place, digest]
    return np.array(sheets, np.int64).reshape(-1, 2), number[:, column]


def _digest(start: Int64, end: Int64) -> bytes:
    return blake2b(np.concatenate([start, end]).tobytes(), digest_size=16).digest()


def cost_table(p: Program) -> list[dict[str, Any]]:
    """Return what a page says of each cost: its name, and FLOPs and bytes or payload."""
    out: list[dict[str, Any]] = []
    for cost in p.costs:
        if isinstance(cost, Flow):
            out.append({"name": cost.name, "bytes": cost.bytes * cost.count})
        else:
            flops = sum(k.flops * k.count for k in cost.kernels)
            moved = sum(k.bytes * k.count for k in cost.kernels)
            out.append({"name": cost.name, "flops": flops, "moved": moved})
    return out
