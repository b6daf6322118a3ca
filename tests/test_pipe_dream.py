"""PipeDream: weights updated after every microbatch, several versions of them, no flush."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import simulator as sim
from simulator.describe.model import Model
from simulator.describe.scenario import Scenario
from simulator.lower import lower
from simulator.lower.memory import rank_memory, static_memory
from simulator.program import ACTIONS, Flow, Program, Work

ScenarioOf = Callable[..., Scenario]

PLAN = {"pp": 4, "schedule": "PipeDream"}


@pytest.fixture
def even(llama: Model) -> Model:
    """A model whose embedding and head take next to no time."""
    return replace(llama, num_hidden_layers=8, vocab_size=8)


def rows(p: Program, kind: str, stream: str = "compute") -> Any:
    """Return the ops of an action on a stream."""
    named = p.stream == p.streams.index(stream)
    return np.flatnonzero(named & (p.action == ACTIONS.index(kind)))


# 1F1B idles p-1 = 3 of m+p-1 = 11 microbatches' time; here only stages' differences are left.
def test_steps_follow_without_a_bubble(scenario_of: ScenarioOf, even: Model) -> None:
    flush, none = (
        sim.simulate(scenario_of(model=even, plan=plan, run={"num_steps": 3}, batch=8))
        for plan in (PLAN | {"schedule": "1F1B"}, PLAN)
    )
    assert min(flush.breakdown.bubble_fraction) > 0.25
    assert max(none.breakdown.bubble_fraction) < 0.1
    assert none.breakdown.bubble_fraction[-1] == 0


# 8 microbatches a step, 2 steps: each of the 16 is updated with on each of 4 stages.
def test_every_microbatch_updates_the_weights(scenario_of: ScenarioOf, even: Model) -> None:
    p = lower(scenario_of(model=even, plan=PLAN, run={"num_steps": 2}, batch=8))
    updates = rows(p, "OPT")
    done = set(zip(*(x[updates].tolist() for x in (p.stage, p.step, p.microbatch)), strict=True))
    assert done == {(stage, step, m) for stage in range(4) for step in (0, 1) for m in range(8)}


def test_an_update_follows_its_backward_and_its_sum(scenario_of: ScenarioOf, even: Model) -> None:
    s = scenario_of(model=even, plan=PLAN | {"dp": 2}, run={"num_steps": 2}, batch=8)
    result = sim.simulate(s)
    p, t = result.program, result.timeline
    key = (p.rank, p.stage, p.step, p.microbatch)

    def ends(kind: str, stream: str) -> dict[tuple[int, ...], int]:
        found: dict[tuple[int, ...], int] = {}
        for op in rows(p, kind, stream).tolist():
            at = tuple(int(x[op]) for x in key)
            found[at] = max(found.get(at, 0), int(t.end[op]))
        return found

    sums, backward = ends("B", "dp"), ends("B", "compute")
    updates = rows(p, "OPT").tolist()
    assert len(updates) == 2 * 4 * 8  # ranks of dp x stages x microbatches of both
    for op in updates:
        at = tuple(int(x[op]) for x in key)
        assert t.start[op] >= sums[at] >= backward[at]


# Each microbatch sums all gradients of its stage: 2 bytes a parameter.
def test_gradients_are_summed_for_every_microbatch(scenario_of: ScenarioOf, even: Model) -> None:
    s = scenario_of(model=even, plan=PLAN | {"dp": 2}, run={"num_steps": 1}, batch=8)
    p, total = lower(s), dict.fromkeys(range(4), 0)
    for op in rows(p, "B", "dp").tolist():
        cost = p.costs[p.cost[op]]
        assert isinstance(cost, Flow)
        total[int(p.stage[op])] += int(cost.bytes)
    assert total == {i: 4 * 2 * m.params for i, m in enumerate(static_memory(s))}


# Rank r has 4 - r microbatches in flight, each with the weights that its forward used.
def test_ranks_keep_a_version_of_weights_for_each_microbatch_in_flight(
    scenario_of: ScenarioOf, even: Model
) -> None:
    s = scenario_of(model=even, plan=PLAN, batch=8)
    plain = rank_memory(scenario_of(model=even, plan=PLAN | {"schedule": "1F1B"}, batch=8))
    for rank, held in enumerate(rank_memory(s)):
        assert held.weights == (4 - rank) * plain[rank].weights
        assert (held.gradients, held.optimizer) == (plain[rank].gradients, plain[rank].optimizer)


# With one microbatch a step there are still as many in flight: steps overlap.
def test_short_steps_keep_as_many_versions(scenario_of: ScenarioOf, even: Model) -> None:
    s = scenario_of(model=even, plan=PLAN, run={"num_steps": 8}, batch=1)
    layer = rank_memory(scenario_of(model=even, plan=PLAN, batch=8))
    assert [m.weights for m in rank_memory(s)] == [m.weights for m in layer]


# A gradient is written, not added: microbatches share none.
def test_no_gradient_is_accumulated(scenario_of: ScenarioOf, even: Model) -> None:
    p = lower(scenario_of(model=even, plan=PLAN, run={"detail": "kernel"}, batch=8))
    works = [cost for cost in p.costs if isinstance(cost, Work)]
    assert not any("accumulation" in kernel.name for work in works for kernel in work.kernels)


def test_the_report_says_that_semantics_change(scenario_of: ScenarioOf, even: Model) -> None:
    text = str(sim.simulate(scenario_of(model=even, plan=PLAN, batch=8)))
    assert "changes semantics: weights are updated after every microbatch" in text
    assert "ranks keep 4, 3, 2, 1 versions of their weights" in text


# Gradients of experts are summed over those that hold them, the others over dp: either is last.
@pytest.mark.parametrize(
    ("plan", "steps"),
    [(PLAN, 2), ({"pp": 4, "schedule": "ZBVZeroBubble", "chunks": 2}, 1), ({"pp": 4}, 1)],
)
def test_an_update_waits_for_the_sums_of_experts_and_of_the_others(
    scenario_of: ScenarioOf, llama: Model, plan: dict[str, Any], steps: int
) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    model = replace(llama, num_hidden_layers=8, **experts)
    s = scenario_of(
        model=model, plan=plan | {"dp": 4, "ep": 2}, run={"num_steps": steps}, batch=32
    )  # fmt: skip
    result = sim.simulate(s)
    p, t = result.program, result.timeline
    by_step = plan["schedule"] == "PipeDream" if "schedule" in plan else False
    waits = 0
    for op in rows(p, "OPT").tolist():
        same = (p.rank == p.rank[op]) & (p.stage == p.stage[op]) & (p.step == p.step[op])
        same &= (p.microbatch == p.microbatch[op]) | (not by_step)
        for stream in ("dp", "edp"):
            sums = same & (p.stream == p.streams.index(stream))
            waits += int(sums.any())
            assert t.start[op] >= t.end[sums].max()
    assert waits == 2 * len(rows(p, "OPT"))
