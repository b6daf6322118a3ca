"""Whether action lists are a legal schedule; what is wrong is shown in their grid."""

from __future__ import annotations

from simulator.errors import ScheduleError
from simulator.program import ACTION_CODE, NONE
from simulator.schedules.action import Action, Actions, cells, grid
from simulator.schedules.passes import OTHER_SIDE, homes

UPDATES = ("REDUCE_GRAD", "OPT")
"""What concerns all microbatches of a stage, or ends one of an asynchronous schedule."""


def check_actions(actions: Actions) -> None:
    """Check that every microbatch passes every stage once, forward before backward.

    A stage may lie on several ranks; each microbatch passes it on one of them.

    Raises:
        ScheduleError: with the grid and the offending cell marked.
    """
    if not any(actions):
        raise ScheduleError("a schedule needs at least one action")
    home: dict[tuple[int, int], int] = {}
    seen: set[Action] = set()
    for rank, row in enumerate(actions):
        updated: set[Action] = set()
        for position, action in enumerate(row):
            complaint = _complaint(action, rank, home, seen, updated)
            if action.paired and not complaint:
                complaint = _unpaired(row, position, rank)
            if complaint:
                raise _error(complaint, actions, (rank, position))
            if action.kind in UPDATES:
                updated.add(action)
            else:
                seen.add(action.alone)
                home[action.stage, action.microbatch] = rank
    _check_complete(actions, seen)
    _check_updates(actions)
    if any(a.kind in OTHER_SIDE for a in seen):
        _check_messages(actions, seen)


def _error(complaint: str, actions: Actions, place: tuple[int, int]) -> ScheduleError:
    shown = grid(actions, marks={place: "<-- ERROR HERE"})
    return ScheduleError(f"{complaint}\n{shown}", place)


def _check_messages(actions: Actions, seen: set[Action]) -> None:
    """Check that messages have two sides, and come before what needs them, after what they send."""
    home = homes(actions)
    for rank, row in enumerate(actions):
        before: set[Action] = set()
        position = 0
        for cell in cells(row):
            for offset, action in enumerate(cell):
                complaint = _message_complaint(action, rank, home, seen, before)
                if complaint:
                    raise _error(complaint, actions, (rank, position + offset))
            before.update(a.alone for a in cell)
            position += len(cell)


def _message_complaint(
    action: Action, rank: int, home: dict[tuple[int, int], int],
    seen: set[Action], before: set[Action],
) -> str | None:  # fmt: skip
    stage, kind, m, _ = action
    if kind in OTHER_SIDE:
        other, offset = OTHER_SIDE[kind]
        if Action(stage + offset, other, m) not in seen:
            return f"{action} on rank {rank} has no {stage + offset}{other}{m}"
    if kind == "F" and home.get((stage - 1, m), rank) != rank:
        return _absent(action, rank, "RECV_F", before)
    if kind in ("B", "I") and home.get((stage + 1, m), rank) != rank:
        return _absent(action, rank, "RECV_B", before)
    if kind == "SEND_F" and Action(stage, "F", m) not in before:
        return f"{action} on rank {rank} comes before {stage}F{m}, which it sends"
    if kind == "SEND_B" and not {Action(stage, "B", m), Action(stage, "I", m)} & before:
        return f"{action} on rank {rank} comes before {stage}B{m}, which it sends"
    return None


def _absent(action: Action, rank: int, receive: str, before: set[Action]) -> str | None:
    stage, m = action.stage, action.microbatch
    if Action(stage, receive, m) in before:
        return None
    return f"{action} on rank {rank} has no {stage}{receive}{m} before it"


def _complaint(
    action: Action, rank: int, home: dict[tuple[int, int], int],
    seen: set[Action], updated: set[Action],
) -> str | None:  # fmt: skip
    """Say what is wrong with an action where it stands."""
    stage, kind, microbatch, _ = action
    elsewhere = home.get((stage, microbatch), rank)
    wrong = None
    if kind not in ACTION_CODE:
        return f"{kind!r} is not an action kind, on rank {rank}"
    if stage < 0 or microbatch < NONE:
        wrong = ": stages and microbatches count from 0"
    elif kind in UPDATES:
        done = microbatch == NONE or any(Action(stage, k, microbatch) in seen for k in ("B", "W"))
        wrong = None if done else f" comes before its backward {stage}B{microbatch}"
    elif microbatch == NONE:
        wrong = " must name a microbatch"
    elif updated and Action(stage, "OPT") in updated:
        wrong = " comes after the optimizer step of its stage"
    elif elsewhere != rank:
        return (
            f"microbatch {microbatch} passes stage {stage} on rank {elsewhere} and on rank {rank}"
        )
    elif kind in ("B", "I") and Action(stage, "F", microbatch) not in seen:
        wrong = f" comes before its forward {stage}F{microbatch}"
    elif kind == "W" and Action(stage, "I", microbatch) not in seen:
        wrong = f" comes before {stage}I{microbatch}"
    if wrong is None and action.alone in (updated if kind in UPDATES else seen):
        wrong = " is done twice"
    return wrong and f"{action} on rank {rank}{wrong}"


def _unpaired(row: tuple[Action, ...], position: int, rank: int) -> str | None:
    """Say why an action cannot run together with the one after it."""
    action = row[position]
    where = f"{action} on rank {rank}"
    if position + 1 == len(row):
        return f"{where} is paired with nothing after it"
    other = row[position + 1]
    if action.kind != "F" or other.kind not in ("B", "I") or other.paired:
        return f"{where} is paired with {other}; a pair is a forward and then a backward"
    if action.microbatch == other.microbatch:
        return f"{where} is paired with {other} of the same microbatch, which needs it"
    return None


def _check_complete(actions: Actions, seen: set[Action]) -> None:
    stages = max((a.stage for a in seen), default=-1) + 1
    microbatches = max((a.microbatch for a in seen), default=-1) + 1
    if not microbatches:
        raise ScheduleError(f"a schedule needs at least one forward\n{grid(actions)}")
    for stage in range(stages):
        for m in range(microbatches):
            forward = Action(stage, "F", m) in seen
            whole = Action(stage, "B", m) in seen
            split = Action(stage, "I", m) in seen and Action(stage, "W", m) in seen
            if not forward or whole == split:
                missing = f"{stage}F{m}" if not forward else f"{stage}B{m} (or both I and W)"
                raise ScheduleError(f"{missing} is missing\n{grid(actions)}")


def _check_updates(actions: Actions) -> None:
    """Check that updates are on ranks that hold their stage, and either all or none by microbatch.

    An update that names a microbatch belongs to an asynchronous schedule.
    """
    every = {a for row in actions for a in row if a.kind == "OPT"}
    mixed = len({a.microbatch == NONE for a in every}) > 1
    for rank, row in enumerate(actions):
        held = {a.stage for a in row if a.kind not in UPDATES}
        for position, action in enumerate(row):
            if action.kind not in UPDATES:
                continue
            complaint = None
            if action.stage not in held:
                complaint = f"{action} on rank {rank}, which does nothing else of its stage"
            elif mixed and action.kind == "OPT" and action.microbatch != NONE:
                complaint = f"{action} on rank {rank} names a microbatch, and other steps do not"
            if complaint:
                raise _error(complaint, actions, (rank, position))
