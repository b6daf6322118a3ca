"""What a sweep goes over: axes, each a list of settings, and every combination of them."""

from __future__ import annotations

import csv
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

from simulator.errors import DescriptionError
from simulator.explore.sweep.values import Listed, fill, read_value

Settings: TypeAlias = dict[str, Any]
"""Values by dotted key, as ``--set`` takes them."""

Axis: TypeAlias = tuple[Settings, ...]
"""Settings of which each point of a sweep has one; all of them name the same or other keys."""

MOST_POINTS = 1_000_000
"""Of one sweep."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Every combination of some axes; the last axis varies fastest."""

    axes: tuple[Axis, ...]

    def __post_init__(self) -> None:
        taken: set[str] = set()
        for axis in self.axes:
            own = {key for settings in axis for key in settings}
            if twice := sorted(own & taken):
                raise DescriptionError(f"{twice[0]!r} is given twice; list all its values once")
            taken |= own
        if len(self) > MOST_POINTS:
            raise DescriptionError(
                f"a sweep of {len(self):,} points is too large; at most {MOST_POINTS:,} will do"
            )

    def __len__(self) -> int:
        return math.prod(map(len, self.axes))

    def __iter__(self) -> Iterator[Settings]:
        for parts in product(*self.axes):
            yield {key: value for part in parts for key, value in part.items()}

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys that some point sets, in the order of the axes."""
        found = [key for axis in self.axes for settings in axis for key in settings]
        return tuple(dict.fromkeys(found))

    @property
    def varied(self) -> tuple[str, ...]:
        """Keys of which points have different values."""
        out = []
        for axis in self.axes:
            for key in dict.fromkeys(key for settings in axis for key in settings):
                values = {repr(settings.get(key)) for settings in axis}
                out += [key] if len(values) > 1 else []
        return tuple(out)


def axis(key: str, values: Listed) -> Axis:
    """Return the axis of one key.

    Raises:
        DescriptionError: when there is no value, or ``...`` cannot be filled.
    """
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise DescriptionError(f"{key}: {values!r} is no list of values, as [1, 2, 4]")
    if not values:
        raise DescriptionError(f"{key}: the list of values is empty")
    return tuple({key: value} for value in fill(values))


def zipped(lists: Mapping[str, Listed]) -> Axis:
    """Return the axis of keys whose values go together, the first with the first.

    Raises:
        DescriptionError: when the lists are not equally long.
    """
    filled = {key: [s[key] for s in axis(key, values)] for key, values in lists.items()}
    lengths = {len(values): key for key, values in filled.items()}
    if len(lengths) > 1:
        counts = ", ".join(f"{key} has {len(values)}" for key, values in filled.items())
        raise DescriptionError(f"values that go together must be equally many, but {counts}")
    return tuple(dict(zip(filled, values, strict=True)) for values in zip(*filled.values()))  # noqa: B905 - equally long


def read_rows(path: Path) -> Axis:
    """Return the axis of a table of rows: a CSV file with keys as its head, or TOML's ``[[rows]]``.

    An empty cell of CSV sets nothing.

    Raises:
        DescriptionError: when the file cannot be read as such, or has no row.
    """
    readers = {".csv": _csv_rows, ".toml": _toml_rows}
    if path.suffix not in readers:
        raise DescriptionError(f"{path}: a table of rows must end in {' or '.join(readers)}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise DescriptionError(f"{path}: is not a UTF-8 text") from None
    except OSError as error:
        raise DescriptionError(f"{path}: cannot be read ({error.strerror})") from None
    rows = readers[path.suffix](text, path)
    if not rows:
        raise DescriptionError(f"{path}: it has no rows")
    return tuple(rows)


def _csv_rows(text: str, path: Path) -> list[Settings]:
    head, *lines = [line for line in csv.reader(text.splitlines()) if line] or [[]]
    keys = [key.strip() for key in head]
    if "" in keys or len(set(keys)) < len(keys):
        raise DescriptionError(
            f"{path}: its first line must name each key once, as plan.tp,plan.pp"
        )
    out = []
    for number, cells in enumerate(lines, 1):
        if len(cells) != len(keys):
            raise DescriptionError(
                f"{path}: row {number} has {len(cells)} cells, and the first line {len(keys)} keys"
            )
        out.append({k: read_value(c) for k, c in zip(keys, cells, strict=True) if c.strip()})
    return out


def _toml_rows(text: str, path: Path) -> list[Settings]:
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise DescriptionError(f"{path}: is not valid TOML ({error})") from None
    rows = table.get("rows")
    if list(table) != ["rows"] or not isinstance(rows, list):
        raise DescriptionError(f"{path}: a table of rows holds [[rows]], and nothing else")
    if not all(isinstance(row, dict) for row in rows):
        raise DescriptionError(f"{path}: rows must be tables, as [[rows]] with plan.tp = 2 below")
    return [dict(_leaves(row)) for row in rows]


def _leaves(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield values of nested tables by their dotted keys."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value
