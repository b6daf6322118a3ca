"""Actions: the cells of a schedule, how they are spelled, and lists of them as text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    paired: bool = False
    """Whether it runs together with the action that follows it in its list (OVERLAP_F_B)."""

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.microbatch == NONE else self.microbatch}"

    @property
    def alone(self) -> Action:
        """The same work, not paired: what a look-up by stage, kind and microbatch finds."""
        return self._replace(paired=False) if self.paired else self

    @classmethod
    def parse(cls, text: str) -> Action:
        """Return the action that prints as `text`.

        Raises:
            ScheduleError: when no action does.
        """
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(
                f"{text.strip()!r} is not an action; write for example 3F0 or 1SEND_F2"
            )
        return cls(int(match[1]), match[2], int(match[3]) if match[3] else NONE)


_ACTION = re.compile(rf"(\d+)({'|'.join(sorted(ACTIONS, key=len, reverse=True))})(\d*)")
_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")

Actions: TypeAlias = tuple[tuple[Action, ...], ...]
"""Action lists by pipeline rank."""


def parse_cell(text: str) -> tuple[Action, ...]:
    """Return the action of a cell, or the two of a pair: torch's ``(0F1;1B0)OVERLAP_F_B``.

    Raises:
        ScheduleError: when it is neither.
    """
    pair = _PAIR.fullmatch(text.strip())
    if pair is None:
        return (Action.parse(text),)
    return Action.parse(pair[1])._replace(paired=True), Action.parse(pair[2])


def cells(row: Sequence[Action]) -> Iterator[tuple[Action, ...]]:
    """Yield the cells of a list: single actions, and pairs of those that run together."""
    position = 0
    while position < len(row):
        size = 1 + (row[position].paired and position + 1 < len(row))
        yield tuple(row[position : position + size])
        position += size


def cell_text(cell: Sequence[Action]) -> str:
    """Return a cell as torch.distributed.pipelining spells it."""
    return str(cell[0]) if len(cell) == 1 else f"({';'.join(map(str, cell))})OVERLAP_F_B"


def read_actions(rows: object) -> Actions:
    """Return action lists from lists of actions, or of their texts.

    Raises:
        ScheduleError: when something in them is neither.
    """
    if not isinstance(rows, (list, tuple)) or not all(isinstance(r, (list, tuple)) for r in rows):
        raise ScheduleError(f"a schedule is a list of actions for each rank, not {rows!r}")
    return tuple(_flat((a,) if isinstance(a, Action) else parse_cell(str(a)) for a in r)
                 for r in rows)  # fmt: skip


MOST_CELLS, NEAR = 40, 8
"""Longest list that an error shows whole, and how many cells it shows before and after a mark."""


def grid(
    actions: Sequence[Sequence[Action]], marks: Mapping[tuple[int, int], str] | None = None
) -> str:
    """Return action lists as text, a row a rank; `marks` are put behind (rank, position)."""
    marks = marks or {}
    texts = [[cell_text(cell) for cell in cells(row)] for row in actions]
    width = max((len(text) for row in texts for text in row), default=1)
    lines = []
    for rank, (row, shown) in enumerate(zip(actions, texts, strict=True)):
        at, marked, pointed = 0, [], []
        for number, (cell, text) in enumerate(zip(cells(row), shown, strict=True)):
            own = [f" {marks[rank, i]}" for i in range(at, at + len(cell)) if (rank, i) in marks]
            marked.append(f"{text:<{width}}{''.join(own)}")
            pointed += [number] * bool(own)
            at += len(cell)
        if marks:
            marked = _near(marked, pointed)
        lines.append(f"rank {rank}: {' '.join(marked)}".rstrip())
    return "\n".join(lines)


def _near(texts: list[str], pointed: list[int]) -> list[str]:
    """Return the cells of a list near those pointed at, or near its start; all of a short one."""
    if len(texts) <= MOST_CELLS:
        return texts
    near = {at + step for at in pointed or [0] for step in range(-NEAR, NEAR + 1)}
    kept = sorted(near & set(range(len(texts))))
    out = ["..."] * (kept[0] > 0)
    for at, following in zip(kept, [*kept[1:], len(texts)], strict=True):
        out += [texts[at], *["..."] * (following > at + 1)]
    return out


def parse_grid(text: str) -> Actions:
    """Return the action lists that `grid` printed."""
    rows = [line.partition(":")[2].split() for line in text.splitlines() if line.strip()]
    return tuple(_flat(map(parse_cell, row)) for row in rows)


def _flat(parts: Iterable[Iterable[Action]]) -> tuple[Action, ...]:
    return tuple(action for part in parts for action in part)
