"""Times of kernels that were measured on a device, over their sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from simulator.describe.fields import validate
from simulator.errors import DescriptionError


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One size of a kernel, and where on it times were measured."""

    name: str
    at: tuple[float, ...]
    """Ascending."""

    def __post_init__(self) -> None:
        validate(self)
        rising = all(a < b for a, b in pairwise(self.at))
        if not (self.at and self.at[0] > 0 and rising):
            raise DescriptionError(f"Axis.at: {list(self.at)} must be ascending and above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One kind of kernel on a grid of sizes."""

    kernel: str
    """``product`` of matrices, a fused algorithm's name, or the last words of a kernel's name."""
    dtype: str = ""
    """Precision, a key of `Device.peak`; empty for what counts by the bytes that it moves."""
    axes: tuple[Axis, ...]
    seconds: tuple[float, ...]
    """Of every combination, the last axis fastest; with the gap to the next kernel."""

    def __post_init__(self) -> None:
        validate(self)
        points = math.prod(len(axis.at) for axis in self.axes)
        if len(self.seconds) != points:
            raise DescriptionError(
                f"Timed.seconds: {len(self.seconds)} times for {points} sizes of {self.kernel!r}"
            )
        if not all(0 < seconds < math.inf for seconds in self.seconds):
            raise DescriptionError(f"Timed.seconds: times of {self.kernel!r} must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What ``trainsim calibrate --kernels`` has measured."""

    device: str
    """As the machine names it; a device of another name does not use the table."""
    measured_at: str
    how: str
    """Versions, and what ran beside it."""
    kernels: tuple[Timed, ...]

    def __post_init__(self) -> None:
        validate(self)

    def __hash__(self) -> int:
        return hash((self.device, self.measured_at))


def same_device(measured: str, named: str) -> bool:
    """Return whether two names mean one device: letters and digits alike, whatever is between."""
    plain = ("".join(c for c in name.lower() if c.isalnum()) for name in (measured, named))
    first, second = plain
    return first == second
