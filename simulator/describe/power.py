"""Where the power of a board goes, by which a limit sets the clock of its products."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from simulator.describe.fields import Fraction, Range, Watts, validate

PER_BYTE = 98e-12
"""Joules that a streaming kernel takes for each byte, beyond the static part.

A B300 that only streams draws 791 W (gpu-power-lab, t2-b300-batch2/rung-dram-only.json), of which
6 W are static: 785 W / 8 TB/s. ASSUMED of other boards; an H200's decoding, which streams most of
the time, draws 137 to 300 W (arXiv 2605.11999) where this gives 505.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """What a board draws while it runs large matrix products, by their rate.

    A rate is a share of the one at the highest clock. Up to `knee` the voltage is flat, so power
    beyond `static` grows with the rate; above it voltage rises, and power with its square.
    """

    static: Watts
    """Drawn at any clock: leakage, refresh of the memory, links, fans."""
    knee: Fraction
    """Rate from which on the voltage rises."""
    slope: Annotated[float, Range(0, 10)]
    """How many percent the voltage rises where the rate rises by one percent of `knee`."""
    rate: Fraction
    """Rate of products at the board's thermal design power, to which `sustained_clock` belongs."""

    def __post_init__(self) -> None:
        validate(self)

    def least_limit(self, bandwidth: float) -> float:
        """Return the watts below which kernels bound by memory (bytes/s) would be slowed too."""
        return self.static + PER_BYTE * bandwidth


def limit_problems(
    limit: float | None, power: Power | None, tdp: float | None, bandwidth: float, calibrated: bool
) -> Iterator[str]:
    """Yield why the clock under a device's power limit cannot be told."""
    if limit is None:
        return
    if power is None or tdp is None:
        missing = "power" if power is None else "tdp"
        yield (
            f"{limit:g} W, but the device has no {missing}, by which a limit sets the clock; state "
            "it, or leave out the limit and set sustained_clock"
        )
    elif limit > tdp:
        yield f"{limit:g} W is above tdp, {tdp:g} W, the highest that a board takes"
    elif limit < power.least_limit(bandwidth):
        yield (
            f"{limit:g} W is less than the {power.least_limit(bandwidth):.0f} W that kernels bound "
            "by memory draw; how these slow down is not modelled"
        )
    elif calibrated:
        yield "times of device.calibration are of the limit they were measured at; leave one out"
