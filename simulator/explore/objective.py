"""What a search is after: a number of a trial that is to be small, and how it is shown."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from simulator.describe.cluster import Cluster
from simulator.describe.cost import Cost
from simulator.describe.scenario import Scenario
from simulator.errors import DescriptionError
from simulator.explore.trial import Trial
from simulator.lower.trainable import model_flops_per_token
from simulator.units import format_count, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """How trials are ordered and what of them is shown."""

    title: str
    value: Callable[[Trial], tuple[float, ...]]
    """Smaller is better."""
    show: Callable[[Trial], str]


def _per_usd(t: Trial) -> float:
    assert t.tokens_per_usd is not None  # `priced`
    return t.tokens_per_usd


def _energy(t: Trial) -> float:
    assert t.energy_j_per_token is not None  # `priced`
    return t.energy_j_per_token


OBJECTIVES: dict[str, Objective] = {
    "time": Objective(
        title="step", value=lambda t: (t.step_time_s,), show=lambda t: format_seconds(t.step_time_s)
    ),
    "tokens_per_dollar": Objective(
        title="tokens/USD",
        value=lambda t: (-_per_usd(t),),
        show=lambda t: format_count(_per_usd(t)),
    ),
    "energy": Objective(
        title="J/token", value=lambda t: (_energy(t),), show=lambda t: f"{_energy(t):.4g}"
    ),
    "smallest_cluster": Objective(
        title="devices",
        value=lambda t: (t.num_devices, t.step_time_s),
        show=lambda t: str(t.num_devices),
    ),
}
"""By name, as ``--objective`` takes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """So many tokens in so many seconds."""

    tokens: float
    seconds: float

    def met_by(self, t: Trial) -> bool:
        """Return whether a plan trains the tokens in time, without a failure or a pause."""
        return t.tokens_per_s * self.seconds >= self.tokens

    def possible(self, s: Scenario, cluster: Cluster) -> bool:
        """Return whether the peak rates of a cluster's devices would be enough."""
        peak = cluster.peak(s.precision.fastest)
        return self.tokens * model_flops_per_token(s) <= peak * self.seconds


def priced(s: Scenario, name: str) -> Scenario:
    """Return a scenario that says what an objective needs of energy and money.

    Raises:
        DescriptionError: when no price is stated.
    """
    if name == "energy" and s.cost is None:
        return replace(s, cost=Cost())
    cost = s.cost
    prices = () if cost is None else (cost.device_price, cost.electricity_price)
    if name == "tokens_per_dollar" and not any(prices):
        raise DescriptionError(
            f"{s.name}: tokens_per_dollar needs cost.device_price (or cost.electricity_price); "
            'give --set cost.device_price="2.50 USD/h"'
        )
    return s


def order(name: str, t: Trial) -> tuple[object, ...]:
    """Return what trials are sorted by: those that fit, best first; then by memory needed."""
    if t.failed:
        return (2, math.inf, t.name)
    if not t.fits:
        return (1, t.over_bytes, t.name)
    return (0, *OBJECTIVES[name].value(t), t.device_memory_bytes, t.name)
