"""What tells points of a sweep apart, in as few keys as do, and in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from simulator.explore.sweep.frame import written
from simulator.explore.sweep.row import Row

BARE = ("schedule", "node", "model", "name", "device")
"""Ends of keys whose values speak for themselves."""


def telling(rows: Iterable[Row], keys: Sequence[str]) -> list[str]:
    """Return the keys that tell rows apart; one that goes with those before it is left out."""
    values = [[repr(row.get(key)) for key in keys] for row in rows]
    kept: list[int] = []
    apart = min(1, len(values))
    for number in range(len(keys)):
        more = len({tuple(of[k] for k in (*kept, number)) for of in values})
        if more > apart:
            kept, apart = [*kept, number], more
    return [keys[number] for number in kept]


def label(row: Row, keys: Sequence[str]) -> str:
    """Return the settings of a row in words, as ``1F1B, pp 4``."""
    return ", ".join(_setting(key, row.get(key)) for key in keys)


def _setting(key: str, value: object) -> str:
    end = key.rpartition(".")[2]
    text = f"{value:,}" if type(value) is int else "-" if value is None else written(value)
    if end == "devices":
        return f"{text} device{'s' * (value != 1)}"
    return text if end in BARE else f"{end.replace('_', ' ')} {text}"
