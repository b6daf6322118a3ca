"""A program as Chakra execution traces: ``PREFIX.RANK.et`` for each rank, and its groups as JSON.

ASTRA-sim reads both. A node's duration is whole microseconds, half a microsecond up. Streams are
dependencies: each op depends on the one before it in its stream. Sizes of collectives are those of
what one rank puts in: an all-gather's is a rank's share.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from simulator.errors import DescriptionError
from simulator.exchange.chakra.nodes import (
    COLLECTIVE,
    COLLECTIVES,
    COMPUTE,
    RECV,
    SEND,
    Node,
    Value,
    encode_file,
)
from simulator.files import check_writable
from simulator.program import ACTIONS, NONE, Flow, Int64, Program, Work
from simulator.units import TICKS_PER_SECOND, format_seconds, to_seconds

TICKS_PER_MICROSECOND = TICKS_PER_SECOND // 10**6

LABELS = "trainsim"
"""Attribute by which a trace of ours keeps action, stage, microbatch, layer, step and stream."""


class Exported(NamedTuple):
    """What was written."""

    files: int
    nodes: int
    groups: Path
    """Ranks of each group, ASTRA-sim's comm-group-configuration."""
    notes: tuple[str, ...]
    """What was rounded or joined."""


def write_chakra(program: Program, ticks: Int64, prefix: Path) -> Exported:
    """Write the traces of a program.

    Args:
        program: with or without tiling.
        ticks: of every op, as `hardware.price` gives them.
        prefix: files are ``PREFIX.0.et`` and so on, and ``PREFIX.comm_groups.json``.

    Raises:
        DescriptionError: when a file cannot be written, traces of more ranks lie there, or an op
            has no node in Chakra.
    """
    tiles = program.num_tiles
    flat = program.flat
    if program.tiling is not None:
        ticks = np.broadcast_to(ticks.reshape(len(program.rank), -1), (len(program.rank), tiles))
    every: Int64 = ticks.reshape(-1)
    _check(flat)
    targets = [prefix.with_name(f"{prefix.name}.{rank}.et") for rank in range(flat.num_ranks)]
    groups = prefix.with_name(f"{prefix.name}.comm_groups.json")
    for path in (groups, *targets):
        check_writable(path)
    stale = prefix.with_name(f"{prefix.name}.{flat.num_ranks}.et")
    if stale.exists():
        raise DescriptionError(
            f"{str(stale)!r} is there, of a run with more ranks than these {flat.num_ranks}; "
            "choose another prefix or remove it"
        )
    numbers, table = _groups(flat)
    folder = Path(tempfile.mkdtemp(dir=prefix.parent, prefix=".trainsim-"))
    try:
        for rank, nodes in enumerate(_ranks(flat, every, numbers)):
            with (folder / targets[rank].name).open("wb") as file:
                file.writelines(encode_file(nodes))
        (folder / groups.name).write_text(json.dumps(table) + "\n", encoding="utf-8")
        for path in (groups, *targets):
            (folder / path.name).replace(path)
    except OSError as error:
        raise DescriptionError(f"cannot write {str(prefix)!r}.*: {error.strerror}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Exported(len(targets), len(flat), groups, _notes(flat, every))


def _check(program: Program) -> None:
    """Check that every op has a node in Chakra.

    Raises:
        DescriptionError: when one has none.
    """
    known = (*COLLECTIVES, "send_recv")
    wrong = sorted({c.name for c in program.costs if isinstance(c, Flow)} - set(known))
    if wrong:
        raise DescriptionError(
            f"Chakra has no node for {', '.join(wrong)}; it has {', '.join(known)}"
        )
    if len(program.slot) and (program.slot != NONE).any():
        raise DescriptionError("Chakra has no node for ops that queue for workers or storage")
    degree = np.diff(program.pred_offset)
    owner = np.repeat(program.rank, degree)
    if (program.rank[program.preds] != owner).any():
        raise DescriptionError("Chakra has no dependency of one rank's op on another's")


def _groups(program: Program) -> tuple[list[str], dict[str, list[int]]]:
    """Return the number of each group's set of ranks, and the ranks by number."""
    seen: dict[tuple[int, ...], str] = {}
    numbers = [
        seen.setdefault(tuple(program.groups[g].tolist()), str(len(seen)))
        for g in range(len(program.groups))
    ]
    return numbers, {number: list(ranks) for ranks, number in seen.items()}


def _ranks(program: Program, ticks: Int64, numbers: list[str]) -> Iterator[Iterator[Node]]:
    """Yield the nodes of each rank; a node's id is the position of its op on the rank."""
    order = np.argsort(program.rank, kind="stable")
    bounds = np.searchsorted(program.rank[order], np.arange(program.num_ranks + 1))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order)) - bounds[program.rank[order]]
    micros = (ticks + TICKS_PER_MICROSECOND // 2) // TICKS_PER_MICROSECOND
    for rank in range(program.num_ranks):
        mine = order[bounds[rank] : bounds[rank + 1]]
        yield _nodes(program, mine.tolist(), place, micros, numbers)


def _nodes(
    program: Program, ops: list[int], place: Int64, micros: Int64, numbers: list[str]
) -> Iterator[Node]:
    for op in ops:
        before = [*program.predecessors(op).tolist(), int(program.stream_previous[op])]
        deps = tuple(sorted({int(place[p]) for p in before if p != NONE}))
        cost = program.costs[program.cost[op]]
        kind, attrs = COMPUTE, dict[str, Value](is_cpu_op=False)
        if isinstance(cost, Work):
            attrs["num_ops"] = round(sum(k.count * k.flops for k in cost.kernels))
            attrs["tensor_size"] = round(sum(k.count * k.bytes for k in cost.kernels))
        else:
            kind, more = _flow(program, op, cost, numbers)
            attrs |= more
        yield Node(
            int(place[op]), program.label(op), kind, deps, int(micros[op]),
            attrs | {LABELS: _labels(program, op)},
        )  # fmt: skip


def _flow(
    program: Program, op: int, cost: Flow, numbers: list[str]
) -> tuple[int, dict[str, Value]]:
    """Return the type and attributes of a flow's node."""
    joint = int(program.joint[op])
    group = int(program.joint_group[joint])
    if cost.name != "send_recv":
        ranks = len(program.groups[group])
        share = cost.bytes / ranks if cost.name == "all_gather" else cost.bytes
        return COLLECTIVE, {
            "comm_type": COLLECTIVES.index(cost.name),
            "comm_size": max(1, math.ceil(cost.count * share)),
            "pg_name": numbers[group],
        }
    members = program.joint_members[joint].tolist()
    sends = [m for m in members if ACTIONS[program.action[m]].startswith("SEND")]
    assert len(sends) == 1 and len(members) == 2  # noqa: PT018  a message has two ends
    receive = next(m for m in members if m != sends[0])
    return SEND if op == sends[0] else RECV, {
        "comm_src": int(program.rank[sends[0]]),
        "comm_dst": int(program.rank[receive]),
        "comm_tag": joint,
        "comm_size": max(1, math.ceil(cost.count * cost.bytes)),
    }


def _labels(program: Program, op: int) -> str:
    stream = program.stream[op]
    numbers = (program.stage[op], program.microbatch[op], program.layer[op], program.step[op])
    lane = "-" if stream == NONE else program.streams[stream]
    return " ".join([ACTIONS[program.action[op]], *map(str, numbers), lane])


def _notes(program: Program, ticks: Int64) -> tuple[str, ...]:
    """Say what whole microseconds change, and what else was."""
    rest = ticks % TICKS_PER_MICROSECOND
    moved = np.where(2 * rest >= TICKS_PER_MICROSECOND, TICKS_PER_MICROSECOND - rest, -rest)
    work = ~program.is_flow
    by_rank = np.bincount(program.rank[work], moved[work], minlength=program.num_ranks)
    worst = int(np.argmax(np.abs(by_rank)))
    short = int((work & (ticks < TICKS_PER_MICROSECOND // 2) & (ticks > 0)).sum())
    notes = [
        "durations are whole microseconds, from half of one upwards: that "
        f"{'shortens' if by_rank[worst] < 0 else 'lengthens'} the work of a rank by at most "
        f"{format_seconds(to_seconds(float(abs(by_rank[worst]))))} (rank {worst})"
        + (f"; {short} ops are shorter than half of one and take none" if short else "")
    ]
    if any(isinstance(c, Flow) and c.count > 1 for c in program.costs):
        notes.append("a flow that is done several times in a row is one node of their bytes")
    if any(isinstance(c, Flow) and not c.bytes for c in program.costs):
        notes.append("flows without bytes move one, for a peer may wait for ever for none")
    return tuple(notes)
