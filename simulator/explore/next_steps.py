"""Next things to try: changes of the plan that make a step shorter, one by one and together.

Single changes are neighbours of the plan in the space of plans, and a table of switches. Then the
best is made and changes are tried on top of it, round by round, as long as one gains something.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from simulator.describe.scenario import Scenario
from simulator.errors import DescriptionError
from simulator.explore.bound import Bounds
from simulator.explore.change import Settings, changed, each_flow_alone
from simulator.explore.space import DEFAULTS, plan_space
from simulator.explore.trial import Task, Trial, run_trial

ROUNDS = 3
"""Changes that are made on top of each other."""

LEAST_GAIN = 0.002
"""Of the step: changes that gain less are not listed."""

GROUPS = (
    ("plan.tp", "plan.pp", "plan.cp"), ("plan.schedule", "plan.chunks"), ("plan.microbatch_size",),
    ("plan.recompute",), ("plan.zero",), ("plan.sequence_parallel",), ("plan.ep",),
)  # fmt: skip
"""Axes that are changed together; all others stay as they are."""

SWITCHES: tuple[Settings, ...] = (
    {"plan.p2p_overlap": True}, {"plan.grad_overlap": True}, {"plan.tp_overlap": "grads"},
    {"plan.tp_overlap": "all"}, {"plan.sequence_parallel": True, "plan.tp_overlap": "all"},
    {"plan.scatter_gather": True}, {"plan.reshard_after_forward": False},
    {"plan.offload_activations": False}, {"plan.offload_optimizer": False},
    {"run.attention": "flash"}, {"run.compiled": True}, {"run.fused_optimizer": True},
    {"run.fused_accumulation": True}, {"plan.stage_cut": "time"},
)  # fmt: skip
"""Other changes of plan and run; none alters what a step computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A change, and what a run of it says."""

    settings: Settings
    step_time_s: float
    gain: float
    """Of the step that it is compared with."""
    more_memory_bytes: float
    """On the fullest rank; below 0 it frees memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """What to try next."""

    singles: tuple[Step, ...]
    """Changes of the scenario that fit and gain, best first."""
    chain: tuple[Step, ...]
    """Changes made on top of each other, each against the scenario itself."""
    tried: int
    over: int
    """Changes of the scenario that gain and do not fit."""
    left_out: tuple[str, ...]
    """What was not tried, and why."""


def next_steps(s: Scenario, rounds: int = ROUNDS) -> Steps:
    """Return changes of a scenario's plan that shorten its step; each is simulated."""
    first = _run({}, each_flow_alone(s))
    here, settings, base = first, Settings(), s
    singles: tuple[Step, ...] = ()
    chain: list[Step] = []
    tried, over = 0, 0
    left_out: list[str] = []
    for turn in range(rounds):
        found = list(_around(base, left_out if not turn else []))
        trials = [_run(*one) for one in found]
        tried += len(trials)
        gains = [t for t in trials if not t.failed]
        gains = [t for t in gains if t.step_time_s < (1 - LEAST_GAIN) * here.step_time_s]
        fitting = sorted((t for t in gains if t.fits), key=lambda t: (t.step_time_s, t.name))
        if not turn:
            singles = tuple(_step(t.settings, t, first) for t in fitting)
            over = len(gains) - len(fitting)
        if not fitting:
            break
        here = fitting[0]
        settings = {**settings, **here.settings}
        chain.append(_step(settings, here, first))
        made = changed(base, here.settings)
        assert made is not None  # it has run
        base = made
    return Steps(
        singles=singles, chain=tuple(chain), tried=tried, over=over, left_out=tuple(left_out)
    )  # fmt: skip


def _run(settings: Settings, s: Scenario) -> Trial:
    return run_trial(Task(0, (), settings, s))


def _step(settings: Settings, t: Trial, first: Trial) -> Step:
    return Step(
        settings=settings, step_time_s=t.step_time_s, gain=1 - t.step_time_s / first.step_time_s,
        more_memory_bytes=t.device_memory_bytes - first.device_memory_bytes,
    )  # fmt: skip


def _around(s: Scenario, left_out: list[str]) -> Iterator[tuple[Settings, Scenario]]:
    """Yield the changes of a scenario that are legal and may fit."""
    alone, bounds = each_flow_alone(s), Bounds()
    for switch in SWITCHES:
        if all(getattr(getattr(s, k.partition(".")[0]), k.partition(".")[2]) == v
               for k, v in switch.items()):  # fmt: skip
            continue
        made = changed(alone, switch)
        if made is not None:
            yield switch, made
    own = {key: (getattr(getattr(s, key.partition(".")[0]), key.partition(".")[2]),)
           for key in DEFAULTS}  # fmt: skip
    for group in GROUPS:
        fixed = {key: value for key, value in own.items() if key not in group}
        try:
            space = plan_space(alone, fixed)
        except DescriptionError as error:
            left_out.append(f"other degrees, schedules, microbatches and the like: {error}")
            return
        for candidate in space.candidates:
            if candidate.settings and max(bounds.excess(candidate.scenario)) <= 0:
                yield candidate.settings, candidate.scenario
