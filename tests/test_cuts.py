"""Layers over stages: even splits, relief of the ends, layouts, and cuts that balance."""

from dataclasses import replace
from itertools import combinations_with_replacement

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import simulator as sim
from simulator.cuts import CHAIN, Runs, _parameters, _times, balanced, resolved
from simulator.describe.layout import read_layout
from simulator.errors import DescriptionError
from simulator.lower import lower
from simulator.lower.memory import static_memory
from simulator.program import ACTION_CODE
from simulator.units import to_ticks


def runs(layers, embedding=0, head=0, **more):
    return Runs(np.array(layers, np.int64), embedding, head, **more)


def cut(costs, stages):
    return balanced([costs.of(stage, stages) for stage in range(stages)])


def every_cut(layers, stages):
    for ends in combinations_with_replacement(range(layers + 1), stages - 1):
        counts = np.diff([0, *ends, layers]).tolist()
        if 0 not in counts[1:-1]:
            yield counts


def loads(counts, tables):
    ends = np.cumsum([0, *counts])
    return [int(t[i, j]) for t, i, j in zip(tables, ends, ends[1:], strict=False)]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_other_cut_has_a_smaller_largest_stage_or_is_more_even(data):
    cost = st.integers(0, 20)
    layers, stages = data.draw(st.integers(3, 7)), data.draw(st.integers(2, 5))
    tables = []
    for stage in range(stages):  # devices that differ: a table of costs for each stage
        own = runs(
            data.draw(st.lists(cost, min_size=layers, max_size=layers)),
            data.draw(cost), data.draw(cost),
            more=np.array(data.draw(st.lists(cost, min_size=layers, max_size=layers))),
            limit=data.draw(st.integers(1, 3)),
        )  # fmt: skip
        tables.append(own.of(stage, stages))
    found = balanced(tables)
    least = min(
        (max(own), sum(load**2 for load in own))
        for own in (loads(counts, tables) for counts in every_cut(layers, stages))
    )
    own = loads(found, tables)
    assert sum(found) == layers
    assert (max(own), sum(load**2 for load in own)) == least


def test_equal_layers_are_cut_evenly():
    assert cut(runs([3] * 8), 4) == (2, 2, 2, 2)


# 8 layers of 2, embedding 1, head 6: of 23 in three stages none can have less than 8, for the last
# one with a layer has 8. Of the two cuts with 8 at most (3 layers and embedding are 7, 4 layers 8,
# 1 layer and head 8) there is one: 7, 8, 8.
def test_the_stage_of_a_heavy_head_has_fewer_layers():
    assert cut(runs([2] * 8, embedding=1, head=6), 3) == (3, 4, 1)


# 4 layers of 1 and a head of 9: with the head alone the others share 4.
def test_a_head_heavier_than_all_else_lies_alone():
    assert cut(runs([1] * 4, head=9), 3) == (2, 2, 0)


# Recomputing costs 4 in each stage's first layer: 6 layers of 1 are 1 + 4 and 1 each after it.
def test_what_the_first_layers_of_each_stage_cost_more_is_counted_by_stage():
    costs = runs([1] * 6, more=np.full(6, 4), limit=1)
    table = costs.of(0, 2)
    assert table[0].tolist() == [0, 5, 6, 7, 8, 9, 10]
    assert table[4, 4:].tolist() == [0, 5, 6]


def test_a_layout_lists_what_each_stage_holds():
    assert read_layout("Ettt|(tt|)*2,t|L") == ("Ettt", "tt", "tt", "t", "L")
    assert read_layout("Et*2|(t,(tt|)*2)*2t,L") == ("Ett", "ttt", "tt", "ttt", "tt", "tL")
    assert read_layout("Et*3|(tt|)*2,mL") == ("Ettt", "tt", "tt", "mL")


