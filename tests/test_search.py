"""The search over plans: legal, pruned by memory alone, near the best, and explained."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

import simulator as sim
from simulator.describe.loader import parse_override
from simulator.errors import DescriptionError
from simulator.explore.batch import advise, samples_over_least, steps_over_least
from simulator.explore.bound import Bounds
from simulator.explore.change import each_flow_alone, words
from simulator.explore.narrow import narrow, neighbours
from simulator.explore.objective import Deadline, order
from simulator.explore.search import search
from simulator.explore.search_text import found_dict, found_text, longer
from simulator.explore.space import parse_axis, plan_space
from simulator.explore.trial import Task, run_trial, run_trials

TINY = {
    "plan.tp": (1, 8), "plan.pp": (1, 4), "plan.chunks": (2,), "plan.microbatch_size": (1, 2),
    "plan.zero": (1, 3),
}  # fmt: skip
SPACES = {
    "dense": ("llama-3-8b-3d", {}, TINY),
    "experts": ("mixtral-8x7b-64gpu", {}, {**TINY, "plan.ep": (1, 8)}),
    "listed layers": ("gpt3-175b-1024gpu", {"plan.layers_per_stage": [12] * 8}, TINY),
    "balanced": ("gpt2-xl-1f1b", {"plan.stage_cut": "parameters"}, {**TINY, "plan.tp": (1, 2)}),
    "long": ("llama-3-8b-128k", {}, {**TINY, "plan.cp": (4, 16)}),
    "Megatron's": ("llama-3-8b-3d", {"plan.p2p_overlap": False, "plan.grad_overlap": False}, TINY),
}


@pytest.fixture(scope="module", params=SPACES.values(), ids=SPACES)
def sample(request):
    """A scenario's file and settings, its space, and some of the candidates."""
    name, settings, over = request.param
    space = plan_space(each_flow_alone(sim.load(name, settings)), over)
    drawn = random.Random(8).sample(space.candidates, min(12, len(space.candidates)))
    return name, settings, space, drawn


def test_no_plan_needs_less_than_its_bound(sample):
    *_, drawn = sample
    bounds = Bounds()
    for candidate in drawn:
        states, both = bounds.excess(candidate.scenario)
        found = sim.simulate(candidate.scenario).summary
        over = found.device_memory_bytes - found.memory_capacity_bytes
        assert states <= both <= over + 1, candidate.settings


# `--set` of the printed words gives the very plan that was simulated.
def test_the_words_of_a_plan_give_that_plan(sample):
    name, settings, _, drawn = sample
    for candidate in drawn:
        given = dict(parse_override(word) for word in words(candidate.settings))
        plan = sim.load(name, {**settings, **given}).plan
        assert plan == candidate.scenario.plan


def test_every_plan_of_a_space_fills_the_cluster_and_is_there_once(sample):
    *_, space, _ = sample
    plans = [c.scenario.plan for c in space.candidates]
    assert {p.world_size for p in plans} == {space.base.cluster.world_size}
    assert len(set(plans)) == len(plans)
    assert len({c.place for c in space.candidates}) == len(plans)


SMALL = {
    "plan.tp": (1, 2, 4), "plan.pp": (1, 2, 4), "plan.microbatch_size": (1, 2, 4),
    "plan.chunks": (2, 4), "plan.zero": (1, 3), "plan.recompute": ("none", "full"),
}  # fmt: skip


@pytest.fixture(scope="module")
def whole():
    return search(sim.load("gpt2-xl-1f1b-32gpu"), over=SMALL, sampler="all", jobs=1)


def test_every_plan_is_pruned_simulated_or_left(whole):
    assert whole.legal == whole.pruned.count + len(whole.trials) + whole.left
    assert whole.left == 0


