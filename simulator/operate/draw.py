"""When things fail: times drawn before anything runs, for each component from a stream of its own.

`default_rng([seed, k])` draws for component k, and k = 0 for slow nodes, so that another seed moves
no other's failures, nor does a component that is added at the end. Times of a longer run begin with
those of a shorter one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.describe.operations import Component, Operations
from simulator.errors import DescriptionError
from simulator.operate.job import NANOSECONDS, mtbf
from simulator.program import Int64

Float64 = npt.NDArray[np.float64]

ONSET = -1
"""What happens when a node turns slow; else it is the number of the component that fails."""

MOST = 50_000_000
"""Failures that all seeds together may have: 2 GB."""


class Happenings(NamedTuple):
    """What breaks when, in every sample, in order."""

    offset: Int64
    """Of each sample's first one, and the end."""
    tick: Int64
    what: Int64
    """`ONSET`, or the component."""

    def of(self, sample: int) -> list[tuple[int, int]]:
        """Return (tick, what) of one sample."""
        here = slice(int(self.offset[sample]), int(self.offset[sample + 1]))
        return list(zip(self.tick[here].tolist(), self.what[here].tolist(), strict=True))


def happenings(ops: Operations, devices: int, nodes: int, seeds: range) -> Happenings:
    """Draw what breaks on a cluster, for a sample of each seed.

    Raises:
        DescriptionError: when more fails than can be held.
    """
    horizon = ops.days * 86400
    failures(ops, devices, nodes, len(seeds))
    found = [_sample(ops, devices, nodes, seed, horizon) for seed in seeds]
    ends = np.cumsum([0, *(len(tick) for tick, _ in found)], dtype=np.int64)
    empty = np.zeros(0, np.int64)
    return Happenings(
        ends,
        np.concatenate([empty, *(tick for tick, _ in found)]),
        np.concatenate([empty, *(what for _, what in found)]),
    )


def failures(ops: Operations, devices: int, nodes: int, samples: int) -> float:
    """Return how many failures are expected in all samples together.

    Raises:
        DescriptionError: when that is more than can be held.
    """
    expected = ops.days * 86400 / mtbf(ops, devices, nodes) * samples
    if expected > MOST:
        raise DescriptionError(
            f"operations: about {expected:.3g} failures in {samples:,} samples of {ops.days:g} "
            f"days are too many (at most {MOST:,}); take fewer --seeds or --days, or a longer mtbf"
        )
    return expected


def _sample(
    ops: Operations, devices: int, nodes: int, seed: int, horizon: float
) -> tuple[Int64, Int64]:
    """Return the ticks at which something happens in one sample, and what."""
    times, what = [], []
    for k, c in enumerate(ops.components):
        rng = np.random.default_rng([seed, k + 1])
        times.append(DRAW[c.distribution](c, c.number(devices, nodes), horizon, rng))
        what.append(np.full(len(times[-1]), k, np.int64))
    if ops.slow_node is not None:
        slow, rng = ops.slow_node, np.random.default_rng([seed, 0])
        onset = _arrivals(horizon * nodes / slow.mtbf, rng) * (slow.mtbf / nodes)
        for at, code in ((onset, ONSET), (onset + slow.detection_time, len(ops.components))):
            times.append(at)
            what.append(np.full(len(at), code, np.int64))
    if not times:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    ticks = np.maximum(1, np.ceil(np.concatenate(times) * NANOSECONDS)).astype(np.int64)
    codes = np.concatenate(what)
    order = np.argsort(ticks, kind="stable")
    order = order[ticks[order] < horizon * NANOSECONDS]
    return ticks[order], codes[order]


def _arrivals(until: float, rng: np.random.Generator) -> Float64:
    """Return the arrivals of a Poisson process of rate 1 up to a time."""
    gaps = [rng.standard_exponential(int(until + 6 * math.sqrt(until)) + 10)]
    times = np.cumsum(gaps[0])
    while times[-1] < until:  # in few samples of many
        gaps.append(rng.standard_exponential(100))
        times = np.cumsum(np.concatenate(gaps))
    within: Float64 = times[times < until]
    return within


def _exponential(c: Component, number: int, horizon: float, rng: np.random.Generator) -> Float64:
    """Draw failures of things that do not age: together a Poisson process."""
    return _arrivals(horizon * number / c.mtbf, rng) * (c.mtbf / number)


def _burn_in(c: Component, number: int, horizon: float, rng: np.random.Generator) -> Float64:
    """Draw failures at the rate (1 + (factor - 1) exp(-t / time)) / mtbf of each.

    A process of rate 1 is taken at the time when the expected number of failures is what it shows;
    that is found by Newton's method, which comes from the left without overshooting, for the rate
    only falls.
    """
    assert c.burn_in_factor is not None  # checked by its description
    assert c.burn_in_time is not None
    rate, tau, excess = number / c.mtbf, c.burn_in_time, c.burn_in_factor - 1

    def expected(t: Float64 | float) -> Float64:
        early: Float64 = np.asarray(rate * (t - excess * tau * np.expm1(-np.asarray(t) / tau)))
        return early

    shown = _arrivals(float(expected(horizon)), rng)
    t = shown / (rate * (1 + excess))
    for _ in range(60):
        t = t + (shown - expected(t)) / (rate * (1 + excess * np.exp(-t / tau)))
    return t


def _weibull(c: Component, number: int, horizon: float, rng: np.random.Generator) -> Float64:
    """Draw failures of things that are new at the start and replaced by new ones when they fail.

    How many of the first ones fail is binomial, and when, the distribution cut off at the end; each
    that failed has a successor that may fail too.
    """
    assert c.shape is not None  # checked by its description
    scale = c.mtbf / math.gamma(1 + 1 / c.shape)
    failing = -math.expm1(-((horizon / scale) ** c.shape))
    t = rng.random(rng.binomial(number, failing))
    t = scale * (-np.log1p(-t * failing)) ** (1 / c.shape)
    every = [t]
    while len(t):
        t = t + scale * rng.weibull(c.shape, len(t))
        t = t[t < horizon]
        every.append(t)
    return np.concatenate(every)


DRAW: Mapping[str, Callable[[Component, int, float, np.random.Generator], Float64]] = {
    "exponential": _exponential,
    "weibull": _weibull,
    "burn-in": _burn_in,
}
"""Seconds of failures of a number of like things up to a horizon, by their distribution."""
