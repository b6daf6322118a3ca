"""Units live at the edge: text such as ``400 Gb/s`` becomes SI floats here, and only here.

Inside the package everything is seconds, bytes, FLOPs, bytes/s and FLOP/s; engines count integer
picosecond ticks. ``GB`` is 1e9 bytes and ``GiB`` 2**30; a lower-case ``b`` is a bit.
"""

import math
import re

TICKS_PER_SECOND = 10**12
"""Engines count int64 picoseconds: exact sums, and room for 106 days."""

_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_BYTES = {f"{prefix}B": scale for prefix, scale in (_DECIMAL | _BINARY).items()}
_BITS = {f"{prefix}b": scale / 8 for prefix, scale in _DECIMAL.items()}

UNITS: dict[str, dict[str, float]] = {
    "bytes": _BYTES,
    "bytes/s": {f"{unit}/s": scale for unit, scale in (_BYTES | _BITS).items()},
    "FLOP/s": {f"{prefix}FLOP/s": scale for prefix, scale in _DECIMAL.items()},
    "seconds": {
        "ps": 1e-12, "ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0,
        "d": 86400.0, "days": 86400.0,
    },
    "watts": {"W": 1.0, "kW": 1e3, "MW": 1e6},
    "kg/J": {"g/kWh": 1e-3 / 3.6e6, "kg/kWh": 1.0 / 3.6e6},
    "USD/J": {"USD/kWh": 1.0 / 3.6e6, "USD/MWh": 1e-3 / 3.6e6},
    "USD/s": {"USD/h": 1.0 / 3600.0},
}  # fmt: skip
"""Scale of each unit by dimension, to the SI unit that names the dimension."""

EXAMPLES = {
    "bytes": "80 GB", "bytes/s": "400 Gb/s", "FLOP/s": "312 TFLOP/s", "seconds": "5 us",
    "watts": "700 W", "kg/J": "400 g/kWh", "USD/J": "0.08 USD/kWh", "USD/s": "2.50 USD/h",
}  # fmt: skip

_QUANTITY = re.compile(r"\s*([-+]?\d[\d_]*\.?\d*(?:[eE][-+]?\d+)?)\s*(\S.*?)?\s*")


def parse_quantity(text: object, dimension: str) -> float:
    """Return the SI value of a text such as ``"400 Gb/s"``; ``dimension`` is a key of `UNITS`.

    Raises:
        ValueError: with one sentence that says what is wrong and shows a right example.
    """
    example = f"write for example {EXAMPLES[dimension]!r}"
    if not isinstance(text, str):
        raise ValueError(f"{text!r} has no unit; {example}")
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a number with a unit; {example}")
    number, unit = match.groups()
    if unit is None:
        raise ValueError(f"{text!r} has no unit; {example}")
    if unit not in UNITS[dimension]:
        raise ValueError(f"{text!r} has the unknown unit {unit!r} for {dimension}; {example}")
    value = float(number) * UNITS[dimension][unit]
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is not a finite number; {example}")
    return value


def _scaled(value: float, unit: str, prefixes: list[tuple[float, str]]) -> str:
    size = abs(value)
    scale, prefix = next(((s, p) for s, p in prefixes if size >= s * 0.99995), prefixes[-1])
    return f"{value / scale:.4g} {prefix}{unit}"


def format_seconds(seconds: float) -> str:
    """Return a duration to four digits, as ``12.35 ms``."""
    if seconds == 0:
        return "0 s"
    if abs(seconds) >= 1000:
        return f"{seconds:,.0f} s"
    return _scaled(seconds, "s", [(1.0, ""), (1e-3, "m"), (1e-6, "u"), (1e-9, "n"), (1e-12, "p")])


def format_bytes(count: float) -> str:
    """Return a size to four digits in decimal units, as ``12.35 GB``."""
    return _scaled(count, "B", [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, "")])


def format_rate(per_second: float, unit: str) -> str:
    """Return a rate to four digits, as ``312 TFLOP/s``; ``unit`` is what is counted."""
    prefixes = [(1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, "")]
    return _scaled(per_second, f"{unit}/s", prefixes)


def format_count(count: float) -> str:
    """Return a count to four digits, as ``1.558 billion``."""
    names = [(1e12, "trillion"), (1e9, "billion"), (1e6, "million"), (1e3, "thousand"), (1.0, "")]
    return _scaled(count, "", names).strip()


def to_seconds(ticks: float) -> float:
    """Return the seconds of a number of ticks."""
    return ticks / TICKS_PER_SECOND


def to_ticks(seconds: float) -> int:
    """Return the nearest whole number of ticks."""
    return round(seconds * TICKS_PER_SECOND)