# Megatron-Bridge's layout of 80 layers: 2, 34 x 2, 3, 3 x 2, 1 in 40 stages
def test_a_published_layout_has_its_layers():
    stages = read_layout("Et*2|(t*2|)*34,t*3|(t*2|)*3,tL")
    assert len(stages) == 40
    assert [stage.count("t") for stage in stages] == [2] * 35 + [3, 2, 2, 2, 1]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("tt|tL", "E, the embedding, must be there once, at the head"),
        ("tE|tL", "E, the embedding, must be there once, at the head"),
        ("Et|tLt", "L, the head and its loss, must be there once, at the very end"),
        ("Et|L|t", "L, the head and its loss, must be there once, at the very end"),
        ("Et|mt|L", "must follow all layers t"),
        ("Et|m|L", "m is on stage 1; .* last stage only"),
        ("Et||tL", "stage 1 holds nothing"),
        ("Et|(t|tL", r"a '\(' is not closed"),
        ("Et|t)|tL", r"a '\)' closes no '\('"),
        ("*3Et|tL", r"'\*3' follows nothing"),
        ("Et*0|tL", r"'\*0' must repeat at least once"),
        ("Et*900000|tL", r"more than 100,000"),
        ("Ex|tL", "'x' is not one of E, t, m, L"),
    ],
)
def test_a_layout_that_is_none_says_why(text, why):
    with pytest.raises(DescriptionError, match=why):
        read_layout(text)


def layers_of(scenario_of, gpt, layers, **plan):
    model = replace(gpt, num_hidden_layers=layers)
    s = scenario_of(model=model, plan={"schedule": "1F1B", **plan}, batch=8)
    return s.layers_per_stage


# torchtitan: 8 layers, embedding and head are 10, so 3, 3, 2, 2 less one at either end
def test_embedding_and_head_may_count_as_layers(scenario_of, gpt):
    both = {
        "account_for_embedding_in_pipeline_split": True,
        "account_for_loss_in_pipeline_split": True,
    }
    assert layers_of(scenario_of, gpt, 8, pp=4, **both) == (2, 3, 2, 1)
    first, last = both
    assert layers_of(scenario_of, gpt, 7, pp=4, **{first: True}) == (1, 2, 2, 2)
    assert layers_of(scenario_of, gpt, 7, pp=4, **{last: True}) == (2, 2, 2, 1)
    assert layers_of(scenario_of, gpt, 126, pp=16, **both) == (7, *[8] * 14, 7)  # Llama 3 405B


def test_ranks_at_the_ends_may_have_layers_of_their_own(scenario_of, gpt):
    few = {"first_stage_layers": 2, "last_stage_layers": 1}
    assert layers_of(scenario_of, gpt, 9, pp=4, **few) == (2, 3, 3, 1)
    assert layers_of(scenario_of, gpt, 9, pp=2, last_stage_layers=3) == (6, 3)
    assert layers_of(scenario_of, gpt, 6, pp=3, last_stage_layers=0) == (3, 3, 0)


# Megatron-LM: the first rank has 4 layers over two chunks, the last one 4, those between 6 each
def test_the_layers_of_a_rank_are_spread_over_its_chunks(scenario_of, gpt):
    plan = {"schedule": "Interleaved1F1B", "chunks": 2, "first_stage_layers": 4}
    plan |= {"last_stage_layers": 4, "pp": 4}
    assert layers_of(scenario_of, gpt, 20, **plan) == (2, 3, 3, 2) * 2


def test_a_layout_is_a_list_of_layers(scenario_of, gpt):
    assert layers_of(scenario_of, gpt, 4, pp=4, layout="Et|tt|t|L") == (1, 2, 1, 0)


