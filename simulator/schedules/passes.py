"""Passes: functions that take action lists and return new ones, with more actions in them."""

from __future__ import annotations

from simulator.program import NONE
from simulator.schedules.action import Action, Actions, cells


def stages_of_ranks(actions: Actions) -> tuple[tuple[int, ...], ...]:
    """Return the stages that each rank holds, in ascending order; one may lie on several ranks."""
    return tuple(tuple(sorted({a.stage for a in row})) for row in actions)


def homes(actions: Actions) -> dict[tuple[int, int], int]:
    """Return the rank on which each (stage, microbatch) is computed.

    In bidirectional schedules a stage lies on two ranks, on each for its own microbatches.
    """
    passes = ("F", "B", "I", "W")
    return {
        (a.stage, a.microbatch): rank
        for rank, row in enumerate(actions)
        for a in row
        if a.kind in passes
    }


def add_send_recv(actions: Actions) -> Actions:
    """Return action lists with a send after each producer and a receive before each consumer.

    Stages on the same rank hand over without a message. Both receives of a pair come before it, and
    both sends after it. Lists that hold messages already stay as they are.
    """
    if _holds(actions, *OTHER_SIDE):
        return actions
    home = homes(actions)
    rows = []
    for rank, row in enumerate(actions):
        out: list[Action] = []
        for cell in cells(row):
            out += [message for a in cell for message in _messages(a, rank, home, _BEFORE)]
            out += cell
            out += [message for a in cell for message in _messages(a, rank, home, _AFTER)]
        rows.append(tuple(out))
    return tuple(rows)


def _holds(actions: Actions, *kinds: str) -> bool:
    return any(a.kind in kinds for row in actions for a in row)


OTHER_SIDE = {"SEND_F": ("RECV_F", 1), "RECV_F": ("SEND_F", -1),
              "SEND_B": ("RECV_B", -1), "RECV_B": ("SEND_B", 1)}  # fmt: skip
"""The other side of a message: its kind, and how many stages further it is done."""

_BEFORE = {"F": ("RECV_F", -1), "B": ("RECV_B", 1), "I": ("RECV_B", 1)}
_AFTER = {"F": ("SEND_F", 1), "B": ("SEND_B", -1), "I": ("SEND_B", -1)}
"""By computation: the message before it, or after it, and how many stages further its peer is."""


def _messages(
    action: Action, rank: int, home: dict[tuple[int, int], int], kinds: dict[str, tuple[str, int]]
) -> tuple[Action, ...]:
    if action.kind not in kinds:
        return ()
    kind, offset = kinds[action.kind]
    peer = home.get((action.stage + offset, action.microbatch), rank)
    return (Action(action.stage, kind, action.microbatch),) if peer != rank else ()


def add_reduce_grad(actions: Actions) -> Actions:
    """Return action lists with a REDUCE_GRAD after the last backward of each stage of a rank.

    Where an optimizer step follows each backward, so does a REDUCE_GRAD of its microbatch. Lists
    that hold any already stay as they are.
    """
    if _holds(actions, "REDUCE_GRAD"):
        return actions
    rows = []
    for row in actions:
        every = {a for a in row if a.kind == "OPT" and a.microbatch != NONE}
        last = {a.stage: i for i, a in enumerate(row) if a.kind in ("B", "W")}
        ends = {i: Action(stage, "REDUCE_GRAD") for stage, i in last.items()}
        if every:
            ends = {i: a._replace(kind="REDUCE_GRAD") for i, a in enumerate(row)
                    if a.kind in ("B", "W") and a._replace(kind="OPT") in every}  # fmt: skip
        rows.append(tuple(
            out
            for i, action in enumerate(row)
            for out in ((action, ends[i]) if i in ends else (action,))
        ))  # fmt: skip
    return tuple(rows)


def add_optimizer(actions: Actions) -> Actions:
    """Return action lists with the optimizer steps of a rank's stages at its end.

    Lists that hold optimizer steps already stay as they are.
    """
    if _holds(actions, "OPT"):
        return actions
    return tuple(
        (*row, *(Action(stage, "OPT") for stage in sorted({a.stage for a in row})))
        for row in actions
    )
