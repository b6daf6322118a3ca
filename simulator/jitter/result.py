"""Steps of many samples: how they spread, who delays them, what each disturbance costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.describe.jitter import Jitter
from simulator.jitter.paths import Delays
from simulator.program import NONE, Int32, Int64
from simulator.report.breakdown import CATEGORIES
from simulator.report.result import Result
from simulator.units import TICKS_PER_SECOND

Float64 = npt.NDArray[np.float64]

PERCENTILES = (1, 5, 25, 50, 75, 95, 99)


class Gain(NamedTuple):
    """What a step would gain without one disturbance."""

    mean_s: float
    error_s: float
    """Half of the 95 % confidence interval of the mean of the samples' differences (normal)."""
    share: float
    """Of the mean step."""


class Blame(NamedTuple):
    """What ranks, kinds or places of the pipeline have to do with the length of steps."""

    path_s: float
    """Seconds on the critical path of a step, mean over samples."""
    delay_s: float
    """Of them those that an undisturbed step would not have taken."""
    delays_most: float
    """Share of samples that it delays more than any other does."""
    ends: float
    """Share of samples that end with an op of it."""
    critical: float = float("nan")
    """Share of samples in which some op of its work has no slack; of a place, mean of its ranks."""
    slack_s: float = float("nan")
    """By how much its work could be late without lengthening the step, least of its ops, mean."""


@dataclass(frozen=True, eq=False)
class Jittered:
    """A scenario's step under jitter, in every sample."""

    result: Result
    """Of the step that nothing disturbs."""
    jitter: Jitter
    delays: Delays
    without: Mapping[str, Int64]
    """Ticks of the steps of the same samples, replayed without one disturbance."""

    @cached_property
    def step_ticks(self) -> Int64:
        """Ticks of each sample's step."""
        ticks: Int64 = self.delays.window[:, 1] - self.delays.window[:, 0]
        return ticks

    @property
    def step_s(self) -> Float64:
        """Seconds of each sample's step."""
        return self.step_ticks / TICKS_PER_SECOND

    @property
    def mean_s(self) -> float:
        """Mean step."""
        return float(self.step_s.mean())

    @property
    def sd_s(self) -> float:
        """Standard deviation of steps; 0 of one sample."""
        return float(self.step_s.std(ddof=1)) if len(self.step_ticks) > 1 else 0.0

    @property
    def percentiles_s(self) -> dict[int, float]:
        """Seconds that so many per cent of samples do not exceed."""
        return dict(zip(PERCENTILES, np.percentile(self.step_s, PERCENTILES).tolist(), strict=True))

    @cached_property
    def gains(self) -> dict[str, Gain]:
        """What each disturbance costs, the greatest first."""
        out = {}
        for name, ticks in self.without.items():
            gain = (self.step_ticks - ticks) / TICKS_PER_SECOND
            many = len(gain) > 1
            error = 1.96 * float(gain.std(ddof=1)) / len(gain) ** 0.5 if many else 0.0
            out[name] = Gain(float(gain.mean()), error, float(gain.mean()) / self.mean_s)
        return dict(sorted(out.items(), key=lambda item: -item[1].mean_s))

    @cached_property
    def by_rank(self) -> list[Blame]:
        """Blame of every rank."""
        d, ranks = self.delays, self.result.tiled.tile_ranks
        most = self._shares(np.where(d.most[:, 0] == NONE, NONE, ranks[tuple(d.most[:, :2].T)]))
        ends = self._shares(ranks[self._place_of_last, d.last[:, 1]])
        count = len(self.step_ticks)
        place, tile = np.unravel_index(np.argsort(ranks, axis=None), ranks.shape)
        second = count * TICKS_PER_SECOND
        return [
            Blame(path, delay, most.get(rank, 0.0), ends.get(rank, 0.0), critical, slack)
            for rank, (path, delay, critical, slack) in enumerate(
                zip(
                    (d.on_path[place, tile] / second).tolist(),
                    (d.delay[place, tile] / second).tolist(),
                    (d.critical[place, tile] / count).tolist(),
                    (d.slack[place, tile] / second).tolist(),
                    strict=True,
                )
            )
        ]

    @cached_property
    def by_place(self) -> list[Blame]:
        """Blame of every place in the pipeline, over all replicas."""
        d, count = self.delays, len(self.step_ticks)
        most, ends = self._shares(d.most[:, 2]), self._shares(self._place_of_last)
        second = count * TICKS_PER_SECOND
        return [
            Blame(
                float(d.on_path[k].sum() / second),
                float(d.delay[k].sum() / second),
                most.get(k, 0.0),
                ends.get(k, 0.0),
                float(d.critical[k].mean() / count),
                float(d.slack[k].mean() / second),
            )
            for k in range(len(d.on_path))
        ]

    @cached_property
    def by_kind(self) -> dict[str, Blame]:
        """Blame of work and flows by kind; what no path meets is left out."""
        from simulator.jitter.paths import kinds_of_rows

        d, second = self.delays, len(self.step_ticks) * TICKS_PER_SECOND
        most = self._shares(d.most[:, 3])
        ends = self._shares(kinds_of_rows(self.result.tiled)[d.last[:, 0]])
        return {
            name: Blame(
                float(d.path_kind[k] / second),
                float(d.delay_kind[k] / second),
                most.get(k, 0.0),
                ends.get(k, 0.0),
            )
            for k, name in enumerate(CATEGORIES)
            if d.path_kind[k]
        }

    @cached_property
    def worst_ops(self) -> list[tuple[str, int, float]]:
        """Name, rank, and share of samples of the ops that delay a sample by most, most often."""
        p = self.result.tiled
        found = Counter((r, t) for r, t in self.delays.op.tolist() if r != NONE)
        return [
            (p.label(row), int(p.tile_ranks[p.rank[row], tile]), times / len(self.step_ticks))
            for (row, tile), times in sorted(found.items(), key=lambda item: (-item[1], item[0]))
        ]

    def __str__(self) -> str:
        from simulator.jitter.text import jittered_text

        return jittered_text(self)

    @property
    def _place_of_last(self) -> Int64:
        return self.result.tiled.rank[self.delays.last[:, 0]].astype(np.int64)

    def _shares(self, codes: Int64 | Int32) -> dict[int, float]:
        """Return the share of samples of each code but NONE."""
        count = Counter(codes.tolist())
        return {code: n / len(codes) for code, n in count.items() if code != NONE}