def test_the_best_of_a_narrowed_search_is_within_5_percent_of_all(whole):
    found = search(sim.load("gpt2-xl-1f1b-32gpu"), over=SMALL, budget=60, jobs=1)
    assert len(found.trials) == 60 < len(whole.trials)
    assert found.best[0].step_time_s <= 1.05 * whole.best[0].step_time_s


def test_the_best_of_what_optuna_proposes_is_within_5_percent_of_all(whole):
    pytest.importorskip("optuna")
    found = search(sim.load("gpt2-xl-1f1b-32gpu"), over=SMALL, budget=60, jobs=1, sampler="optuna")
    assert len(found.trials) <= 60
    assert found.best[0].step_time_s <= 1.05 * whole.best[0].step_time_s


def test_what_a_loser_loses_sums_to_its_longer_step(whole):
    first = whole.best[0]
    for trial in whole.trials[1:]:
        gap = trial.step_time_s - first.step_time_s
        assert sum(longer(trial, first).values()) == pytest.approx(gap, abs=1e-9)


def test_a_plan_takes_as_long_when_it_is_run_by_itself(whole):
    best = whole.best[0]
    given = dict(parse_override(word) for word in words(best.settings))
    alone = sim.simulate(sim.load("gpt2-xl-1f1b-32gpu", given)).summary
    assert alone.step_time_s == pytest.approx(best.step_time_s, rel=1e-6)
    assert alone.device_memory_bytes == pytest.approx(best.device_memory_bytes)


def test_processes_give_the_trials_that_one_gives():
    space = plan_space(each_flow_alone(sim.load("gpt2-xl-1f1b")), SMALL)
    tasks = [Task(i, c.place, c.settings, c.scenario) for i, c in enumerate(space.candidates[:20])]
    assert list(run_trials(tasks, 2)) == [run_trial(task) for task in tasks]


