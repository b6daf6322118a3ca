"""What became of a job over days: an array for each question, a row for each sample."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.describe.operations import Operations
from simulator.describe.scenario import Scenario
from simulator.operate.job import CATEGORIES, NANOSECONDS, TRAINING, Job
from simulator.program import Int64

if TYPE_CHECKING:
    from simulator.report.result import Result
    from simulator.report.save import SaveUse

Float64 = npt.NDArray[np.float64]


class Outcome(NamedTuple):
    """What engines give: whole numbers, a row for each sample."""

    ticks: Int64
    """Nanoseconds by category; each row adds up to the wall clock."""
    interruptions: Int64
    """By component."""
    progress: Int64
    """Steps kept, the sum over them of the replicas that ran, checkpoints taken."""


class Spread(NamedTuple):
    """A quantity over samples."""

    mean: float
    error: float
    """Half of the 95 % confidence interval of the mean (normal); NaN for one sample."""
    low: float
    """5th percentile."""
    middle: float
    high: float
    """95th percentile."""

    @classmethod
    def of(cls, values: npt.NDArray[Any]) -> Spread:
        """Return the spread of the values of all samples."""
        low, middle, high = np.percentile(values, [5, 50, 95]).tolist()
        many = len(values) > 1
        error = 1.96 * float(np.std(values, ddof=1)) / len(values) ** 0.5 if many else float("nan")
        return cls(float(np.mean(values)), error, low, middle, high)


@dataclass(frozen=True)
class Operated:
    """A scenario's operations, and what became of them in every sample."""

    scenario: Scenario
    operations: Operations
    job: Job
    step_times_s: tuple[float, ...]
    """Of steps with nothing wrong, one after the other, round and round: samples of it under the
    scenario's jitter, or one time."""
    seeds: range
    outcome: Outcome
    step: Result | None
    """The simulated step; none where its time was stated."""
    saved: SaveUse | None = None
    """The simulated checkpoint; none where its times were stated."""

    @property
    def step_time_s(self) -> float:
        """Mean of the steps with nothing wrong."""
        return sum(self.step_times_s) / len(self.step_times_s)

    @cached_property
    def shares(self) -> Float64:
        """(samples, categories): of the wall clock."""
        shares: Float64 = self.outcome.ticks / self.job.duration
        return shares

    @property
    def goodput(self) -> Float64:
        """Effective training time over the wall clock, by sample."""
        goodput: Float64 = np.asarray(self.shares[:, TRAINING], np.float64)
        return goodput

    @property
    def seconds(self) -> Float64:
        """(samples, categories)."""
        seconds: Float64 = self.outcome.ticks / NANOSECONDS
        return seconds

    @property
    def steps(self) -> Int64:
        """Steps kept, by sample."""
        return self.outcome.progress[:, 0]

    @property
    def tokens(self) -> Float64:
        """Tokens trained on and kept, by sample; fewer replicas train on fewer."""
        a_share = self.scenario.tokens_per_step / self.job.replicas[0]
        tokens: Float64 = np.asarray(self.outcome.progress[:, 1] * a_share, np.float64)
        return tokens

    @property
    def interruptions(self) -> Int64:
        """Of the job, by sample."""
        total: Int64 = self.outcome.interruptions.sum(axis=1)
        return total

    def by_category(self) -> dict[str, Float64]:
        """Return the shares of the wall clock by name of category, by sample."""
        return {name: self.shares[:, k] for k, name in enumerate(CATEGORIES)}

    def __str__(self) -> str:
        from simulator.operate.text import operated_text

        return operated_text(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values, units in the names of keys."""
        from simulator.operate.text import operated_dict

        return operated_dict(self)
