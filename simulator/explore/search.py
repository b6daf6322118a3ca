"""The search over plans: legal ones, without those that memory rules out, simulated and ordered.

Everything is simulated by `simulate`, with the fewest ops, which moves no time and no memory. Where
the scenario's flows share links, plans are first run with every flow alone, and the best then with
links shared, by which they are ordered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from simulator.describe.scenario import Scenario
from simulator.errors import DescriptionError
from simulator.explore.bound import Bounds
from simulator.explore.change import by_stage, each_flow_alone
from simulator.explore.narrow import exhaust, narrow
from simulator.explore.objective import OBJECTIVES, Deadline, order, priced
from simulator.explore.space import Candidate, Space, plan_space
from simulator.explore.trial import Task, Trial, run_trials
from simulator.pool import cores

BUDGET = 1000
"""Plans that are simulated at most, unless somebody asks for more."""

SHARED = 12
"""Best plans that are run anew where flows share links."""

Sampler = Literal["narrow", "optuna", "all"]

Watch = Callable[[int], None]
"""Is told how many more plans have been simulated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """Plans that were not simulated, as they cannot fit."""

    by_states: tuple[float, ...]
    """By how many bytes states alone are too much, ascending; a plan each."""
    by_activations: tuple[float, ...]
    """Likewise with the activations in flight, of plans whose states would fit."""

    @property
    def count(self) -> int:
        """How many."""
        return len(self.by_states) + len(self.by_activations)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search has found."""

    scenario: Scenario
    objective: str
    deadline: Deadline | None
    axes: Mapping[str, tuple[Any, ...]]
    legal: int
    refused: int
    pruned: Pruned
    how: str
    """How the plans to simulate were chosen, in words."""
    left: int
    """Plans that may fit and were not simulated."""
    trials: tuple[Trial, ...]
    """All that were simulated: those that fit, best first, then the others by what they lack."""
    own: Trial
    """The scenario's own plan."""
    settled: tuple[Trial, ...] = ()
    """Best plans with links shared, in their order; empty where flows are alone."""

    @property
    def fitting(self) -> tuple[Trial, ...]:
        """Those that fit and meet the deadline, best first."""
        met = (t for t in self.trials if t.fits)
        return tuple(t for t in met if self.deadline is None or self.deadline.met_by(t))

    @property
    def best(self) -> tuple[Trial, ...]:
        """Plans in the order in which they are recommended."""
        return self.settled or self.fitting

    @property
    def rank_of_own(self) -> int | None:
        """Place of the scenario's own plan among those that fit, from 1; None where it does not."""
        if not self.own.fits:
            return None
        mine = order(self.objective, self.own)[:2]
        return 1 + sum(order(self.objective, t)[:2] < mine for t in self.fitting)


def search(
    s: Scenario,
    *,
    objective: str = "time",
    over: Mapping[str, tuple[Any, ...]] | None = None,
    budget: int = BUDGET,
    sampler: Sampler = "narrow",
    deadline: Deadline | None = None,
    jobs: int | None = None,
    watch: Watch | None = None,
) -> Found:
    """Return the best plans of a scenario.

    Args:
        s: the scenario; model, devices, batch and all that is no axis of a space stay.
        objective: a key of `OBJECTIVES`.
        over: values by axis (`explore.space.DEFAULTS`) in place of the default ones.
        budget: plans that are simulated at most, where `sampler` is not ``all``; a space with fewer
            is simulated whole.
        sampler: who chooses where a space has more: `narrow`, `optuna`, or nobody (``all``).
        deadline: what plans must meet.
        jobs: processes; one a core when absent.
        watch: is told of progress.

    Raises:
        DescriptionError: when there is no legal plan, or the objective lacks what it needs.
    """
    if objective not in OBJECTIVES:
        raise DescriptionError(f"objective {objective!r} is not one of {', '.join(OBJECTIVES)}")
    if objective == "smallest_cluster":
        if deadline is None:
            raise DescriptionError("smallest_cluster needs a deadline: --tokens and --deadline")
        return _smallest(s, over, budget, sampler, deadline, jobs, watch)
    return _search(priced(s, objective), objective, over, budget, sampler, deadline, jobs, watch)


