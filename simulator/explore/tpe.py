"""The door of optuna: its tree-structured Parzen estimator proposes plans of a space.

Each of mesh, schedule, microbatch, recomputation, ZeRO and sequence parallelism is a categorical
parameter. What it proposes and the space does not have counts as failed, and what was proposed
before is not simulated again (Akiba et al., 2019; Bergstra et al., 2011).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from simulator.errors import DescriptionError
from simulator.explore.narrow import Order, Run
from simulator.explore.space import Candidate
from simulator.explore.trial import Trial

PARAMETERS = ("mesh", "schedule", "microbatch", "recompute", "zero", "sequence_parallel")

BATCH = 16
"""Proposals that are simulated together."""

PATIENCE = 20
"""Proposals a trial, after which a space that yields nothing new is left."""


def propose(
    candidates: Sequence[Candidate], run: Run, order: Order, budget: int, seed: int = 0
) -> list[Trial]:  # fmt: skip
    """Simulate at most `budget` candidates, as optuna proposes them.

    Raises:
        DescriptionError: when optuna is not installed.
    """
    try:
        import optuna
    except ImportError:
        raise DescriptionError(
            "--sampler optuna needs the extra search: pip install 'trainsim[search]'"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=max(10, budget // 4))
    study = optuna.create_study(sampler=sampler)
    by_place = {c.place: number for number, c in enumerate(candidates)}
    choices = [sorted({c.place[i] for c in candidates}) for i in range(len(PARAMETERS))]
    trials: dict[int, Trial] = {}
    asked = 0
    while len(trials) < min(budget, len(candidates)) and asked < PATIENCE * budget:
        proposed: dict[int, list[Any]] = {}
        for _ in range(BATCH):
            trial = study.ask()
            asked += 1
            place = tuple(
                trial.suggest_categorical(name, values)
                for name, values in zip(PARAMETERS, choices, strict=True)
            )
            number = by_place.get(place)
            if number is None:
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
            else:
                proposed.setdefault(number, []).append(trial)
        fresh = [number for number in proposed if number not in trials][: budget - len(trials)]
        trials |= dict(zip(fresh, run(fresh), strict=True))
        worst = _worst(list(trials.values()), order)
        for number, same in proposed.items():
            for trial in same:
                if number not in trials:
                    study.tell(trial, state=optuna.trial.TrialState.FAIL)
                else:
                    study.tell(trial, _value(trials[number], order, worst))
    return list(trials.values())


def _value(trial: Trial, order: Order, worst: float) -> float:
    """Return the number that is to be small; what does not fit is worse than all that does."""
    kind, first, *more = order(trial)
    assert isinstance(first, float | int)
    if kind:
        return 2 * worst + 1
    second = more[0] if isinstance(more[0], float) else 0.0
    return float(first) if isinstance(first, float) else first + second / (1 + second)


def _worst(trials: list[Trial], order: Order) -> float:
    fitting = [t for t in trials if not order(t)[0]]
    return max((abs(_value(t, order, 0.0)) for t in fitting), default=1.0)
