"""Calls of several ranks that are one: collectives by group and order, messages by their ends.

Calls of a group are numbered by the trace, or else counted from the start of the step; they match
for as long as all ranks name the same operation. A message is one send and one receive: of the same
stage and microbatch where ranges say so, else the n-th from one rank to the other in the step.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from simulator.exchange.kineto.calls import Call
from simulator.exchange.kineto.ranks import RankOps
from simulator.program import ACTIONS, NONE

Key: TypeAlias = tuple[Any, ...]
Member: TypeAlias = tuple[int, int]
"""Position of a rank among those read, and of an op among the rank's."""

ONE_SIDE = ("send", "recv")


class Matched(NamedTuple):
    """Which calls are one."""

    members: tuple[tuple[Member, ...], ...]
    """Of each joint call, by rank; at least two."""
    is_message: tuple[bool, ...]
    alone: int
    """Calls that no call of another rank matches."""
    groupless: int
    """Of them those whose group is not known."""


def matched(ranks: Sequence[RankOps]) -> Matched:
    """Return the calls of ranks that are one."""
    found: defaultdict[Key, list[Member]] = defaultdict(list)
    broken: dict[Key, float] = {}
    alone = groupless = 0
    for position, ops in enumerate(ranks):
        count: Counter[Key] = Counter()
        for i in _in_order(ops):
            call = ops.calls[i]
            assert call is not None  # those are chosen
            key = _key(ops, i, call)
            if key is None:
                alone += 1
                groupless += not call.group
                continue
            number = count[key]
            count[key] += 1
            found[*key, number].append((position, i))
    members, is_message = [], []
    for key in sorted(found, key=lambda key: (*map(str, key[:-1]), f"{key[-1]:012d}")):
        some = found[key]
        calls = [_call(ranks, member) for member in some]
        message = calls[0].operation in ONE_SIDE
        stream = key[:-1]
        agree = len({call.operation for call in calls}) == (2 if message else 1)
        if len(some) < 2 or not agree or key[-1] >= broken.get(stream, np.inf):
            if not agree:  # from here on the ranks do not do the same
                broken[stream] = min(broken.get(stream, np.inf), key[-1])
            alone += len(some)
            continue
        members.append(tuple(some))
        is_message.append(message)
    return Matched(tuple(members), tuple(is_message), alone, groupless)


def _in_order(ops: RankOps) -> list[int]:
    """Return the calls of a rank in the order in which the host made them."""
    calls = np.flatnonzero([call is not None for call in ops.calls])
    when = np.where(ops.launched[calls] == NONE, ops.start[calls], ops.launched[calls])
    order: list[int] = calls[np.argsort(when, kind="stable")].tolist()
    return order


def _key(ops: RankOps, i: int, call: Call) -> Key | None:
    """Return what calls share that are counted together; None for one that cannot be told."""
    labels = ops.labels
    step, stage, microbatch = (int(c[i]) for c in (labels.step, labels.stage, labels.microbatch))
    kind = ACTIONS[labels.action[i]]
    if stage != NONE and call.operation in ONE_SIDE and call.peer is None:
        sender = stage - (kind == "RECV_F") + (kind == "RECV_B")
        return ("stages", kind[-1], sender, microbatch, step)
    if call.operation in ONE_SIDE:
        if call.peer is None:
            return None
        ends = (ops.rank, call.peer) if call.operation == "send" else (call.peer, ops.rank)
        return ("message", *ends, step)
    if not call.group and kind == "REDUCE_GRAD" and stage != NONE:
        return ("sum", stage, microbatch, step)
    if not call.group or call.operation == "send_recv":
        return None
    if call.number is not None:
        return ("numbered", call.group, call.ranks, call.number)
    return ("group", call.group, call.ranks, step)


def _call(ranks: Sequence[RankOps], member: Member) -> Call:
    call = ranks[member[0]].calls[member[1]]
    assert call is not None
    return call
