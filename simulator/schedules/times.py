"""When the actions of a bare schedule run, under stated times: what schedulers choose by."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from simulator.errors import DescriptionError
from simulator.schedules.action import Action, Actions


class Times(NamedTuple):
    """Seconds of one microbatch on a stage; a number for all stages, or one for each.

    Only their ratios decide an order.
    """

    forward: float | tuple[float, ...] = 1.0
    input_grad: float | tuple[float, ...] = 1.0
    weight_grad: float | tuple[float, ...] = 1.0
    message: float = 0.0
    """Seconds of a message between stages on different ranks."""

    def by_stage(self, stages: int) -> dict[str, list[float]]:
        """Return the seconds of F, I, W and B (I and W in one) of every stage.

        Raises:
            DescriptionError: when there is not one for each stage.
        """
        problems, columns = [], []
        for name in ("forward", "input_grad", "weight_grad"):
            value = getattr(self, name)
            column = [float(value)] * stages if isinstance(value, (int, float)) else list(value)
            if len(column) != stages:
                problems.append(f"{name} has times of {len(column)} stages, but there are {stages}")
            columns.append(column)
        if problems:
            raise DescriptionError(problems)
        forward, inputs, weights = columns
        whole = [i + w for i, w in zip(inputs, weights, strict=True)]
        return {"F": forward, "I": inputs, "W": weights, "B": whole}


class Target(NamedTuple):
    """What a schedule is made to measure for."""

    times: Times = Times()
    memory: float = 1.0
    """Most that a rank may keep, in what 1F1B keeps on its first rank: p microbatches."""
    kept: float = 1.0
    """Part of a microbatch's activations that stays from its I until its W."""
    synchronous: bool = True
    """Whether a step ends for all ranks at once; else each begins its next one when it is done."""


class Pace(NamedTuple):
    """How long a schedule takes under stated times."""

    span: float
    """Longest time of a rank from its first start to its last end: the time of a step where ranks
    begin the next one without waiting for the others."""
    makespan: float
    """Time until the last rank has ended: that of a step that ends in a synchronisation."""


def pace(actions: Actions, times: Times) -> Pace:
    """Return how long legal action lists of F, B, I and W take, each started as early as possible.

    Raises:
        DescriptionError: when ranks wait for each other's stages.
    """
    home = {(a.stage, a.microbatch): rank for rank, row in enumerate(actions) for a in row}
    last = max(stage for stage, _ in home)
    seconds = times.by_stage(last + 1)
    ends: dict[tuple[int, str, int], float] = {}
    clock = [0.0] * len(actions)
    first = [-1.0] * len(actions)
    position = [0] * len(actions)
    waiting: dict[tuple[int, str, int], list[int]] = {}
    ready = deque(range(len(actions)))
    while ready:
        rank = ready.popleft()
        row = actions[rank]
        while position[rank] < len(row):
            action = row[position[rank]]
            need = needed(action, last)
            start = clock[rank]
            if need is not None:
                if need not in ends:
                    waiting.setdefault(need, []).append(rank)
                    break
                away = home[need[0], need[2]] != rank
                start = max(start, ends[need] + (times.message if away else 0.0))
            kind = "I" if action.kind == "B" else action.kind
            done = (action.stage, kind, action.microbatch)
            if first[rank] < 0:
                first[rank] = start
            ends[done] = clock[rank] = start + seconds[action.kind][action.stage]
            position[rank] += 1
            ready.extend(waiting.pop(done, ()))
    if any(done < len(row) for done, row in zip(position, actions, strict=True)):
        raise DescriptionError("the ranks of a schedule wait for each other")
    spans = (end - start for start, end in zip(first, clock, strict=True))
    return Pace(max(spans), max(clock))


def needed(action: Action, last: int) -> tuple[int, str, int] | None:
    """Return stage, kind and microbatch of what an action waits for, or None.

    `last` is the last stage of the model; a backward's input gradient counts as an I.
    """
    stage, kind, microbatch = action[:3]
    if kind == "F":
        return (stage - 1, "F", microbatch) if stage else None
    if kind == "W":
        return stage, "I", microbatch
    return (stage, "F", microbatch) if stage == last else (stage + 1, "I", microbatch)
