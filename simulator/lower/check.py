"""Checks of a Program: what must hold of any, whoever made it.

Every joint op has exactly the members of its group, once each; the sides of a message agree on its
size; no op waits, directly or around a corner, for itself.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from simulator.errors import DeadlockError, ProgramError
from simulator.program import NONE, Program


def check(program: Program) -> Program:
    """Return the program after checking it.

    Raises:
        ProgramError: when members of a joint op are missing, doubled or disagree.
        DeadlockError: when ops wait for each other in a cycle.
    """
    _check_columns(program)
    _check_members(program)
    rank = topological_rank(program)
    if (rank == NONE).any():
        raise DeadlockError(explain_deadlock(program, rank != NONE))
    return program


def _check_columns(program: Program) -> None:
    n = len(program)
    for name, column, limit in (
        ("cost", program.cost, len(program.costs)),
        ("predecessor", program.preds, n),
        ("rank", program.rank, program.num_ranks),
    ):
        if len(column) and (column.min() < 0 or column.max() >= limit):
            raise ProgramError(f"a {name} of the program lies outside 0..{limit - 1}")
    if (program.is_flow != (program.joint != NONE)).any():
        op = int(np.argmax(program.is_flow != (program.joint != NONE)))
        raise ProgramError(f"op {op} ({program.label(op)}): a flow is joint and nothing else is")


def _check_members(program: Program) -> None:
    members = program.joint_members
    sizes = np.diff(program.groups.offset)[program.joint_group]
    present = np.diff(members.offset)
    if (present != sizes).any():
        joint = int(np.argmax(present != sizes))
        group = program.groups[program.joint_group[joint]].tolist()
        here = sorted(program.rank[members[joint]].tolist())
        ops = ", ".join(f"rank {program.rank[o]} {program.label(o)}" for o in members[joint][:4])
        raise ProgramError(
            f"joint op {joint} joins ranks {_short(group)} "
            f"but has ops only on {_short(here)}: {ops}"
        )
    owner = np.repeat(np.arange(len(sizes)), present)
    key_here = owner * program.num_ranks + program.rank[members.ranks]
    offset = program.groups.offset[program.joint_group]
    within = np.arange(len(owner)) - np.repeat(members.offset[:-1], present)
    key_group = owner * program.num_ranks + program.groups.ranks[np.repeat(offset, sizes) + within]
    if (np.sort(key_here) != np.sort(key_group)).any():
        joint = int(owner[np.argmax(np.sort(key_here) != np.sort(key_group))])
        here = sorted(program.rank[members[joint]].tolist())
        group = program.groups[program.joint_group[joint]].tolist()
        raise ProgramError(f"joint op {joint} has ops on {_short(here)} but joins {_short(group)}")
    cost = program.cost[members.ranks]
    first = np.repeat(cost[members.offset[:-1]], present)
    if (cost != first).any():
        op = int(members.ranks[np.argmax(cost != first)])
        raise ProgramError(
            f"op {op} (rank {program.rank[op]} {program.label(op)}) disagrees with the other "
            "members of its joint op about its cost"
        )


def _short(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"[{shown}, ...]" if len(ranks) > 8 else f"[{shown}]"


def topological_rank(program: Program) -> npt.NDArray[np.int64]:
    """Return the depth of every op in the graph of streams, predecessors and joint ops.

    Ops that can never start, because they wait for themselves around a cycle, get NONE. Each round
    takes all ops that are ready, so the work is in arrays and the rounds are the longest chain.
    """
    node, num_nodes = joint_nodes(program)
    source, target = _edges(program, node)
    order = np.argsort(source, kind="stable")
    source, target = source[order], target[order]
    offset = np.searchsorted(source, np.arange(num_nodes + 1))
    waiting = np.bincount(target, minlength=num_nodes)
    depth = np.full(num_nodes, NONE, np.int64)
    ready, level = np.flatnonzero(waiting == 0), 0
    while len(ready):
        depth[ready] = level
        begin, count = offset[ready], offset[ready + 1] - offset[ready]
        at = np.repeat(begin - np.concatenate([[0], np.cumsum(count)[:-1]]), count)
        reached = target[at + np.arange(len(at))]
        np.subtract.at(waiting, reached, 1)
        reached = np.unique(reached)
        ready, level = reached[waiting[reached] == 0], level + 1
    return depth[node]


def joint_nodes(program: Program) -> tuple[npt.NDArray[np.int64], int]:
    """Return the node of each op, where the members of a joint op are one node, and their count."""
    alone = program.joint == NONE
    node = np.empty(len(program), np.int64)
    node[~alone] = program.joint[~alone]
    node[alone] = len(program.joint_group) + np.arange(int(alone.sum()))
    return node, len(program.joint_group) + int(alone.sum())


def _edges(
    program: Program, node: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    later = np.repeat(np.arange(len(program)), np.diff(program.pred_offset))
    in_stream = np.flatnonzero(program.stream_previous != NONE)
    source = np.concatenate([program.preds, program.stream_previous[in_stream]])
    target = np.concatenate([later, in_stream])
    return node[source], node[target]


def explain_deadlock(program: Program, done: npt.NDArray[np.bool_]) -> str:
    """Return who waits for whom, around one cycle of ops that can never start."""
    op = int(np.argmin(done))
    seen: dict[int, int] = {}
    steps: list[tuple[int, str, int]] = []
    while op not in seen:
        seen[op] = len(steps)
        reason, blocker = _blocker(program, op, done)
        steps.append((op, reason, blocker))
        op = blocker
    cycle = steps[seen[op] :]
    lines = [
        f"  rank {program.rank[a]}: {program.label(a)} (op {a}) {reason} "
        f"rank {program.rank[b]}: {program.label(b)} (op {b})"
        for a, reason, b in cycle
    ]
    ranks = sorted({int(program.rank[a]) for a, _, _ in cycle})
    return (
        f"deadlock between ranks {_short(ranks)}, {len(cycle)} ops wait in a cycle:\n"
        + "\n".join(lines)
    )


def _blocker(program: Program, op: int, done: npt.NDArray[np.bool_]) -> tuple[str, int]:
    """Return why an op cannot start, and the op that it waits for."""
    previous = int(program.stream_previous[op])
    if previous != NONE and not done[previous]:
        return f"is behind, on stream {program.streams[program.stream[op]]!r},", previous
    for pred in program.predecessors(op).tolist():
        if not done[pred]:
            return "needs the result of", pred
    # It has arrived: another member of its joint op has not.
    members = program.joint_members[int(program.joint[op])].tolist()
    return "waits to meet", next(m for m in members if m != op and _held(program, m, done))


def _held(program: Program, op: int, done: npt.NDArray[np.bool_]) -> bool:
    previous = int(program.stream_previous[op])
    behind = previous != NONE and not done[previous]
    return bool(behind or not done[program.predecessors(op)].all())
