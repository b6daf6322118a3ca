"""An oracle for bare schedules: each cell starts when its rank is free and its inputs are there."""

from __future__ import annotations

from typing import NamedTuple

from simulator.schedules import Action, Actions, cells


class Ran(NamedTuple):
    """What a schedule took."""

    makespan: float
    idle: list[float]
    """Seconds that each rank idles between its first action and its last."""
    unused: list[float]
    """Seconds that each rank idles until the last rank ends."""
    kept: list[int]
    """Most stage activations of each rank, each from its F to its B or W."""


def run(
    actions: Actions, f: float = 1, i: float = 1, w: float = 1, pair: float | None = None
) -> Ran:
    """Run lists without messages: B takes i + w, a pair f + i + w where not said otherwise."""
    seconds = {"F": f, "I": i, "W": w, "B": i + w, "OPT": 0.0}
    pair = f + i + w if pair is None else pair
    last = max(a.stage for row in actions for a in row)
    waiting = [list(cells(row))[::-1] for row in actions]
    spans: list[list[tuple[float, float]]] = [[] for _ in actions]
    ends: dict[Action, float] = {}

    def ready(cell: tuple[Action, ...]) -> float | None:
        needs = [n for a in cell for n in inputs(a, last)]
        return None if not ends.keys() >= set(needs) else max([0.0, *(ends[n] for n in needs)])

    while any(waiting):
        before = sum(map(len, waiting))
        for row, span in zip(waiting, spans, strict=True):
            while row and (start := ready(row[-1])) is not None:
                cell = row.pop()
                start = max(start, span[-1][1] if span else 0.0)
                end = start + (pair if len(cell) == 2 else seconds[cell[0].kind])
                span.append((start, end))
                for a in cell:
                    ends[Action(a.stage, a.kind.replace("B", "I"), a.microbatch)] = end
        assert sum(map(len, waiting)) < before, f"deadlock at {[r[-1] for r in waiting if r]}"
    makespan = max(span[-1][1] for span in spans)
    busy = [sum(end - start for start, end in span) for span in spans]
    own = [span[-1][1] - span[0][0] for span in spans]
    return Ran(
        makespan,
        [o - b for o, b in zip(own, busy, strict=True)],
        [makespan - b for b in busy],
        kept(actions),
    )


def inputs(action: Action, last: int) -> list[Action]:
    """Return what an action waits for, with a whole backward as an I."""
    stage, kind, m, _ = action
    if kind == "F":
        return [Action(stage - 1, "F", m)] if stage else []
    if kind == "W":
        return [Action(stage, "I", m)]
    if kind == "OPT":
        return []
    return [Action(stage, "F", m), *([Action(stage + 1, "I", m)] if stage < last else [])]


def kept(actions: Actions) -> list[int]:
    """Return the most stage activations that each rank keeps."""
    change = {"F": 1, "B": -1, "W": -1}
    out = []
    for row in actions:
        level = most = 0
        for a in row:
            level += change.get(a.kind, 0)
            most = max(most, level)
        out.append(most)
    return out
