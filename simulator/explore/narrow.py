"""Which plans of a space are simulated: all, or a part of them that is led to the best.

Narrowing: a part of the budget is spread evenly over the space in its order; then, round by round,
go the neighbours of the best plans so far, those that differ in one of mesh, schedule, microbatch,
recomputation, ZeRO and sequence parallelism, or in mesh and schedule together; of more and more of
the best when no neighbour is left. The same space and budget give the same trials.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from simulator.explore.space import Candidate
from simulator.explore.trial import Trial

SPREAD = 0.4
"""Part of the budget that is spread over the space."""

BEST = 8
"""Plans whose neighbours are tried first."""

Run = Callable[[Sequence[int]], list[Trial]]
"""Simulates candidates by number."""

Order = Callable[[Trial], tuple[object, ...]]


def exhaust(candidates: Sequence[Candidate], run: Run) -> list[Trial]:
    """Simulate all."""
    return run(range(len(candidates)))


def narrow(
    candidates: Sequence[Candidate], run: Run, order: Order, budget: int
) -> list[Trial]:  # fmt: skip
    """Simulate at most `budget` of many candidates."""
    places = np.array([c.place for c in candidates], np.int64)
    first = max(1, min(budget, round(SPREAD * budget)))
    chosen = np.unique(np.linspace(0, len(candidates) - 1, first).round().astype(np.int64))
    trials = run(chosen.tolist())
    seen = np.zeros(len(candidates), bool)
    seen[chosen] = True
    leaders = BEST
    while (left := budget - len(trials)) > 0 and not seen.all():
        best = sorted(trials, key=order)[:leaders]
        near = np.zeros(len(candidates), bool)
        for trial in best:
            near |= neighbours(places, np.array(trial.place))
        fresh = np.flatnonzero(near & ~seen)[:left]
        if not len(fresh):
            if leaders >= len(trials):
                fresh = np.flatnonzero(~seen)[:left]
            leaders *= 2
        if len(fresh):
            seen[fresh] = True
            trials += run(fresh.tolist())
    return trials


def neighbours(places: np.ndarray, place: np.ndarray) -> np.ndarray:
    """Return which places differ from one in one respect, or in mesh and schedule."""
    differs = places != place
    count = differs.sum(axis=1)
    near: np.ndarray = (count == 1) | ((count == 2) & differs[:, 0] & differs[:, 1])
    return near
