"""Several model chunks on each pipeline rank: what lies where, what moves, what is reported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import simulator as sim
from simulator.describe.model import Model
from simulator.describe.scenario import Scenario
from simulator.errors import DescriptionError
from simulator.lower import lower
from simulator.lower.layers import blocks, num_parameters, shapes
from simulator.lower.memory import buffer_bytes, static_memory
from simulator.program import ACTIONS, NONE, Flow, Program
from simulator.report.memory_text import memory_text

ScenarioOf = Callable[..., Scenario]

TWO = {"pp": 2, "chunks": 2, "schedule": "Interleaved1F1B"}
"""Four stages, of a layer each in models of 4 layers: 0 and 2 on rank 0, 1 and 3 on rank 1."""
ONCE = {"num_steps": 1}


def rows(program: Program, action: str, stream: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the ops of one kind of action on one stream."""
    on = program.stream == program.streams.index(stream)
    return np.flatnonzero(on & (program.action == ACTIONS.index(action)))


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        ({**TWO, "schedule": "1F1B"}, "plan.schedule 1F1B takes one chunk a rank, not 2"),
        ({**TWO, "chunks": 1}, "plan.schedule Interleaved1F1B needs at least 2 chunks a rank"),
        ({**TWO, "pp": 1}, "Plan.chunks: 2 chunks need a pipeline of at least 2 ranks, pp is 1"),
        ({**TWO, "chunks": 3}, r"plan.pp 2 x plan.chunks 3 = 6 stages is more than the 4 layers"),
        ({**TWO, "layers_per_stage": (2, 2)}, r"lists 2 stages but pp is 2 x chunks 2 = 4"),
        ({**TWO, "layers_per_stage": (2, 2, 1, 1)}, "sums to 6, but tiny-gpt has 4 layers"),
        ({**TWO, "dp": 2}, "takes 5 microbatches through 2 ranks .* 4 or 6 would do"),
    ],
)
def test_a_plan_that_chunks_cannot_be_made_of_is_refused(
    scenario_of: ScenarioOf, plan: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(DescriptionError, match=sentence):
        scenario_of(plan=plan, batch=5 * plan.get("dp", 1) if "dp" in plan else None)


# 5 layers on 4 stages: without chunks the first stage takes the rest, with chunks it must be said.
def test_layers_that_chunks_do_not_divide_must_be_listed(
    scenario_of: ScenarioOf, gpt: Model
) -> None:
    model = replace(gpt, num_hidden_layers=5)
    with pytest.raises(DescriptionError, match=r"= 4 stages do not divide the 5 layers .* say in"):
        scenario_of(model=model, plan=TWO)
    listed = scenario_of(model=model, plan={**TWO, "layers_per_stage": (1, 1, 2, 1)})
    assert [stage.params for stage in static_memory(listed)] == [
        stage.params + extra * blocks(model, shapes(listed)).layer.params
        for stage, extra in zip(static_memory(scenario_of(plan=TWO)), (0, 0, 1, 0), strict=True)
    ]


# Layers 0..3 in order over the stages, so rank 0 computes layers 0 and 2.
def test_stages_lie_on_ranks_by_turns(scenario_of: ScenarioOf) -> None:
    p = lower(scenario_of(plan=TWO, run=ONCE))
    held = {(r, s, y) for r, s, y in zip(p.rank, p.stage, p.layer, strict=True) if y != NONE}
    assert held == {(0, 0, 0), (1, 1, 1), (0, 2, 2), (1, 3, 3)}


# Untied: embedding and two layers on rank 0, two layers and the head on rank 1; each is there once.
def test_a_rank_holds_the_states_of_all_its_chunks(scenario_of: ScenarioOf, llama: Model) -> None:
    s = scenario_of(model=llama, plan=TWO)
    parts = blocks(llama, shapes(s))
    static = (lower(s).static_bytes - buffer_bytes(s)).tolist()  # one set of buffers a rank
    layers = 2 * parts.layer.params
    assert static == [16 * (layers + parts.embedding.params), 16 * (layers + parts.head.params)]
    assert sum(static) == 16 * num_parameters(llama)


# The update reads and writes the same bytes a parameter whatever the chunks: sums are the model's.
def test_the_optimizer_updates_every_parameter_once(scenario_of: ScenarioOf, llama: Model) -> None:
    def moved(plan: dict[str, Any]) -> float:
        p = lower(scenario_of(model=llama, plan=plan))
        work = [p.costs[c] for c in p.cost[rows(p, "OPT", "compute")].tolist()]
        return sum(k.bytes for w in work for k in w.kernels)

    assert moved(TWO) == moved({"pp": 4}) == moved({"pp": 1})


# Gradients of one rank reduced over dp, in bytes of its parameters: with 2 bytes a gradient.
def test_every_gradient_is_reduced_once(scenario_of: ScenarioOf, llama: Model) -> None:
    s = scenario_of(model=llama, plan={**TWO, "dp": 2, "bucket_size": 1e4}, run=ONCE)
    p = lower(s)
    flows = np.flatnonzero(p.stream == p.streams.index("dp"))
    by_stage: Counter[int] = Counter()
    for op in flows.tolist():
        cost = p.costs[p.cost[op]]
        assert isinstance(cost, Flow)
        by_stage[int(p.stage[op])] += int(cost.bytes)
    assert [by_stage[stage] for stage in range(4)] == [2 * m.params for m in static_memory(s)]


# A chunk's first bucket waits for its own last backward, microbatch 3, not for its rank's: on rank
# 0 chunk 1 (stage 2) is done two backwards before chunk 0, and its reduction starts meanwhile.
def test_a_chunk_reduces_from_its_own_last_backward_on(scenario_of: ScenarioOf) -> None:
    result = sim.simulate(scenario_of(plan={**TWO, "dp": 2}, run=ONCE))
    p, t = result.program, result.timeline
    mine = p.rank == 0
    dp = mine & (p.stream == p.streams.index("dp"))
    assert set(p.microbatch[dp].tolist()) == {3}
    backward = mine & (p.stream == 0) & (p.action == ACTIONS.index("B"))
    first, last = t.start[dp & (p.stage == 2)].min(), t.end[backward].max()
    assert first == t.end[backward & (p.stage == 2)].max()
    assert first < last <= t.start[dp & (p.stage == 0)].min()


# The tied matrix lies on stage 0 and on stage 3, of ranks 0 and 1: one sum between the two.
def test_a_tied_embedding_is_summed_between_the_first_and_the_last_stage(
    scenario_of: ScenarioOf,
) -> None:
    p = lower(scenario_of(plan=TWO, run=ONCE))
    tied = rows(p, "REDUCE_GRAD", "tied")
    assert sorted(zip(p.rank[tied].tolist(), p.stage[tied].tolist(), strict=True)) == [
        (0, 0),
        (1, 3),
    ]
    assert p.groups[int(p.joint_group[p.joint[tied[0]]])].tolist() == [0, 1]


# 3 ranks x 2 chunks: each of 3 microbatches goes 0>1 1>2 2>0 0>1 1>2, and back the other way.
def test_messages_go_round_from_the_last_rank_to_the_first(
    scenario_of: ScenarioOf, gpt: Model
) -> None:
    plan = {"pp": 3, "chunks": 2, "schedule": "Interleaved1F1B"}
    model = replace(gpt, num_hidden_layers=6)
    p = lower(scenario_of(model=model, plan=plan, batch=3, run=ONCE))
    pairs = {
        kind: Counter(
            tuple(p.groups[int(p.joint_group[p.joint[op]])].tolist())
            for op in np.flatnonzero(p.action == ACTIONS.index(kind)).tolist()
        )
        for kind in ("SEND_F", "SEND_B")
    }
    assert pairs["SEND_F"] == {(0, 1): 6, (1, 2): 6, (2, 0): 3}
    assert pairs["SEND_B"] == {(1, 0): 6, (2, 1): 6, (0, 2): 3}


# P=2, m=4, v=2: rank 0 keeps 2(2-0-1) + (2-1)2 + 1 = 5 chunks, rank 1 3; stage 0 keeps its
# embedding's besides, stage 3 its head's. Rank 0 runs 0F0 0F1 2F0 2F1 0F2 2B0 0F3: then it has 4 of
# stage 0 and 1 of stage 2. Rank 1 runs 1F0 1F1 3F0: 2 of stage 1 and 1 of stage 3.
def test_the_peak_of_a_rank_is_its_chunks_in_flight(scenario_of: ScenarioOf) -> None:
    s = scenario_of(plan=TWO)
    parts = blocks(s.model, shapes(s))
    assert sim.simulate(s).activations.peak.tolist() == [
        5 * parts.layer.kept_bytes + 4 * parts.embedding.kept_bytes,
        3 * parts.layer.kept_bytes + 1 * parts.head.kept_bytes,
    ]


def test_nothing_is_kept_after_a_step_with_chunks(scenario_of: ScenarioOf) -> None:
    memory = sim.simulate(scenario_of(plan={**TWO, "tp": 2, "recompute": "full"})).memory
    assert [memory.of_rank(rank)[1][-1] for rank in range(4)] == [0.0] * 4


def test_the_report_has_a_row_for_each_rank_of_a_pipeline(scenario_of: ScenarioOf) -> None:
    result = sim.simulate(scenario_of(plan={**TWO, "dp": 2}))
    text = str(result)
    assert "dp 2 x tp 1 x pp 2 x 2 chunks, Interleaved1F1B" in text
    assert "stage s of 4 lies on pipeline rank s mod 2" in text
    table = [
        line.split("  ")[0] for line in text.splitlines() if line.startswith(("stage", "0,", "1,"))
    ]
    assert table == ["stages", "0, 2", "1, 3"]


def test_the_memory_table_sums_the_chunks_of_a_rank(scenario_of: ScenarioOf) -> None:
    s = scenario_of(plan=TWO)
    every = static_memory(s)
    lines = memory_text(sim.simulate(s), s).splitlines()
    assert lines[1].split()[:3] == ["0,", "2", f"{every[0].params + every[2].params:,}"]
    assert lines[2].split()[:3] == ["1,", "3", f"{every[1].params + every[3].params:,}"]


def test_a_bare_schedule_says_what_is_in_flight() -> None:
    result = sim.simulate_schedule("Interleaved1F1B", stages=4, microbatches=8, chunks=2)
    assert "activations in flight by rank, of one stage each: 11 9 7 5" in str(result)


def test_many_stages_of_a_rank_are_shortened() -> None:
    result = sim.simulate_schedule("Interleaved1F1B", stages=2, microbatches=2, chunks=6)
    labels = [label.get_text() for label in result.plot.pipeline().axes[0].get_yticklabels()]
    assert labels == ["rank 0 · stages 0, 2, ..., 10", "rank 1 · stages 1, 3, ..., 11"]


# Narayanan et al.'s and Korthikanti et al.'s layout of 175B: 96 layers in 3 chunks of 4 on each of
# 8 ranks, 24 stages.
def test_the_shipped_scenario_has_chunks_of_four_layers() -> None:
    s = sim.load("gpt3-175b-interleaved")
    assert s.layers_per_stage == (4,) * 24


def test_chunks_shorten_the_shipped_step_and_need_more_memory() -> None:
    few = {"run.detail": "stage"}
    chunks = sim.simulate(sim.load("gpt3-175b-interleaved", few)).summary
    plain = sim.simulate(
        sim.load("gpt3-175b-interleaved", {**few, "plan.chunks": 1, "plan.schedule": "1F1B"})
    ).summary
    assert chunks.step_time_s < plain.step_time_s
    assert chunks.peak_memory_bytes > plain.peak_memory_bytes
