"""What disturbs a step: noise of ops, slow GPUs, slow links, hosts that interfere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from simulator.describe.fields import Count, Duration, Fraction, Natural, Range, validate
from simulator.errors import DescriptionError
from simulator.units import format_seconds

if TYPE_CHECKING:
    from simulator.describe.scenario import Scenario

Spread = Annotated[float, Range(0, 3)]
"""Coefficient of variation: standard deviation over mean."""
Factor = Annotated[float, Range(1, 1000, open_low=True)]
"""Time with the disturbance over time without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """Ranks that take longer in every sample."""

    ranks: tuple[Natural, ...]
    factor: Factor

    def __post_init__(self) -> None:
        validate(self)
        if not self.ranks:
            raise DescriptionError("Slow.ranks: the list is empty; name the ranks that are slow")


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomSlow:
    """Ranks that take longer, drawn anew in each sample."""

    share: Fraction
    """Probability of each rank, whatever the others."""
    factor: Factor

    def __post_init__(self) -> None:
        validate(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interference:
    """Hosts that hold the work of their ranks from time to time, each rank at moments of its own.

    Work stands still for the whole `duration`, as if its host had launched nothing ahead: a detour
    of Hoefler et al. (SC 2010). Messages and collectives under way go on.
    """

    period: Duration
    """From the begin of one to the begin of the next."""
    duration: Duration
    ranks: tuple[Natural, ...] | None = None
    """Those that are held; all of them when absent."""

    def __post_init__(self) -> None:
        validate(self)
        if self.ranks is not None and not self.ranks:
            raise DescriptionError("Interference.ranks: the list is empty; leave it out for all")
        if not self.duration < self.period:
            raise DescriptionError(
                f"Interference.duration: {format_seconds(self.duration)} every "
                f"{format_seconds(self.period)} leaves no time for work; take a shorter one"
            )
        if min(self.duration, self.period - self.duration) < 1e-12:
            raise DescriptionError(
                "Interference.duration: it and what it leaves of the period must be a picosecond "
                "or more"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Jitter:
    """What makes steps differ, drawn before anything runs: from a stream of random numbers for each
    rank and each kind of disturbance, so that no rank or kind moves what another one draws.
    """

    op_cv: Spread = 0.0
    """Coefficient of variation of the time of each op of work (`run.detail` says how fine these
    are), log-normal with its time as the mean, independent of all others."""
    flow_cv: Spread = 0.0
    """Likewise of each message and collective, one draw for all its members."""
    host_cv: Spread = 0.0
    """Likewise of what a rank's host does beside steps: each request, read, transform and copy of a
    batch, each snapshot, write and reading of a checkpoint. No other disturbance touches these."""
    gpu_cv: Spread = 0.0
    """Likewise of each rank: all its work takes one log-normal factor, drawn anew in each sample.
    On like GPUs of a cluster the same benchmark varies by 8 % on average, 22 % at most (Sinha et
    al., SC 2022, arXiv 2208.11035)."""
    slow_gpus: tuple[Slow, ...] = ()
    """All work of the rank takes `factor` times as long."""
    random_slow_gpus: RandomSlow | None = None
    slow_links: tuple[Slow, ...] = ()
    """All messages and collectives that the rank takes part in take `factor` times as long, by the
    slowest of their members."""
    random_slow_links: RandomSlow | None = None
    interference: Interference | None = None
    samples: Count = 100
    seed: Annotated[int, Range(0, 2**32 - 1)] = 0

    def __post_init__(self) -> None:
        validate(self)
        problems = []
        for name in ("slow_gpus", "slow_links"):
            count = Counter(rank for slow in getattr(self, name) for rank in slow.ranks)
            twice = [rank for rank, times in count.items() if times > 1]
            if twice:
                problems.append(f"Jitter.{name}: rank {min(twice)} is named more than once")
        if problems:
            raise DescriptionError(problems)

    @property
    def is_random(self) -> bool:
        """Whether samples differ."""
        drawn = self.random_slow_gpus, self.random_slow_links, self.interference
        return bool(self.op_cv or self.flow_cv or self.host_cv or self.gpu_cv) or any(
            one is not None for one in drawn
        )


def jitter_problems(s: Scenario) -> Iterator[str]:
    """Say what of a scenario's jitter does not fit the rest of it."""
    jitter, world = s.jitter, s.plan.world_size
    if jitter is None:
        return
    named = {"slow_gpus": jitter.slow_gpus, "slow_links": jitter.slow_links}
    for name, entries in named.items():
        for rank in sorted({r for slow in entries for r in slow.ranks if r >= world}):
            yield f"jitter.{name}: there is no rank {rank}; ranks are 0 to {world - 1}"
    held = (jitter.interference and jitter.interference.ranks) or ()
    for rank in sorted({r for r in held if r >= world}):
        yield f"jitter.interference: there is no rank {rank}; ranks are 0 to {world - 1}"
    if s.plan.staleness is not None:
        yield (
            "jitter is not modelled with plan.staleness, where replicas have no step in common; "
            "leave one of them out"
        )
    if jitter.host_cv and s.data is None and s.checkpoint is None:
        yield (
            "jitter.host_cv is the spread of what hosts do for [data] and [checkpoint], and there "
            "is neither; leave it out"
        )
    if s.run.network == "fluid":
        for name in ("flow_cv", "slow_links", "random_slow_links"):
            if getattr(jitter, name):
                yield (
                    f"jitter.{name} lengthens messages and collectives as a whole, and in "
                    "run.network 'fluid' links set their rates; slow links down by "
                    "cluster.network.degraded there"
                )
        if s.run.overlap_slowdown:
            yield (
                f"jitter is not modelled with run.overlap_slowdown {s.run.overlap_slowdown:g} in a "
                "fluid run, where work shares its rank with flows; leave one of them out"
            )
