"""Whether action lists are a legal schedule; what is wrong is shown in their grid."""

from __future__ import annotations

from simulator.errors import ScheduleError
from simulator.program import ACTION_CODE, NONE
from simulator.schedules.action import Action, Actions, grid


def check_actions(actions: Actions) -> None:
    """Check that every microbatch passes every stage once, forward before backward.

    Raises:
        ScheduleError: with the grid and the offending cell marked.
    """
    if not any(actions):
        raise ScheduleError("a schedule needs at least one action")
    home: dict[int, int] = {}
    seen: set[Action] = set()
    for rank, row in enumerate(actions):
        for position, action in enumerate(row):
            complaint = _complaint(action, rank, home, seen)
            if complaint:
                raise ScheduleError(f"{complaint}\n{grid(actions, (rank, position))}")
            seen.add(action)
            home[action.stage] = rank
    _check_complete(actions, home, seen)
    if any(a.kind in _OTHER_SIDE for a in seen):
        _check_messages(actions, home, seen)


_OTHER_SIDE = {"SEND_F": ("RECV_F", 1), "RECV_F": ("SEND_F", -1),
               "SEND_B": ("RECV_B", -1), "RECV_B": ("SEND_B", 1)}  # fmt: skip
"""The other side of a message: its kind, and how many stages further it is done."""


def _check_messages(actions: Actions, home: dict[int, int], seen: set[Action]) -> None:
    """Check that messages have two sides, and come before what needs them, after what they send."""
    last = max(home)
    for rank, row in enumerate(actions):
        before: set[tuple[str, int, int]] = set()
        for position, action in enumerate(row):
            stage, kind, m = action
            complaint = None
            if kind in _OTHER_SIDE:
                other, offset = _OTHER_SIDE[kind]
                if Action(stage + offset, other, m) not in seen:
                    complaint = f"{action} on rank {rank} has no {stage + offset}{other}{m}"
            if kind == "F" and stage > 0 and home[stage - 1] != rank:
                complaint = _absent(action, rank, "RECV_F", before)
            elif kind in ("B", "I") and stage < last and home[stage + 1] != rank:
                complaint = _absent(action, rank, "RECV_B", before)
            elif kind == "SEND_F" and ("F", stage, m) not in before:
                complaint = f"{action} on rank {rank} comes before {stage}F{m}, which it sends"
            elif kind == "SEND_B" and not {("B", stage, m), ("I", stage, m)} & before:
                complaint = f"{action} on rank {rank} comes before {stage}B{m}, which it sends"
            if complaint:
                raise ScheduleError(f"{complaint}\n{grid(actions, (rank, position))}")
            before.add((kind, stage, m))


def _absent(
    action: Action, rank: int, receive: str, before: set[tuple[str, int, int]]
) -> str | None:
    stage, _, m = action
    if (receive, stage, m) in before:
        return None
    return f"{action} on rank {rank} has no {stage}{receive}{m} before it"


def _complaint(action: Action, rank: int, home: dict[int, int], seen: set[Action]) -> str | None:
    stage, kind, microbatch = action
    if kind not in ACTION_CODE:
        return f"{kind!r} is not an action kind, on rank {rank}"
    if stage < 0 or microbatch < NONE:
        return f"{action} on rank {rank}: stages and microbatches count from 0"
    if (microbatch == NONE) != (kind in ("REDUCE_GRAD", "OPT")):
        return f"{action} on rank {rank} must {'not ' * (microbatch != NONE)}name a microbatch"
    if kind not in ("REDUCE_GRAD", "OPT") and Action(stage, "OPT") in seen:
        return f"{action} on rank {rank} comes after the optimizer step of its stage"
    if action in seen:
        return f"{action} on rank {rank} is done twice"
    if home.get(stage, rank) != rank:
        return f"stage {stage} is on rank {home[stage]} and on rank {rank}"
    if kind in ("B", "I") and Action(stage, "F", microbatch) not in seen:
        return f"{action} on rank {rank} comes before its forward {stage}F{microbatch}"
    if kind == "W" and Action(stage, "I", microbatch) not in seen:
        return f"{action} on rank {rank} comes before {stage}I{microbatch}"
    return None


def _check_complete(actions: Actions, home: dict[int, int], seen: set[Action]) -> None:
    stages = max(home, default=-1) + 1
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