LOOP = {"pp": 2, "schedule": "Interleaved1F1B", "chunks": 2}


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (
            {"pp": 2, "schedule": "DualPipe", "chunks": 2, "layers_per_stage": (1, 1, 1, 1)},
            "lists 4 stages but pp is 2 x chunks 2 / 2 ranks of each = 2",
        ),
        ({"pp": 2, "layout": "Et|t|tL"}, "Plan.layout: lists 3 stages but pp is 2"),
        ({"pp": 2, "layout": "Et|tL"}, "plan.layout 'Et|tL' sums to 2, but tiny-gpt has 4"),
        ({"pp": 2, "layout": "Ett|ttmL"}, "has 1 layers m, but tiny-gpt has 0"),
        ({"pp": 2, "layout": "Ett|tt"}, "Plan.layout 'Ett|tt': L, the head"),
        ({"pp": 2, "layout": "Et|tttL", "stage_cut": "time"}, "Plan.stage_cut: layout says too"),
        (
            {"pp": 2, "layers_per_stage": (2, 2), "last_stage_layers": 2},
            "Plan.last_stage_layers: layers_per_stage says too",
        ),
        (
            {"pp": 2, "last_stage_layers": 2, "account_for_loss_in_pipeline_split": True},
            "account_for_loss_in_pipeline_split: last_stage_layers says too",
        ),
        (
            {"pp": 2, "layers_per_stage": (4, 0), "last_stage_layers": 0},
            "Plan.last_stage_layers: layers_per_stage says too",
        ),
        ({"stage_cut": "parameters"}, "Plan.stage_cut: 'parameters' has no effect with pp 1"),
        ({"layout": "EttttL"}, "Plan.layout: 'EttttL' has no effect with pp 1"),
        ({"pp": 3, "layers_per_stage": (4, 0, 0)}, "stage 1 has no layers"),
        ({"layers_per_stage": (0,)}, "stage 0 has no layers"),
        ({"pp": 7, "stage_cut": "time"}, "more than the 4 layers of tiny-gpt, its embedding and"),
        ({"pp": 3, "first_stage_layers": 4}, "leaves a stage without layers"),
        ({"pp": 2, "first_stage_layers": 5}, "plan.first_stage_layers 5 with plan.pp 2 do not"),
        ({**LOOP, "first_stage_layers": 1}, "do not divide the 4 layers of tiny-gpt"),
        (
            {**LOOP, "schedule": "DualPipeV", "first_stage_layers": 2},
            "are for schedules whose stage s lies on rank s % pp, .* not for 'DualPipeV'",
        ),
    ],
)
def test_a_division_that_cannot_be_says_why(scenario_of, plan, why):
    with pytest.raises(DescriptionError, match=why.replace("|", r"\|")):
        scenario_of(plan=plan)


def test_what_is_not_cut_yet_cannot_be_lowered(scenario_of):
    with pytest.raises(DescriptionError, match=r"'time' is not cut yet; .*simulator.cuts.resolved"):
        lower(scenario_of(plan={"pp": 2, "stage_cut": "time"}))


def test_a_list_beside_a_cut_must_be_that_cut(scenario_of):
    once = resolved(scenario_of(plan={"pp": 2, "stage_cut": "time"}))
    assert resolved(once) is once
    other = (1, 3)
    assert once.layers_per_stage != other
    with pytest.raises(DescriptionError, match=r"is not what plan.stage_cut 'time' finds"):
        resolved(replace(once, plan=replace(once.plan, layers_per_stage=other)))


# A layer of hidden size 64 has 12 x 64^2 + 13 x 64 = 49,984 parameters. With a vocabulary of 1,024
# the embedding has (1,024 + 32) x 64 = 67,584 and the tied head 1,024 x 64 + 128 = 65,664: about
# 1.3 layers each. Of 6 layers in three stages 2, 2, 2 has 167,552 at most, 1, 3, 2 has 165,632
# and 1, 4, 1 has 199,936.
def test_parameters_are_balanced_with_embedding_and_head(scenario_of, gpt):
    model = replace(gpt, num_hidden_layers=6, vocab_size=1024)
    s = resolved(scenario_of(model=model, plan={"pp": 3, "stage_cut": "parameters"}))
    assert s.layers_per_stage == (1, 3, 2)
    params = [stage.params for stage in static_memory(s)]
    assert params == [49_984 + 67_584, 3 * 49_984, 2 * 49_984 + 65_664]


