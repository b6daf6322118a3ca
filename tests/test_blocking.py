"""Messages between stages that block, and those of which each tp rank sends a part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import simulator as sim
from simulator.describe.model import Model
from simulator.describe.scenario import Scenario
from simulator.errors import DeadlockError, DescriptionError
from simulator.hardware import price
from simulator.lower import lower
from simulator.program import ACTION_CODE, Flow

ScenarioOf = Callable[..., Scenario]


def alike(gpt: Model) -> Model:
    """Return a model whose stages all take about the same: next to no vocabulary."""
    return replace(gpt, vocab_size=1, num_hidden_layers=8)


def spans(s: Scenario) -> tuple[Any, Any, Any]:
    """Return the program of a scenario, and when its ops start and end."""
    result = sim.simulate(s, folded=False)
    return result.program, result.timeline.start, result.timeline.end


@pytest.mark.parametrize(("chunks", "schedule"), [(1, "1F1B"), (2, "Interleaved1F1B")])
def test_a_rank_does_not_compute_while_its_messages_are_under_way(
    scenario_of: ScenarioOf, gpt: Model, chunks: int, schedule: str
) -> None:
    plan = {"pp": 4, "chunks": chunks, "schedule": schedule, "p2p_overlap": False}
    p, start, end = spans(scenario_of(model=alike(gpt), plan=plan, run={"num_steps": 1}, batch=8))
    sends = np.isin(p.action, [ACTION_CODE["SEND_F"], ACTION_CODE["SEND_B"]])
    works = p.stream == p.streams.index("compute")
    for op in np.flatnonzero(sends).tolist():
        mine = works & (p.rank == p.rank[op])
        assert not (mine & (start < end[op]) & (end > start[op])).any()


# 2 stages, 1 microbatch: F, message, F, B, message, B, with nothing to overlap.
# With 2 microbatches stage 0 computes F0, sends it, computes F1: that send is now in the way.
def test_the_first_stage_waits_for_what_it_sends(scenario_of: ScenarioOf, gpt: Model) -> None:
    plan: dict[str, Any] = {"pp": 2, "schedule": "GPipe"}

    def second_forward(overlap: bool) -> int:
        s = scenario_of(
            model=alike(gpt), plan={**plan, "p2p_overlap": overlap}, run={"num_steps": 1}, batch=2
        )
        p, start, _ = spans(s)
        ops = (p.action == ACTION_CODE["F"]) & (p.microbatch == 1) & (p.rank == 0)
        return int(start[ops].min())

    s = scenario_of(model=alike(gpt), plan=plan, run={"num_steps": 1}, batch=2)
    program = lower(s)
    ticks = price(program, s.cluster)
    message = int(ticks[program.action == ACTION_CODE["SEND_F"]].max())
    assert second_forward(False) - second_forward(True) == message > 0


@given(
    pp=st.integers(2, 4), batch=st.integers(1, 8), chunks=st.integers(1, 2), tp=st.integers(1, 2)
)
@settings(max_examples=30, deadline=None)
def test_engines_agree_on_messages_that_block(
    scenario_of: ScenarioOf, gpt: Model, pp: int, batch: int, chunks: int, tp: int
) -> None:
    schedule = "Interleaved1F1B" if chunks > 1 else "1F1B"
    plan = {
        "pp": pp, "chunks": chunks, "schedule": schedule, "p2p_overlap": False, "tp": tp,
        "scatter_gather": tp > 1, "layers_per_stage": [1] * pp * chunks,
    }  # fmt: skip
    model = replace(gpt, num_hidden_layers=pp * chunks)
    s = scenario_of(model=model, plan=plan, batch=batch * (pp if chunks > 1 else 1))
    times = {e: sim.simulate(s, engine=e).timeline for e in ("compiled", "events", "reference")}
    assert times["compiled"] == times["events"] == times["reference"]


# Each of 2 ranks sends half of 2 bytes * 32 tokens * 64, and the halves are gathered: forward on
# stage 1, backward on stage 0, for each of 4 microbatches.
def test_tp_ranks_send_a_part_each_and_gather_the_parts(scenario_of: ScenarioOf) -> None:
    plan = {"pp": 2, "tp": 2, "scatter_gather": True}
    p = lower(scenario_of(plan=plan, run={"num_steps": 1})).flat
    costs = [p.costs[c] for c in p.cost.tolist()]
    whole = 2.0 * 32 * 64
    sends = {c.bytes for c in costs if isinstance(c, Flow) and c.name == "send_recv"}
    gathers = [
        int(rank) for c, rank in zip(costs, p.rank, strict=True)
        if isinstance(c, Flow) and c.name == "all_gather" and c.bytes == whole
    ]  # fmt: skip
    assert sends == {whole / 2}
    assert sorted(gathers) == [rank for rank in range(4) for _ in range(4)]


# Two chunks a rank: with grad_overlap the gradients of the second are reduced while the first is
# still at work; without, all of a rank's begin after its last backward.
@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_wait_for_the_last_backward_of_the_rank(
    scenario_of: ScenarioOf, gpt: Model, overlap: bool
) -> None:
    plan = {
        "pp": 2, "dp": 2, "chunks": 2, "schedule": "Interleaved1F1B", "grad_overlap": overlap,
    }  # fmt: skip
    p, start, end = spans(scenario_of(model=alike(gpt), plan=plan, run={"num_steps": 2}, batch=8))
    late = True
    for rank in range(4):
        for step in range(2):
            mine = (p.rank == rank) & (p.step == step) & (p.action == ACTION_CODE["B"])
            works = mine & (p.stream == p.streams.index("compute"))
            sums = mine & (p.stream == p.streams.index("dp"))
            assert sums.any()
            late &= bool(start[sums].min() >= end[works].max())
    assert late != overlap


# Streams beside compute carry what is no message between stages, and block nothing.
@pytest.mark.parametrize(
    "plan",
    [
        {"dp": 2, "zero": 1},
        {"dp": 2, "zero": 2},
        {"dp": 2, "zero": 3},
        {"tp": 2, "tp_overlap": "grads"},
        {"tp": 2, "tp_overlap": "all", "sequence_parallel": True},
    ],
)
@pytest.mark.parametrize("run", [{}, {"clip_grad": True}])
def test_other_streams_do_not_block(
    scenario_of: ScenarioOf, plan: dict[str, Any], run: dict[str, Any]
) -> None:
    pipeline = {"pp": 4, "schedule": "1F1B"}
    blocked, free = (
        sim.simulate(scenario_of(plan={**pipeline, **plan, "p2p_overlap": o}, run=run, batch=8))
        for o in (False, True)
    )
    assert blocked.step_time_s >= free.step_time_s


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"p2p_overlap": False}, "no effect with pp 1"),
        ({"grad_overlap": False}, "no effect with dp 1"),
        ({"grad_overlap": False, "dp": 2, "zero": 2}, "no effect with zero 2"),
        ({"grad_overlap": False, "dp": 2, "bucket_size": 1e6}, "bucket_size: 1e.06 has no effect"),
        (
            {"grad_overlap": False, "dp": 2, "first_bucket_size": 1e6},
            "no effect with grad_overlap false",
        ),
        ({"scatter_gather": True, "tp": 2}, "no effect with pp 1"),
        ({"scatter_gather": True, "pp": 2}, "no effect with tp 1"),
        (
            {"scatter_gather": True, "pp": 2, "tp": 2, "sequence_parallel": True},
            "leave one of the two out",
        ),
    ],
)
def test_what_has_no_effect_is_refused(
    scenario_of: ScenarioOf, plan: dict[str, Any], words: str
) -> None:
    with pytest.raises(DescriptionError, match=words):
        scenario_of(plan=plan)


# Stage 1 of 2 computes F0 (2 s) while stage 0 sends F1's output: it gets there at once when eager.
def test_an_eager_message_does_not_wait_for_its_receiver(
    scenario_of: ScenarioOf, gpt: Model
) -> None:
    plan: dict[str, Any] = {"pp": 2, "schedule": "GPipe", "p2p_overlap": False}
    few = {"num_steps": 1}

    def ends(protocol: str) -> tuple[int, int, int]:
        """Return when stage 0 has sent F1, and when stage 1 begins and ends F0."""
        s = scenario_of(model=alike(gpt), plan=plan | {"p2p_protocol": protocol}, run=few, batch=4)
        p, start, end = spans(s)
        sent = (p.action == ACTION_CODE["SEND_F"]) & (p.microbatch == 1)
        first = (p.action == ACTION_CODE["F"]) & (p.microbatch == 0) & (p.rank == 1)
        return int(end[sent].max()), int(start[first].min()), int(end[first].max())

    sent, _, computed = ends("rendezvous")
    assert sent > computed
    sent, begins, computed = ends("eager")
    assert begins < sent < computed


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("LoopedBFS", 2), ("ZB-H2", 1), ("ZBVZeroBubble", 2), ("DualPipe", 2)]
)
def test_eager_messages_free_schedules_that_deadlock_when_both_sides_must_meet(
    scenario_of: ScenarioOf, gpt: Model, schedule: str, chunks: int
) -> None:
    plan = {"pp": 4, "schedule": schedule, "chunks": chunks, "p2p_overlap": False}
    with pytest.raises(DeadlockError, match='p2p_protocol = "eager"'):
        sim.simulate(scenario_of(model=alike(gpt), plan=plan, batch=8))
    freed = scenario_of(model=alike(gpt), plan=plan | {"p2p_protocol": "eager"}, batch=8)
    compiled, reference = (sim.simulate(freed, engine=e) for e in ("compiled", "reference"))
    assert np.array_equal(compiled.timeline.end, reference.timeline.end)


def test_a_protocol_without_effect_is_refused(scenario_of: ScenarioOf, gpt: Model) -> None:
    with pytest.raises(DescriptionError, match="'eager' has no effect with p2p_overlap true"):
        scenario_of(model=gpt, plan={"pp": 2, "p2p_protocol": "eager"}, batch=8)
