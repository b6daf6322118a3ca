"""From a board's power limit to its clock.

A board draws a static part, and a dynamic one that goes with the clock and the square of the
voltage, which is flat up to a knee and rises with the clock above it (so model it Schoonhoven et
al., Going green, PMBS 2022, arXiv 2211.07260). Below the knee a rate is thus proportional to the
power beyond the static part; a cube root of power holds far above it only. What products read from
memory goes with their rate, so it is in the dynamic part. Constants are fitted to published sweeps,
`topologies/measured/power.csv`.

A limit acts over some 0.1 s, kernels of a layer take milliseconds: all kernels of a step run at one
clock, here that of its products. Fused attention, which units bound, is slowed as they are. Kernels
bound by memory are not, for its clock is the same at every limit (a B300 at 450 to 1100 W), until
their own draw meets the limit, `Power.least_limit`; below it a limit is refused.
"""

from __future__ import annotations

from functools import lru_cache

from simulator.describe.cluster import Device
from simulator.describe.power import Power


def draw(power: Power, dynamic: float, rate: float) -> float:
    """Return the watts of products at a rate, of which `dynamic` x rate at the flat voltage."""
    voltage = 1 + power.slope * max(0.0, rate / power.knee - 1)
    return power.static + dynamic * rate * voltage**2


@lru_cache(maxsize=256)
def rate_at(power: Power, tdp: float, limit: float) -> float:
    """Return the rate of products under a limit, at most 1; `power.rate` is that under `tdp`."""
    dynamic = (tdp - power.static) / (draw(power, 1.0, power.rate) - power.static)
    low, high = 0.0, 1.0
    if draw(power, dynamic, high) <= limit:
        return high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if draw(power, dynamic, middle) <= limit else (low, middle)
    return low


def clock_left(device: Device) -> float:
    """Return the share of the clock under `tdp` that a device's power limit leaves."""
    if device.power_limit is None:
        return 1.0
    assert device.power is not None
    assert device.tdp is not None
    return rate_at(device.power, device.tdp, device.power_limit) / device.power.rate