# Dense layers first, experts after them, and on the last stage a layer that predicts further ahead.
def test_parameters_of_unlike_layers_are_those_of_the_stages_that_hold_them():
    s = sim.load("deepseek-v3-2048gpu")
    costs, ends = _parameters(s), np.cumsum(s.layers_per_stage)
    found = [
        costs.of(stage, 16)[end - count, end]
        for stage, (count, end) in enumerate(zip(s.layers_per_stage, ends, strict=True))
    ]
    assert found == [stage.params for stage in static_memory(s)]


# The layer that predicts further ahead and two heads take longer than four layers: they lie alone.
def test_a_layer_that_predicts_further_ahead_counts_with_the_head():
    free = {"plan.layers_per_stage": [3, *[4] * 14, 2]}
    s = sim.load("deepseek-v3-2048gpu", free | {"run.global_batch_size": 4096})
    cut_by_time = resolved(
        replace(s, plan=replace(s.plan, layers_per_stage=None, stage_cut="time"))
    )
    assert cut_by_time.layers_per_stage[-1] == 0
    laid = replace(s.plan, layers_per_stage=None, layout="Et*3|(tttt|)*14,ttmL")
    assert replace(s, plan=laid).layers_per_stage == s.layers_per_stage
    apart = replace(laid, layout="Et*3|(tttt|)*14,ttL")
    with pytest.raises(
        DescriptionError, match="has 0 layers m, but deepseek-v3 has 1 that predict"
    ):
        replace(s, plan=apart)


def pass_ticks(s, stage):
    """Ticks of forward and backward of a stage's middle microbatch, by op."""
    result = sim.simulate(s)
    p, (start, end) = result.tiled, result.times.columns
    total = 0
    for action in "FB":
        rows = (p.stage == stage) & (p.microbatch == 1) & (p.action == ACTION_CODE[action])
        rows &= np.isin(p.stream, [n for n, name in enumerate(p.streams) if name in CHAIN])
        total += int(end[rows].max() - start[rows].min())
    return total


@pytest.mark.parametrize(
    "plan",
    [
        {"pp": 2},
        {"pp": 3, "tp": 2, "sequence_parallel": True, "tp_overlap": "grads"},
        {"pp": 3, "recompute": "full", "recompute_layers": 1},
        {"pp": 3, "tp": 2, "scatter_gather": True},
    ],
)
def test_times_of_runs_are_those_of_the_stages_that_hold_them(scenario_of, gpt, plan):
    model = replace(gpt, num_hidden_layers=6)
    lists = {2: [(2, 4), (4, 2)], 3: [(1, 3, 2), (2, 2, 2), (1, 5, 0)]}[plan["pp"]]
    for layers in lists:
        s = scenario_of(
            model=model, plan={**plan, "layers_per_stage": layers}, run={"num_steps": 1}
        )
        costs, ends = _times(s), np.cumsum(layers)
        for stage, end in enumerate(ends):
            table = costs.of(stage, len(layers))
            assert pass_ticks(s, stage) == table[end - layers[stage], end]


# Forward and backward are measured under GPipe, whatever the schedule: ranks hold stages s and
# 2p - 1 - s, both of p - 1 - r, or every stage twice.
@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [("ZBVZeroBubble", 2), ("DualPipeV", 2), ("DualPipe", 2), ("ZB-auto", 1)],
)
def test_stages_of_every_schedule_are_cut(scenario_of, gpt, schedule, chunks):
    model = replace(gpt, num_hidden_layers=12)
    plan = {"pp": 2, "chunks": chunks, "schedule": schedule, "stage_cut": "time"}
    s = resolved(scenario_of(model=model, plan=plan, batch=8))
    stages = s.plan.num_stages
    plain = scenario_of(model=model, plan={"pp": stages, "stage_cut": "time"}, batch=8)
    assert s.layers_per_stage == resolved(plain).layers_per_stage
    assert sim.simulate(s).step_time_s > 0


