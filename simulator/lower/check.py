"""Checks of a Program: what must hold of any, whoever made it.

Every joint op has exactly the members of its group, once each, a one-sided one the first only; the
sides of a message agree on its size; no op waits, directly or around a corner, for itself.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from simulator.errors import DeadlockError, ProgramError
from simulator.program import NONE, ONE_SIDED, SERVED, Flow, Int64, Program, ranges

MOST_LINES = 16
"""Lines of a cycle that are told; the middle of a longer one is left out."""


def check(program: Program) -> Program:
    """Return the program after checking it.

    A tiled program is checked on one class of every joint op: the others are its copies.

    Raises:
        ProgramError: when members of a joint op are missing, doubled or disagree.
        DeadlockError: when ops wait for each other in a cycle.
    """
    _check_columns(program)
    _check_members(program)
    if len(program.units[1]) < len(program.rank):
        raise DeadlockError(deadlock_of(program))
    return program


def _check_columns(program: Program) -> None:
    n = len(program.rank)
    for name, column, limit in (
        ("cost", program.cost, len(program.costs)),
        ("predecessor", program.preds, n),
        ("rank", program.rank, len(program.tile_ranks)),
        ("stream", program.stream[program.stream != NONE], len(program.streams)),
        ("joint number", program.joint[program.joint != NONE], len(program.joint_group)),
        ("group", program.joint_group, len(program.groups)),
        ("desk", program.slot[program.slot != NONE], len(program.servers)),
    ):
        if len(column) and (column.min() < 0 or column.max() >= limit):
            raise ProgramError(f"a {name} of the program lies outside 0..{limit - 1}")
    if (program.is_flow != (program.joint != NONE)).any():
        op = int(np.argmax(program.is_flow != (program.joint != NONE)))
        raise ProgramError(f"op {op} ({program.label(op)}): a flow is joint and nothing else is")
    if min(program.servers, default=1) < 1:
        raise ProgramError("a desk of the program has no server")
    if len(program.slot) and (program.is_flow & (program.slot != NONE)).any():
        op = int(np.argmax(program.is_flow & (program.slot != NONE)))
        raise ProgramError(f"op {op} ({program.label(op)}): a flow cannot queue for a server")


def _check_members(program: Program) -> None:
    """Check one instance of every joint op: the class of its partition that tile 0 is in."""
    members, classes = program.joint_members, program.classes
    present = np.diff(members.offset)
    if (present == 0).any():
        raise ProgramError(f"joint op {int(np.argmin(present))} has no members")
    group = program.joint_group + classes[program.partition, 0]
    sizes = np.diff(program.groups.offset)[group]
    _check_servers(program, group)
    joined = np.where(_is_one_sided(program), np.minimum(sizes, 1), sizes)
    tiles = [np.flatnonzero(row == row[0]) for row in classes]
    here = present * np.array([len(t) for t in tiles])[program.partition]
    if (here != joined).any():
        joint = int(np.argmax(here != joined))
        raise ProgramError(_incomplete(program, joint, tiles, int(group[joint])))
    distinct = _distinct_joints(program, group)
    for partition, meeting in enumerate(tiles):
        joints = distinct[program.partition[distinct] == partition]
        rows = members.ranks[ranges(members.offset[joints], present[joints])]
        ranks = program.tile_ranks[program.rank[rows]][:, meeting]
        owner = np.repeat(joints, present[joints])
        key_here = np.sort((owner[:, None] * program.num_ranks + ranks).ravel())
        at = ranges(program.groups.offset[group[joints]], joined[joints])
        owner = np.repeat(joints, joined[joints])
        key_group = np.sort(owner * program.num_ranks + program.groups.ranks[at])
        wrong = key_here != key_group
        wrong[1:] |= key_group[1:] == key_group[:-1]  # a rank that is twice in its group
        if wrong.any():
            joint = int(owner[np.argmax(wrong)])
            raise ProgramError(_incomplete(program, joint, tiles, int(group[joint])))
    cost = program.cost[members.ranks]
    first = np.repeat(cost[members.offset[:-1]], present)
    if (cost != first).any():
        op = int(members.ranks[np.argmax(cost != first)])
        raise ProgramError(
            f"op {op} (rank {program.rank[op]} {program.label(op)}) disagrees with the other "
            "members of its joint op about its cost"
        )


def _is_one_sided(program: Program) -> npt.NDArray[np.bool_]:
    """Return whether each joint op is of the first rank of its group only."""
    members = program.joint_members
    named = [isinstance(cost, Flow) and cost.name in ONE_SIDED for cost in program.costs]
    first = members.ranks[members.offset[:-1]]
    one_sided: npt.NDArray[np.bool_] = np.array(named, bool)[program.cost[first]]
    return one_sided


def _check_servers(program: Program, group: Int64) -> None:
    """Check that each exchange with servers has some, and its group the ranks they lie on."""
    servers = np.array([cost.servers if isinstance(cost, Flow) else 0 for cost in program.costs])
    for number, cost in enumerate(program.costs):
        if (cost.name in SERVED and isinstance(cost, Flow)) != (servers[number] > 0):
            raise ProgramError(
                f"cost {number} ({cost.name}) has {servers[number]} servers; a {SERVED[0]}, "
                f"{' or '.join(SERVED[1:])} has some and nothing else has"
            )
    if not servers.any():
        return
    members = program.joint_members
    of_joint = servers[program.cost[members.ranks[members.offset[:-1]]]]
    sizes = np.diff(program.groups.offset)
    used = np.unique(group[of_joint > 0]).astype(np.int64)
    at = ranges(program.groups.offset[used], sizes[used])
    key = np.sort(np.repeat(used, sizes[used]) * program.num_ranks + program.groups.ranks[at])
    if (twice := key[1:][key[1:] == key[:-1]]).size:
        of, rank = divmod(int(twice[0]), program.num_ranks)
        raise ProgramError(f"group {of} of an exchange with servers holds rank {rank} twice")
    sizes = sizes[group]
    if (of_joint > sizes).any():
        joint = int(np.argmax(of_joint > sizes))
        raise ProgramError(
            f"joint op {joint} has {of_joint[joint]} servers but joins {sizes[joint]} ranks"
        )


def _distinct_joints(program: Program, group: Int64) -> Int64:
    """Return joint ops that stand for all: those of one group with members on the same ranks.

    The ranks of up to two members are compared; a joint op of more stands for itself.
    """
    members = program.joint_members
    first, last = members.offset[:-1], members.offset[1:] - 1
    ends = [program.rank[members.ranks[at]].astype(np.int64) for at in (first, last)]
    width = len(program.tile_ranks) + 1
    key = (group * width + ends[0]) * width + ends[1]
    alone = np.flatnonzero(last - first > 1)
    _, chosen = np.unique(key, return_index=True)
    return np.union1d(chosen, alone)


def _incomplete(program: Program, joint: int, tiles: list[Int64], group: int) -> str:
    rows = program.joint_members[joint]
    meeting = tiles[program.partition[joint]]
    here = sorted(program.tile_ranks[program.rank[rows]][:, meeting].ravel().tolist())
    ops = ", ".join(f"rank {program.tile_ranks[program.rank[o], 0]} {program.label(o)}"
                    for o in rows[:4])  # fmt: skip
    return (
        f"joint op {joint} joins ranks {_short(program.groups[group].tolist())} "
        f"but has ops on {_short(here)}: {ops}"
    )


def _short(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"[{shown}, ...]" if len(ranks) > 8 else f"[{shown}]"


def deadlock_of(program: Program) -> str:
    """Return who waits for whom in a program whose units do not cover all of its rows."""
    done = np.zeros(len(program.rank), bool)
    done[program.units[1]] = True
    return explain_deadlock(program.flat, np.repeat(done, program.num_tiles))


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
        for a, reason, b in _in_short(cycle)
    ]
    if len(lines) > MOST_LINES:
        half = MOST_LINES // 2
        lines[half:-half] = [f"  ... and {len(lines) - 2 * half} more ..."]
    ranks = sorted({int(program.rank[a]) for a, _, _ in cycle})
    return (
        f"deadlock between ranks {_short(ranks)}, {len(cycle)} ops wait in a cycle:\n"
        + "\n".join(lines)
    )


def _in_short(steps: list[tuple[int, str, int]]) -> list[tuple[int, str, int]]:
    """Return steps with those in a row that wait on the same stream as one."""
    short: list[tuple[int, str, int]] = []
    for op, reason, blocker in steps:
        if short and reason.startswith("is behind") and short[-1][1] == reason:
            op = short.pop()[0]
        short.append((op, reason, blocker))
    return short


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
    held = [m for m in members if m != op and _held(program, m, done)]
    return ("waits to meet", held[0]) if held else ("waits for its links, as does", op)


def _held(program: Program, op: int, done: npt.NDArray[np.bool_]) -> bool:
    previous = int(program.stream_previous[op])
    behind = previous != NONE and not done[previous]
    return bool(behind or not done[program.predecessors(op)].all())
