"""Actions: the cells of a schedule, how they are spelled, and lists of them as text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from simulator.errors import ScheduleError
from simulator.program import ACTIONS, NONE


class Action(NamedTuple):
    """One cell of a schedule."""

    stage: int
    kind: str
    """A key of `ACTION_CODE`."""
    microbatch: int = NONE
    """NONE for what concerns all microbatches: REDUCE_GRAD and OPT."""

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.microbatch == NONE else self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Return the action that prints as `text`.

        Raises:
            ScheduleError: when no action does.
        """
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(f"{text!r} is not an action; write for example 3F0 or 1SEND_F2")
        return cls(int(match[1]), match[2], int(match[3]) if match[3] else NONE)


_ACTION = re.compile(rf"(\d+)({'|'.join(sorted(ACTIONS, key=len, reverse=True))})(\d*)")

Actions: TypeAlias = tuple[tuple[Action, ...], ...]
"""Action lists by pipeline rank."""


def read_actions(rows: object) -> Actions:
    """Return action lists from lists of actions, or of their texts.

    Raises:
        ScheduleError: when something in them is neither.
    """
    if not isinstance(rows, (list, tuple)) or not all(isinstance(r, (list, tuple)) for r in rows):
        raise ScheduleError(f"a schedule is a list of actions for each rank, not {rows!r}")
    return tuple(
        tuple(a if isinstance(a, Action) else Action.parse(str(a)) for a in row) for row in rows
    )


def grid(actions: Sequence[Sequence[Action]], error: tuple[int, int] | None = None) -> str:
    """Return action lists as text, a row a rank; `error` is the (rank, position) to point at."""
    width = max((len(str(a)) for row in actions for a in row), default=1)
    lines = []
    for rank, row in enumerate(actions):
        cells = [
            f"{action!s:<{width}}" + (" <-- ERROR HERE" if (rank, i) == error else "")
            for i, action in enumerate(row)
        ]
        lines.append(f"rank {rank}: {' '.join(cells)}".rstrip())
    return "\n".join(lines)


def parse_grid(text: str) -> Actions:
    """Return the action lists that `grid` printed."""
    rows = [line.partition(":")[2].split() for line in text.splitlines() if line.strip()]
    return tuple(tuple(Action.parse(cell) for cell in row) for row in rows)