def test_what_is_recomputed_twice_is_not_timed(scenario_of):
    plan = {"pp": 2, "schedule": "ZB-H1", "recompute": "full", "recompute_again": True}
    with pytest.raises(
        DescriptionError, match=r"'time' with plan.recompute_again: what is computed"
    ):
        resolved(scenario_of(plan=plan | {"stage_cut": "time"}))


def test_a_cut_by_time_shortens_the_step():
    plan = {"plan.stage_cut": "time"}
    even, cut_by_time = (sim.simulate(sim.load("gpt2-xl-1f1b", o)) for o in ({}, plan))
    assert even.scenario.layers_per_stage == (12, 12, 12, 12)
    layers = cut_by_time.scenario.layers_per_stage
    assert layers[-1] < 12
    assert cut_by_time.step_time_s < 0.9 * even.step_time_s
    assert f"stages of {', '.join(map(str, layers))} layers" in str(cut_by_time)


# Without overlap of flows the step of 1F1B is at least microbatches x the largest stage. With the
# same largest stage one rank earlier it is 0.2 % less.
def test_no_neighbouring_cut_is_faster_than_that_by_time():
    best = sim.simulate(sim.load("gpt2-xl-1f1b", {"plan.stage_cut": "time"}))
    layers = best.scenario.layers_per_stage
    for i in range(3):
        for step in (1, -1):
            moved = list(layers)
            moved[i] += step
            moved[i + 1] -= step
            other = sim.load("gpt2-xl-1f1b", {"plan.layers_per_stage": moved})
            assert sim.simulate(other).step_time_s >= 0.995 * best.step_time_s


@pytest.mark.parametrize("engine", ["compiled", "events", "reference"])
def test_embedding_and_head_may_have_stages_of_their_own(scenario_of, llama, engine):
    plan = {"pp": 4, "layers_per_stage": (0, 2, 2, 0), "dp": 2}
    s = scenario_of(model=llama, plan=plan, run={"clip_grad": True})
    result = sim.simulate(s, engine=engine)
    whole = sim.simulate(scenario_of(model=llama, plan={"dp": 2}, run={"clip_grad": True}))
    held = [stage.params for stage in static_memory(s)]
    assert held[0] == 128 * 64  # the embedding
    assert held[3] == 128 * 64 + 64  # the head and the norm before it
    busy = [r.breakdown.of("forward", "backward").sum() for r in (result, whole)]
    assert abs(busy[0] - busy[1]) <= to_ticks(1e-9) * 8  # all work is done, wherever it lies


@pytest.mark.parametrize("run", [{"frozen_layers": 2}, {"lora_rank": 2}])
def test_a_stage_of_a_frozen_embedding_has_no_backward(scenario_of, gpt, run):
    s = scenario_of(plan={"pp": 3, "layers_per_stage": (0, 3, 1)}, run=run)
    program = sim.simulate(s).tiled
    backward = program.action == ACTION_CODE["B"]
    assert set(program.stage[backward].tolist()) == {1, 2}


def test_the_command_line_cuts_too(trainsim):
    code, out, _ = trainsim("check", "gpt2-xl-1f1b", "--set", "plan.stage_cut=time")
    assert code == 0
    assert "ok, 4 ranks" in out


def test_what_does_not_fit_is_cut_anew_in_each_change(scenario_of, gpt, cluster_of):
    from simulator.explore.remedies import find_remedies

    plan = {"pp": 2, "dp": 2, "stage_cut": "time"}
    cluster = cluster_of(devices=4, device={"memory": 5.11e8})
    found = find_remedies(sim.simulate(scenario_of(plan=plan, cluster=cluster)))
    assert found is not None
    assert found.tried