# Llama 3 405B on 16,384 H100: tp 8, pp 16, dp 128, 4 chunks (arXiv 2407.21783, table 4).
# Megatron-LM's 175B on 64 A100: tp 8, pp 8, 3 chunks (Korthikanti et al., 2022, table 3); what its
# makers' code had: no sharding, 1F1B plain or interleaved.
PUBLISHED = {
    "Llama 3": ("llama-3-405b-operations", {}, {
        "plan.tp": (4, 8), "plan.pp": (8, 16, 32), "plan.schedule": ("1F1B", "Interleaved1F1B"),
        "plan.chunks": (2, 4, 8), "plan.zero": (3,), "plan.sequence_parallel": (True,),
        "plan.recompute": ("none", "full"), "plan.microbatch_size": (1, 2),
    }),
    "Megatron-LM": (
        "gpt3-175b-interleaved", {"plan.recompute": "selective", "plan.sequence_parallel": True}, {
        "plan.zero": (0,), "plan.schedule": ("1F1B", "Interleaved1F1B"),
        "plan.chunks": (2, 3, 4, 6), "plan.sequence_parallel": (True,),
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_plan_is_in_the_top_decile_of_its_space(name):
    scenario, settings, over = PUBLISHED[name]
    found = search(sim.load(scenario, settings), over=over, sampler="all", jobs=1)
    assert found.own.fits
    assert found.rank_of_own <= found.legal / 10
    assert found.own.step_time_s <= 1.1 * found.best[0].step_time_s


FEW = {
    "plan.tp": (1, 2), "plan.pp": (1, 2), "plan.microbatch_size": (2,), "plan.zero": (1, 3),
    "plan.schedule": ("1F1B",), "plan.recompute": ("none",), "plan.sequence_parallel": (False,),
}  # fmt: skip


# 1e9 tokens in a day are 11,574 tokens/s; one node of 8 A100 makes more, so that 1 of 1, 2, 4 wins.
def test_the_smallest_cluster_is_the_first_that_meets_the_deadline():
    s = sim.load("gpt2-xl-1f1b-32gpu")
    easy = Deadline(tokens=1e9, seconds=86400)
    found = search(s, objective="smallest_cluster", over=FEW, deadline=easy, jobs=1)
    assert found.best[0].num_devices == 8
    hard = Deadline(tokens=1.2 * 86400 * found.best[0].tokens_per_s, seconds=86400)
    found = search(s, objective="smallest_cluster", over=FEW, deadline=hard, jobs=1)
    assert found.best[0].num_devices == 16
    assert "too slow" in found.how


def test_a_deadline_beyond_the_peak_rates_is_refused_without_a_simulation():
    s = sim.load("gpt2-xl-1f1b-32gpu")
    with pytest.raises(DescriptionError, match="below the peak rates"):
        search(
            s, objective="smallest_cluster", deadline=Deadline(tokens=1e15, seconds=60), over=FEW
        )


# On one cluster a dollar buys device-seconds, so tokens by dollar and by second order alike.
def test_on_one_cluster_the_cheapest_plan_is_the_fastest():
    s = sim.load("gpt2-xl-1f1b-32gpu", {"cost.device_price": "2 USD/h"})
    cheap = search(s, objective="tokens_per_dollar", over=FEW, jobs=1).best
    fast = search(s, over=FEW, jobs=1).best
    assert [t.settings for t in cheap] == [t.settings for t in fast]
    # 32 devices at 2 USD/h cost 64 / 3600 USD/s
    assert cheap[0].tokens_per_usd == pytest.approx(cheap[0].tokens_per_s * 3600 / 64)


def test_energy_is_ordered_by_joules():
    found = search(sim.load("gpt2-xl-1f1b-32gpu"), objective="energy", over=FEW, jobs=1)
    joules = [t.energy_j_per_token for t in found.best]
    assert joules == sorted(joules)
    assert "W computing" in found_text(found)


def test_links_that_are_shared_order_the_best_anew():
    fluid = {"run.network": "fluid", "run.global_batch_size": 8, "model.num_hidden_layers": 4}
    s = sim.load("gpt2-xl-1f1b", fluid)
    over = {**FEW, "plan.tp": (1, 2)}
    found = search(s, over=over, jobs=1)
    assert found.settled
    given = dict(parse_override(word) for word in words(found.best[0].settings))
    alone = sim.simulate(sim.load("gpt2-xl-1f1b", {**fluid, **given}))
    assert alone.step_time_s == pytest.approx(found.best[0].step_time_s, rel=1e-6)


def test_where_nothing_fits_the_closest_plan_is_named():
    found = search(sim.load("gpt2-xl-1gpu", {"model": "llama-3-70b"}), jobs=1)
    assert not found.best
    assert "fits" in found_text(found)
    assert found_dict(found)["best"] == []


def test_places_that_differ_in_one_thing_or_in_mesh_and_schedule_are_neighbours():
    import numpy as np

    places = np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 1], [0, 0, 1], [1, 1, 1]])
    assert neighbours(places, places[0]).tolist() == [False, True, True, False, True, False]


def test_narrowing_stays_within_its_budget_and_runs_nothing_twice():
    space = plan_space(each_flow_alone(sim.load("gpt2-xl-1f1b")), FEW)
    every, seen = space.candidates, []

    def run(numbers):
        seen.extend(numbers)
        return [run_trial(Task(n, every[n].place, every[n].settings, every[n].scenario))
                for n in numbers]  # fmt: skip

    narrow(every, run, lambda t: order("time", t), 3)
    assert len(seen) == 3
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("plan.tq=1", "did you mean 'plan.tp'"),
        ("plan.dp=4", "dp fills the cluster"),
        ("plan.tp", "write AXIS=V"),
        ("plan.schedule=GPipes", "GPipe"),
    ],
)
def test_a_wrong_axis_is_explained(text, sentence):
    with pytest.raises(DescriptionError, match=sentence):
        parse_axis(text)


