"""What a field of a description may hold: markers for `Annotated`, and the check that reads them.

The descriptions state their own rules (`hidden_size: Count`), so that a TOML file, a ``--set``
override and a Python constructor are all held to the same ones.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, TypeAlias

from simulator import units
from simulator.errors import DescriptionError, suggestion


@dataclass(frozen=True, slots=True)
class Unit:
    """The field is a positive quantity of this dimension, written with its unit in TOML."""

    dimension: str
    zero: bool = False
    """Whether zero is allowed too."""
    names: tuple[str, ...] = ()
    """Words that may stand in its place."""


@dataclass(frozen=True, slots=True)
class Range:
    """The field is a number from `low` to `high`."""

    low: float
    high: float = math.inf
    open_low: bool = False
    """Whether `low` itself is excluded."""


@dataclass(frozen=True, slots=True)
class Catalogued:
    """The field may name a file of this folder of the catalogue, or a path, instead of a table."""

    folder: str


@dataclass(frozen=True, slots=True)
class OrFile:
    """The field is a name, or a file's path with this ending, from the description's folder."""

    suffix: str


MOST = 10**15
"""Above it no count makes sense, and products of two leave whole numbers of 64 bits."""

Count: TypeAlias = Annotated[int, Range(1, MOST)]
Natural: TypeAlias = Annotated[int, Range(0, MOST)]
Fraction: TypeAlias = Annotated[float, Range(0, 1, open_low=True)]
Probability: TypeAlias = Annotated[float, Range(0, 1)]
Bytes: TypeAlias = Annotated[float, Unit("bytes")]
BytesPerSecond: TypeAlias = Annotated[float, Unit("bytes/s")]
FlopsPerSecond: TypeAlias = Annotated[float, Unit("FLOP/s")]
Seconds: TypeAlias = Annotated[float, Unit("seconds", zero=True)]
Duration: TypeAlias = Annotated[float, Unit("seconds")]
"""Seconds that are not zero."""
Watts: TypeAlias = Annotated[float, Unit("watts", zero=True)]


@dataclass(frozen=True, slots=True)
class Rule:
    """The type of one field, taken apart."""

    base: Any
    """The type without markers and without ``None``."""
    markers: tuple[object, ...]
    optional: bool
    required: bool
    descriptions: tuple[type, ...]
    """One of which it holds; none where it holds no description."""
    default: object
    """A legal value, or `dataclasses.MISSING`."""


@cache
def rules(cls: type) -> Mapping[str, Rule]:
    """Return the rule of every field of a description."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {f.name: _rule(hints[f.name], f) for f in dataclasses.fields(cls)}


def _rule(hint: Any, f: dataclasses.Field[Any]) -> Rule:
    required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    optional = False
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        parts = [part for part in typing.get_args(hint) if part is not type(None)]
        optional = len(parts) < len(typing.get_args(hint))
        hint = typing.Union[tuple(parts)]  # noqa: UP007 - the parts are known only here
    markers: tuple[object, ...] = ()
    if typing.get_origin(hint) is Annotated:
        hint, *marked = typing.get_args(hint)
        markers = tuple(marked)
    return Rule(hint, markers, optional, required, described(hint), f.default)


def complaint(value: object, base: Any, markers: Iterable[object]) -> str | None:
    """Say what is wrong with a value of a field, or return None when nothing is."""
    origin = None if type(base) is type else typing.get_origin(base)  # most are plain
    if origin in (types.UnionType, typing.Union):  # names or a list; a number or a list
        return complaint(value, *split(_alternative(value, typing.get_args(base))))
    if origin is typing.Literal:
        choices = typing.get_args(base)
        known = any(value == c and type(value) is type(c) for c in choices)
        return None if known else _not_among(value, [str(c) for c in choices])
    if origin is tuple:
        item = typing.get_args(base)[0]
        if not isinstance(value, (tuple, list)):
            return f"{value!r} is not a list"
        return next(filter(None, (complaint(v, *split(item)) for v in value)), None)
    if origin is dict:
        item = typing.get_args(base)[1]
        if not isinstance(value, dict):
            return f"{value!r} is not a table"
        return next(filter(None, (complaint(v, *split(item)) for v in value.values())), None)
    if base is float and type(value) is int:
        value = float(value)
    if type(value) is not base:
        return f"{value!r} is not {_ARTICLED.get(base, f'a {base.__name__}')}"
    return next(filter(None, (_marker_complaint(value, marker) for marker in markers)), None)


def _alternative(value: object, parts: tuple[Any, ...]) -> Any:
    """Return which of several types a value is meant to be of."""
    origins = [typing.get_origin(split(part)[0]) for part in parts]
    meant = typing.Literal if isinstance(value, str) else tuple
    if meant in origins and isinstance(value, (str, list, tuple)):
        return parts[origins.index(meant)]
    return next(part for part, o in zip(parts, origins, strict=True) if o is not typing.Literal)


_ARTICLED = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def split(hint: Any) -> tuple[Any, tuple[object, ...]]:
    """Return a type without its markers, and the markers."""
    if typing.get_origin(hint) is Annotated:
        base, *markers = typing.get_args(hint)
        return base, tuple(markers)
    return hint, ()


def described(base: Any) -> tuple[type, ...]:
    """Return the descriptions that a field may hold one of; none where it holds no description."""
    union = typing.get_origin(base) in (types.UnionType, typing.Union)
    parts = typing.get_args(base) if union else (base,)
    return tuple(p for p in parts if isinstance(p, type) and dataclasses.is_dataclass(p))


def _marker_complaint(value: Any, marker: object) -> str | None:
    if isinstance(marker, Unit):
        if not math.isfinite(value) or value < 0 or (value == 0 and not marker.zero):
            bound = "at least" if marker.zero else "above"
            return f"{value:g} {marker.dimension} must be {bound} 0"
    elif isinstance(marker, Range):
        if value < marker.low or (marker.open_low and value == marker.low):
            return f"{value} must be {'above' if marker.open_low else 'at least'} {marker.low:g}"
        if not value <= marker.high:
            return f"{value} must be at most {marker.high:g}"
    return None


def _not_among(value: object, choices: list[str]) -> str:
    return f"{value!r} is not one of {', '.join(choices)}{suggestion(value, choices)}"


def validate(description: Any) -> None:
    """Check every field of a description against its rule; for use in ``__post_init__``.

    Raises:
        DescriptionError: with all complaints.
    """
    problems = []
    for name, rule in rules(description.__class__).items():
        value = getattr(description, name)
        if value is rule.default or (value is None and rule.optional):
            continue
        if wanted := rule.descriptions:
            if not isinstance(value, wanted):
                here = f"{type(description).__name__}.{name}"
                names = " or a ".join(one.__name__ for one in wanted)
                problems.append(f"{here}: {value!r} is not a {names}")
            continue
        if wrong := complaint(value, rule.base, rule.markers):
            problems.append(f"{type(description).__name__}.{name}: {wrong}")
        elif isinstance(value, list):  # as TOML and JSON write a tuple
            object.__setattr__(description, name, tuple(value))
    if problems:
        raise DescriptionError(problems)


def from_text(value: object, markers: Iterable[object]) -> object:
    """Turn the TOML form of a quantity into its SI value; leave anything else as it is.

    Raises:
        ValueError: when a unit is missing or unknown.
    """
    for marker in markers:
        if isinstance(marker, Unit) and value not in marker.names:
            try:
                return units.parse_quantity(value, marker.dimension)
            except ValueError as error:
                names = "".join(f", or {name!r}" for name in marker.names)
                raise ValueError(f"{error}{names}{suggestion(value, marker.names)}") from None
    return value
