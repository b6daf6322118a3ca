"""The changes that make a plan fit: each does, the fastest first, and all are legal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import simulator as sim
from simulator.errors import DescriptionError
from simulator.explore import remedies as module
from simulator.explore.remedies import MOST_FOUND, Remedies, Remedy, find_remedies
from simulator.units import TICKS_PER_SECOND

GOLDEN = Path(__file__).parent / "golden"

OVER = {
    "one GPU": ("gpt2-xl-1gpu", {"plan.microbatch_size": 64}),
    "dp alone": ("llama-3-8b-3d", {"plan.tp": 1, "plan.pp": 1, "plan.dp": 64}),
    "chunks": ("gpt3-175b-interleaved", {"plan.recompute": "none"}),
    "unfused": ("gpt2-xl-gpipe", {"plan.microbatch_size": 8, "run.attention": "unfused"}),
    "servers": (
        "gpt2-xl-ddp",
        {"plan.microbatch_size": 8, "plan.recompute": "none",
         "plan.gradient_exchange": "parameter_server"},
    ),
}  # fmt: skip
HOPELESS = ("llama-3-8b-3d", {"model": "llama-3-405b"})
NOTHING_LEFT = (
    "gpt2-xl-1gpu",
    {"model": "llama-3-70b", "plan.microbatch_size": 1, "plan.recompute": "full"},
)


def found_for(case, **more):
    name, settings = case
    found = find_remedies(sim.simulate(sim.load(name, {**settings, **more})))
    assert found is not None
    return found


@pytest.fixture(params=OVER.values(), ids=OVER)
def over(request):
    return request.param


# What is printed can be given to --set: the loader takes it, and a run at full detail agrees.
def test_every_change_fits_when_it_is_run_by_itself(over):
    name, settings = over
    remedies = found_for(over).found
    assert remedies
    for remedy in remedies:
        summary = sim.simulate(sim.load(name, {**settings, **remedy.settings})).summary
        assert summary.fits
        assert summary.device_memory_bytes == pytest.approx(remedy.device_memory_bytes)
        assert summary.step_time_s == pytest.approx(remedy.step_time_s, rel=1e-6)


def test_the_fastest_comes_first_and_few_are_listed(over):
    times = [r.step_time_s for r in found_for(over).found]
    assert times == sorted(times)
    assert len(times) <= MOST_FOUND


def test_a_change_is_single_or_a_pair(over):
    for remedy in found_for(over).found:
        rows = [key for key in remedy.settings if key not in ("plan.dp", "plan.chunks")]
        assert 1 <= len(rows) <= 2


def test_the_cost_is_that_over_the_step_as_it_is(over):
    name, settings = over
    now = sim.simulate(sim.load(name, settings)).step_time_s
    for remedy in found_for(over).found:
        assert remedy.slowdown == pytest.approx(remedy.step_time_s / now - 1)


def test_a_plan_that_fits_gets_none_and_costs_no_simulation(monkeypatch):
    result = sim.simulate(sim.load("gpt2-xl-1gpu"))
    monkeypatch.delattr(module, "simulate")
    assert find_remedies(result) is None


# 8,030,261,248 parameters x 12 bytes (fp32 master, two moments), of which 1/64 stay on a rank.
def test_sharding_the_optimizer_states_frees_what_the_formula_says():
    result = sim.simulate(sim.load("llama-3-8b-3d", OVER["dp alone"][1]))
    zero = next(r for r in found_for(OVER["dp alone"]).found if r.settings == {"plan.zero": 1})
    freed = result.summary.device_memory_bytes - zero.device_memory_bytes
    assert freed == pytest.approx(8_030_261_248 * 12 * 63 / 64, rel=0.01)


def test_nothing_goes_further_than_a_change_that_fits():
    named = [r.settings for r in found_for(OVER["dp alone"]).found]
    assert {"plan.zero": 1} in named
    assert all("plan.zero" not in settings for settings in named if settings != {"plan.zero": 1})


# GPT-2 XL has 25 heads: tensor-parallel degrees are 5 and 25, and neither divides 8 ranks. Servers
# exchange whole gradients, so that no stage of ZeRO is legal either.
def test_what_the_scenario_refuses_is_not_offered():
    name, settings = OVER["servers"]
    for refused in ({"plan.tp": 2, "plan.dp": 4}, {"plan.zero": 1}):
        with pytest.raises(DescriptionError):
            sim.load(name, {**settings, **refused})
    keys = {key for r in found_for(OVER["servers"]).found for key in r.settings}
    assert not keys & {"plan.tp", "plan.zero"}


def test_a_plan_that_recomputes_by_operators_is_told_to_recompute_all():
    found = found_for(OVER["one GPU"], **{"plan.recompute": "selective-op"})
    asked = {r.settings["plan.recompute"] for r in found.found if "plan.recompute" in r.settings}
    assert asked <= {"full"}
    assert found.found


def test_what_is_over_is_the_peak_less_the_device():
    summary = sim.simulate(sim.load("gpt2-xl-1gpu", OVER["one GPU"][1])).summary
    over = found_for(OVER["one GPU"]).over_bytes
    assert over == summary.device_memory_bytes - 80 * 2**30


def test_a_hopeless_plan_is_told_so_in_one_sentence_with_the_closest():
    hopeless = found_for(HOPELESS)
    assert hopeless.found == ()
    assert hopeless.closest is not None
    assert hopeless.closest.device_memory_bytes > hopeless.capacity_bytes
    _, sentence = str(hopeless).splitlines()
    assert sentence.startswith("no change of the plan fits, alone or with another")
    assert f"the closest, {hopeless.closest.name}, which needs" in sentence


def test_a_plan_with_nothing_left_to_change_is_told_so():
    nothing = found_for(NOTHING_LEFT)
    assert (nothing.tried, nothing.found, nothing.closest) == (0, (), None)
    assert str(nothing).splitlines()[1].startswith("no change of the plan is left")


def test_a_search_ends_and_says_what_it_left(monkeypatch):
    monkeypatch.setattr(module, "MOST_ROWS", 1)
    short = found_for(HOPELESS)
    assert short.tried == 1
    assert short.left > 1
    assert f"1 change simulated, {short.left} more were not" in str(short)


def test_what_is_too_large_for_the_machine_counts_as_left(monkeypatch):
    result = sim.simulate(sim.load(*OVER["one GPU"]))

    def refuse(scenario):
        raise DescriptionError("too large")

    monkeypatch.setattr(module, "simulate", refuse)
    refused = find_remedies(result)
    assert refused is not None
    assert refused.tried == 0
    assert refused.left > 0


# Where flows share links, a closed form picks the changes and the run's own network times them.
def test_times_of_shared_links_are_of_shared_links():
    fluid = {"run.network": "fluid", "run.overlap_slowdown": 0.15}
    name, settings = "gpt2-xl-ddp", {"plan.recompute": "none", "plan.microbatch_size": 8}
    found = found_for((name, {**settings, **fluid})).found
    assert found
    coarse = {**settings, **fluid, "run.detail": "stage"}
    for remedy in found:
        again = sim.simulate(sim.load(name, {**coarse, **remedy.settings}))
        assert again.step_time_s == pytest.approx(remedy.step_time_s, abs=1 / TICKS_PER_SECOND)
    alone = found_for((name, settings)).found
    assert [r.step_time_s for r in alone] != [r.step_time_s for r in found]


def test_a_run_that_does_not_fit_prints_them_and_ends_with_3(trainsim):
    code, out, _ = trainsim("run", "gpt2-xl-1gpu", "--set", "plan.microbatch_size=64")
    assert code == 3
    assert "nearest changes that fit" in out
    assert "plan.microbatch_size=16" in out


def test_they_are_in_json_only_where_the_plan_does_not_fit(trainsim):
    for size, code in ((64, 3), (8, 0)):
        over = ("--set", f"plan.microbatch_size={size}")
        for command in (("run",), ("show", "memory")):
            ended, out, _ = trainsim(*command, "gpt2-xl-1gpu", *over, "--json", "-")
            assert ended == code
            assert ("remedies" in json.loads(out)) == (code == 3)


def test_json_gives_each_change_by_key(trainsim):
    over = ("--set", "plan.microbatch_size=64")
    _, out, _ = trainsim("run", "gpt2-xl-1gpu", *over, "--json", "-")
    first = json.loads(out)["remedies"]["found"][0]
    assert first["settings"] == {"plan.microbatch_size": 16}
    assert set(first) == {"settings", "device_memory_bytes", "step_time_s", "slowdown"}


# 90 GB of 80 GB; 1.1 s and 1.25 s against 1 s.
def test_the_text_is_this():
    remedies = Remedies(
        rank=3, over_bytes=10e9, capacity_bytes=80e9, step_time_s=1.0, tried=12, left=0,
        closest=None,
        found=(
            Remedy(settings={"plan.zero": 1}, device_memory_bytes=70e9, step_time_s=1.1,
                   slowdown=0.1),
            Remedy(settings={"plan.tp": 8, "plan.dp": 2, "plan.sequence_parallel": True},
                   device_memory_bytes=75.5e9, step_time_s=1.25, slowdown=0.25),
        ),
    )  # fmt: skip
    assert f"{remedies}\n" == (GOLDEN / "remedies.txt").read_text(encoding="utf-8")