@pytest.mark.parametrize(
    ("settings", "over", "sentence"),
    [
        ({}, {"plan.tp": (0,)}, "plan.tp: 0"),
        ({}, {"plan.recompute": ("some",)}, "'some' is not one of"),
        ({}, {"plan.tp": (3,)}, "no legal plan"),
        ({"plan.zero": 1, "plan.dp_shard": 2}, {}, "is for one plan"),
    ],
)
def test_what_no_space_can_be_made_of_is_refused(settings, over, sentence):
    with pytest.raises(DescriptionError, match=sentence):
        search(sim.load("llama-3-8b-3d", settings), over=over, jobs=1)


def test_tokens_per_dollar_without_a_price_is_refused():
    with pytest.raises(DescriptionError, match="device_price"):
        search(sim.load("gpt2-xl-1f1b"), objective="tokens_per_dollar")


# At the critical batch twice the fewest steps and twice the least data; (S-1)(E-1) = 1 everywhere.
@pytest.mark.parametrize("batch", [1e5, 1e6, 3e7])
def test_steps_and_data_follow_the_critical_batch(batch):
    assert steps_over_least(1e6, 1e6) == samples_over_least(1e6, 1e6) == 2
    steps, data = steps_over_least(batch, 1e6), samples_over_least(batch, 1e6)
    assert (steps - 1) * (data - 1) == pytest.approx(1)


# With a step in proportion to the batch small batches win; with a constant one large batches do.
def test_the_time_to_a_loss_weighs_steps_against_their_length():
    s = sim.load("gpt2-xl-1f1b")
    found = search(s, over=FEW, jobs=1)

    def at(batch, step):
        trial = replace(found.best[0], step_time_s=step)
        size = replace(s, run=replace(s.run, global_batch_size=batch))
        return replace(found, scenario=size, trials=(trial,))

    tokens = 64 * s.sequence_length
    linear = advise([at(32, 1.0), at(64, 2.0), at(128, 4.0)], tokens)
    assert linear.fastest.samples == 32  # (1 + 2) 1 < (1 + 1) 2 < (1 + 1/2) 4
    flat = advise([at(32, 1.0), at(64, 1.0), at(128, 1.0)], tokens)
    assert [b.time_s for b in flat.batches] == [3.0, 2.0, 1.5]
    assert flat.fastest.samples == 128


def test_the_command_prints_plans_to_paste_and_the_figure_is_drawn(trainsim, tmp_path):
    figure = tmp_path / "plans.png"
    code, out, _ = trainsim(
        "search", "gpt2-xl-1f1b", "--over", "plan.tp=1,2", "--over", "plan.zero=1",
        "--over", "plan.microbatch_size=2,4", "--jobs", "1", "--plot", str(figure),
    )  # fmt: skip
    assert code == 0
    assert "--set plan." in out
    assert "why the others lost" in out
    assert figure.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (("--tokens", "1e9"), "go together"),
        (("--tokens", "1e9", "--deadline", "30"), "no unit"),
        (("--critical-batch", "1e6"), "go together"),
        (("--critical-batch", "1e6", "--batches", "8,x"), "whole numbers"),
        (("--plot", "speed=a.png"), "no figure 'speed'"),
        (("--objective", "speed"), "not one of"),
        (("--objective", "smallest_cluster"), "needs a deadline"),
    ],
)
def test_a_wrong_option_ends_in_one_sentence(trainsim, more, sentence):
    code, out, err = trainsim("search", "gpt2-xl-1f1b", *more)
    assert code == 2
    assert not out
    assert sentence in err
    assert "Traceback" not in err


def test_every_part_of_a_step_has_a_colour_and_a_marker_of_its_own_in_the_figure():
    from simulator.explore.search_plot import MARKERS
    from simulator.report.palette import COLOURS
    from simulator.report.summary import OWNERS

    assert set(MARKERS) == set(OWNERS)
    assert len(set(MARKERS.values())) == len(MARKERS)
    assert set(OWNERS) <= set(COLOURS)
