"""Passes: functions that take action lists and return new ones, with more actions in them."""

from __future__ import annotations

from simulator.schedules.action import Action, Actions


def add_send_recv(actions: Actions) -> Actions:
    """Return action lists with a send after each producer and a receive before each consumer.

    Stages on the same rank hand over without a message.
    """
    home = {action.stage: rank for rank, row in enumerate(actions) for action in row}
    last = max(home, default=0)
    rows = []
    for rank, row in enumerate(actions):
        out: list[Action] = []
        for action in row:
            stage, kind, m = action
            if kind == "F" and stage > 0 and home[stage - 1] != rank:
                out.append(Action(stage, "RECV_F", m))
            if kind in ("B", "I") and stage < last and home[stage + 1] != rank:
                out.append(Action(stage, "RECV_B", m))
            out.append(action)
            if kind == "F" and stage < last and home[stage + 1] != rank:
                out.append(Action(stage, "SEND_F", m))
            if kind in ("B", "I") and stage > 0 and home[stage - 1] != rank:
                out.append(Action(stage, "SEND_B", m))
        rows.append(tuple(out))
    return tuple(rows)


def add_reduce_grad(actions: Actions) -> Actions:
    """Return action lists with a REDUCE_GRAD after the last backward of each stage."""
    return _after_last_backward(actions, "REDUCE_GRAD")


def add_optimizer(actions: Actions) -> Actions:
    """Return action lists with the optimizer steps of a rank's stages at its end."""
    return tuple(
        (*row, *(Action(stage, "OPT") for stage in sorted({a.stage for a in row})))
        for row in actions
    )


def _after_last_backward(actions: Actions, kind: str) -> Actions:
    rows = []
    for row in actions:
        last = {a.stage: i for i, a in enumerate(row) if a.kind in ("B", "W")}
        at = {i: stage for stage, i in last.items()}
        rows.append(tuple(
            out
            for i, action in enumerate(row)
            for out in ((action, Action(at[i], kind)) if i in at else (action,))
        ))  # fmt: skip
    return tuple(rows)
