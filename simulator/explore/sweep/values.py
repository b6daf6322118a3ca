"""Lists of values as people write them: ``1,2,4,...,64``."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from types import EllipsisType
from typing import Any, TypeAlias

from simulator.errors import DescriptionError

Listed: TypeAlias = Sequence[object]
"""Values, where ``...`` (Python's Ellipsis) stands for those that carry on to the next one."""

MOST = 1_000_000
"""Values that a list is filled up to."""

OPENING, CLOSING = "[{(", "]})"


def parse_values(text: str, option: str = "--set") -> tuple[str, list[object]]:
    """Return the dotted key and the values of a ``plan.tp=1,2,4,...,64``.

    Values are TOML, or bare text; a comma in brackets or quotes divides nothing.

    Raises:
        DescriptionError: when there is no ``=``, a value is missing, or ``...`` cannot be filled.
    """
    key, equals, values = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise DescriptionError(f"{option} {text!r}: write KEY=VALUE,..., as plan.tp=1,2,4,8")
    try:
        return key, fill([read_value(part) for part in divided(values)])
    except DescriptionError as error:
        raise DescriptionError(f"{option} {text!r}: {error}") from None


def read_value(text: str) -> object:
    """Return a TOML value, Ellipsis for ``...``, or a text that is neither as it is.

    Raises:
        DescriptionError: when there is nothing.
    """
    text = text.strip()
    if text == "...":
        return ...
    if not text:
        raise DescriptionError("a value is missing between two commas, or at an end")
    try:
        read = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return read["value"] if list(read) == ["value"] else text


def divided(text: str) -> list[str]:
    """Return the parts of a text between commas that are not in brackets or quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter == "," and depth <= 0:
            parts.append("")
            continue
        else:
            depth += (letter in OPENING) - (letter in CLOSING)
        parts[-1] += letter
    return parts


def fill(values: Listed) -> list[object]:
    """Return values with each ``...`` filled: as the values before it go on, up to the one behind.

    They go on by adding where all of them differ by as much, by multiplying where all of them have
    the same ratio.

    Raises:
        DescriptionError: when they do neither or may do both, or pass the value behind.
    """
    out: list[object] = []
    start = 0  # of the values that the next ... goes on from
    for at, value in enumerate(values):
        if value is not ...:
            out.append(value)
            continue
        if at + 1 == len(values) or values[at + 1] is ...:
            raise DescriptionError("'...' needs a value behind it, as in 1,2,4,...,64")
        out += _between(out[start:], values[at + 1])
        start = len(out)
    return out


def _between(before: Listed, end: object) -> list[object]:
    """Return what lies between values that are stated and the end that they go on to."""
    if not all(_is_number(value) for value in (*before, end)):
        raise DescriptionError(f"'...' fills between numbers, not {_shown([*before, ..., end])}")
    if len(before) < 2:
        raise DescriptionError("'...' needs two values or more before it, as in 1,2,4,...,64")
    exact, last = [Fraction(str(value)) for value in before], Fraction(str(end))
    found = [steps for steps in (_added(exact, last), _multiplied(exact, last)) if steps]
    written = _shown([*before, ..., end])
    if not found:
        raise DescriptionError(f"{written} neither adds nor multiplies its way to {end}")
    if len(found) == 2 and found[0] != found[1]:
        more = [f"{_shown([*before, _plain(steps[0], before)])},..." for steps in found]
        raise DescriptionError(
            f"{written} may go on by adding or by multiplying; write one more value, "
            f"as {more[0]} or {more[1]}"
        )
    return [_plain(value, before) for value in found[0][:-1]]


def _added(values: Sequence[Fraction], end: Fraction) -> list[Fraction]:
    """Return the values up to the end where all of them differ by as much, else none."""
    step = values[1] - values[0]
    if not step or any(b - a != step for a, b in pairwise(values)):
        return []
    count = (end - values[-1]) / step
    if count.denominator != 1 or count < 1:
        return []
    if count > MOST:
        raise DescriptionError(f"'...' stands for {int(count):,} values; at most {MOST:,} will do")
    return [values[-1] + step * k for k in range(1, int(count) + 1)]


def _multiplied(values: Sequence[Fraction], end: Fraction) -> list[Fraction]:
    """Return the values up to the end where all of them have the same ratio, else none."""
    if any(v <= 0 for v in (*values, end)) or values[0] == values[1]:
        return []
    ratio = values[1] / values[0]
    if any(b != a * ratio for a, b in pairwise(values)):
        return []
    out = [values[-1]]
    while (out[-1] < end) == (ratio > 1) and out[-1] != end and len(out) < MOST:
        out.append(out[-1] * ratio)
    return out[1:] if out[-1] == end else []


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _plain(value: Fraction, like: Listed) -> int | float:
    """Return a value as whole numbers are written where all others are whole."""
    whole = value.denominator == 1 and all(isinstance(v, int) for v in like)
    return int(value) if whole else float(value)


def _shown(values: Sequence[Any | EllipsisType]) -> str:
    return ",".join("..." if value is ... else str(value) for value in values)