def _search(
    s: Scenario, objective: str, over: Mapping[str, tuple[Any, ...]] | None, budget: int,
    sampler: Sampler, deadline: Deadline | None, jobs: int | None, watch: Watch | None,
) -> Found:  # fmt: skip
    space = plan_space(each_flow_alone(s), over)
    if not space.candidates:
        raise DescriptionError(
            f"{s.name}: no legal plan in the space; {space.refused} combinations were refused by "
            "the checks, and others do not fill the cluster or divide batch and layers: give other "
            "values with --over"
        )
    pruned, left = _prune(space)

    def run(numbers: Sequence[int]) -> list[Trial]:
        return _run(left, numbers, jobs or cores(), watch)

    def by(t: Trial) -> tuple[object, ...]:
        return order(objective, t)

    if sampler == "all" or len(left) <= budget:
        trials, how = exhaust(left, run), "all of them"
    elif sampler == "optuna":
        from simulator.explore.tpe import propose

        trials, how = propose(left, run, by, budget), "chosen by optuna"
    else:
        trials, how = narrow(left, run, by, budget), "chosen by narrowing"
    own = next((t for t in trials if not t.settings), None) or _own(s)
    found = Found(
        scenario=s, objective=objective, deadline=deadline, axes=space.axes,
        legal=len(space.candidates), refused=space.refused, pruned=pruned, how=how,
        left=len(left) - len(trials), trials=tuple(sorted(trials, key=by)), own=own,
    )  # fmt: skip
    return _with_links_shared(found, left) if s.run.network == "fluid" else found


def _prune(space: Space) -> tuple[Pruned, list[Candidate]]:
    """Return what cannot fit, and what may."""
    bounds, left = Bounds(), []
    by_states, by_activations = [], []
    for candidate in space.candidates:
        states, both = bounds.excess(candidate.scenario)
        if states > 0:
            by_states.append(states)
        elif both > 0:
            by_activations.append(both)
        else:
            left.append(candidate)
    pruned = Pruned(
        by_states=tuple(sorted(by_states)), by_activations=tuple(sorted(by_activations))
    )
    return pruned, left


def _run(
    candidates: Sequence[Candidate], numbers: Sequence[int], jobs: int, watch: Watch | None
) -> list[Trial]:  # fmt: skip
    tasks = [
        Task(n, candidates[n].place, candidates[n].settings, candidates[n].scenario)
        for n in numbers
    ]  # fmt: skip
    trials = []
    for trial in run_trials(tasks, jobs):
        trials.append(trial)
        if watch is not None:
            watch(1)
    return trials


def _own(s: Scenario) -> Trial:
    return next(run_trials([Task(-1, (), {}, each_flow_alone(s))], 1))


def _with_links_shared(found: Found, candidates: Sequence[Candidate]) -> Found:
    """Return what was found with its best plans run anew on links that flows share."""
    s, tasks = by_stage(found.scenario), []
    for trial in found.fitting[:SHARED]:
        c = candidates[trial.number]
        cluster = replace(c.scenario.cluster, network=s.cluster.network)
        scenario = replace(c.scenario, run=s.run, cluster=cluster)
        tasks.append(Task(trial.number, trial.place, trial.settings, scenario))
    again = [t for t in run_trials(tasks, 1) if t.fits]
    again.sort(key=lambda t: order(found.objective, t))
    own = next(run_trials([Task(-1, (), {}, s)], 1))
    return replace(found, settled=tuple(again), own=own)


def _smallest(
    s: Scenario, over: Mapping[str, tuple[Any, ...]] | None, budget: int, sampler: Sampler,
    deadline: Deadline, jobs: int | None, watch: Watch | None,
) -> Found:  # fmt: skip
    """Return the search on the fewest nodes on which some plan fits and meets the deadline.

    Counts of nodes whose peak rates are not enough are not searched. Where none will do, it is the
    search on the most nodes, in which nothing meets the deadline.
    """
    given = dict(over or {})
    counts = sorted(given.pop("cluster.num_nodes", ()) or _powers(s.cluster.num_nodes))
    tried, found = [], None
    for count in counts:
        cluster = replace(s.cluster, num_nodes=count)
        if not deadline.possible(s, cluster):
            tried.append(f"{count}: below the peak rates needed")
            continue
        one = {**given, "cluster.num_nodes": (count,)}
        try:
            found = _search(s, "smallest_cluster", one, budget, sampler, deadline, jobs, watch)
        except DescriptionError as error:
            tried.append(f"{count}: {error}")
            continue
        if found.fitting:
            break
        fits = [t for t in found.trials if t.fits]
        tried.append(f"{count}: {'too slow' if fits else 'nothing fits'}")
    if found is None:
        raise DescriptionError(
            f"{s.name}: no plan meets the deadline on {', '.join(map(str, counts))} nodes "
            f"({'; '.join(tried)}); give more with --over cluster.num_nodes=..."
        )
    seen = f"; nodes tried before ({'; '.join(tried)})" if tried else ""
    return replace(found, how=found.how + seen)


def _powers(most: int) -> list[int]:
    return sorted({*(2**i for i in range(most.bit_length()) if 2**i <= most), most})
