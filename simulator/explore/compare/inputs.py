"""What two scenarios say differently, by dotted key."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from simulator.describe.fields import Unit, rules
from simulator.describe.scenario import Scenario
from simulator.units import format_bytes, format_rate, format_seconds

ABSENT = "-"
"""What stands for a value that a scenario does not have."""


@dataclass(frozen=True, slots=True)
class Input:
    """One key whose value differs."""

    key: str
    a: object
    b: object
    texts: tuple[str, str]
    """Both as people read them."""
    with_it: int = 0
    """Values that come with a name, as those of another device, and are not listed in text."""


def differing(a: Scenario, b: Scenario) -> tuple[Input, ...]:
    """Return every key whose value differs, in the order of a scenario's fields; no titles."""
    left, right = (dict(_leaves(s, "")) for s in (a, b))
    found = []
    for key in dict.fromkeys([*left, *right]):
        one, other = left.get(key), right.get(key)
        if key != "name" and one != other:
            texts = _text(one), _text(other)
            found.append(Input(key, _value(one), _value(other), texts))
    return tuple(found)


def collapsed(inputs: tuple[Input, ...]) -> tuple[Input, ...]:
    """Return the same with parts of another name, such as a node's, in the line of the name."""
    named = [i.key.removesuffix("name") for i in inputs if i.key.endswith(".name")]
    tops = [n for n in named if not any(n != other and n.startswith(other) for other in named)]
    count = {top: sum(i.key.startswith(top) for i in inputs) - 1 for top in tops}
    out = []
    for i in inputs:
        top = next((top for top in tops if i.key.startswith(top)), None)
        if top is None:
            out.append(i)
        elif i.key == f"{top}name":
            out.append(dataclasses.replace(i, key=top.rstrip("."), with_it=count[top]))
    return tuple(out)


@dataclass(frozen=True, slots=True)
class _Leaf:
    value: object
    dimension: str
    """A key of `UNITS`, or empty."""


def _value(leaf: _Leaf | None) -> object:
    return None if leaf is None else leaf.value


def _leaves(part: Any, where: str) -> Iterator[tuple[str, _Leaf]]:
    for name, rule in rules(part.__class__).items():
        value, key = getattr(part, name), f"{where}{name}"
        unit = next((m for m in rule.markers if isinstance(m, Unit)), None)
        if dataclasses.is_dataclass(value):
            yield from _leaves(value, f"{key}.")
        elif isinstance(value, Mapping):
            for inner, of_it in value.items():
                if dataclasses.is_dataclass(of_it):
                    yield from _leaves(of_it, f"{key}.{inner}.")
                else:
                    yield f"{key}.{inner}", _Leaf(of_it, "")
        elif isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
            for number, inner in enumerate(value):
                yield from _leaves(inner, f"{key}.{number}.")
        elif value is not None:
            yield key, _Leaf(value, unit.dimension if unit else "")


_FORMATS: dict[str, Callable[[float], str]] = {
    "bytes": format_bytes,
    "bytes/s": lambda v: format_rate(v, "B"),
    "FLOP/s": lambda v: format_rate(v, "FLOP"),
    "seconds": format_seconds,
    "watts": lambda v: f"{v:g} W",
}


def _text(leaf: _Leaf | None) -> str:
    if leaf is None:
        return ABSENT
    value = leaf.value
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)) and leaf.dimension in _FORMATS:
        return _FORMATS[leaf.dimension](float(value))
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return str(value)
