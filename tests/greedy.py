"""An oracle for bare schedules: each cell starts when its rank is free and its inputs are there."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from simulator.schedules import Actions, cells


class Ran(NamedTuple):
    """What a schedule took."""

    makespan: float
    idle: list[float]
    """Seconds that each rank idles between its first action and its last."""
    kept: list[int]
    """Most stage activations of each rank, each from its F to its B or W."""


def run(
    actions: Actions, f: float = 1, i: float = 1, w: float = 1, pair: float | None = None
) -> Ran:
    """Run lists without messages: B takes i + w, a pair f + i + w where not said otherwise."""
    seconds = {"F": f, "I": i, "W": w, "B": i + w}
    last = max(a.stage for row in actions for a in row)
    rows = [list(cells(row)) for row in actions]
    ends: dict[tuple[str, int, int], float] = {}
    free, busy, start = ([0.0] * len(rows) for _ in range(3))
    at = [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                cell, ready = row[at[rank]], free[rank]
                for a in cell:
                    need = {
                        "F": ("F", a.stage - 1, a.microbatch),
                        "W": ("I", a.stage, a.microbatch),
                    }.get(a.kind, ("I", a.stage + 1, a.microbatch))
                    if 0 <= need[1] <= last:
                        ready = max(ready, ends.get(need, float("inf")))
                if ready == float("inf"):
                    break
                long = sum(seconds[a.kind] for a in cell)
                long = pair if pair is not None and len(cell) == 2 else long
                start[rank] = ready if not at[rank] else start[rank]
                free[rank], busy[rank] = ready + long, busy[rank] + long
                for a in cell:
                    ends[a.kind.replace("B", "I"), a.stage, a.microbatch] = ready + long
                at[rank] += 1
                moved = True
    stuck = {
        rank: row[k] for rank, (row, k) in enumerate(zip(rows, at, strict=True)) if k < len(row)
    }
    assert not stuck, f"deadlock: {stuck}"
    idle = [e - s - b for e, s, b in zip(free, start, busy, strict=True)]
    return Ran(max(free), idle, kept(actions))


def kept(actions: Actions) -> list[int]:
    """Return the most stage activations that each rank keeps."""
    out = []
    for row in actions:
        level, most = 0, 0
        for a in row:
            level += Counter(F=1, B=-1, W=-1)[a.kind]
            most = max(most, level)
        out.append(most)
    return out
