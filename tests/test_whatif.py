"""What if one thing were ideal: gains are those of real changes, and the path sums to the step."""

from __future__ import annotations

from dataclasses import replace

import pytest

import simulator as sim
from simulator.errors import DescriptionError
from simulator.explore.critical import critical_path
from simulator.explore.ideal import balance, free, ideals, scaled
from simulator.explore.next_steps import next_steps
from simulator.explore.whatif import MORE, bisected, what_if, whatif_dict

SCENARIOS = {
    "pp": ("gpt2-xl-1f1b", {"run.global_batch_size": 16}),
    "3d": ("llama-3-8b-3d", {"run.global_batch_size": 16}),
    "chunks": ("gpt3-175b-interleaved", {"run.global_batch_size": 16}),
    "dp": ("gpt2-xl-ddp", {}),
    "zero": ("llama-3-8b-3d", {"plan.pp": 1, "plan.dp": 16, "plan.zero": 3}),
    "experts": ("mixtral-8x7b-64gpu", {}),
    "split": ("gpt2-xl-1f1b", {"plan.schedule": "ZB-H1", "run.global_batch_size": 16}),
}


@pytest.fixture(scope="module", params=SCENARIOS.values(), ids=SCENARIOS)
def run(request):
    name, settings = request.param
    s = sim.load(name, {**settings, "run.detail": "stage"})
    return name, settings, s, sim.simulate(s)


def test_the_critical_path_is_as_long_as_the_step(run):
    *_, result = run
    path = critical_path(result)
    assert path.step_s == pytest.approx(result.step_time_s, rel=1e-12)
    assert sum(path.owners_s.values()) == pytest.approx(result.step_time_s, rel=1e-9)


# Without what lies on a path it is shorter by no more than that; others may then be longer. Where
# collectives slow work, freeing them shortens that too, so it is left alone here.
def test_no_gain_is_larger_than_what_the_path_has_of_it(run):
    *_, s, _ = run
    s = replace(s, run=replace(s.run, overlap_slowdown=0.0))
    result = sim.simulate(s)
    path = critical_path(result)
    for ideal in ideals(s):
        if ideal.reprice is not None and ideal.owner:
            then = sim.simulate(s, repriced=ideal.reprice).step_time_s
            gain = result.step_time_s - then
            assert -1e-9 <= gain <= path.owners_s.get(ideal.owner, 0.0) + 1e-9, ideal.name


# Every dimension of the mesh emits flows, and has a row of its own (questions, case 32).
def test_every_axis_that_communicates_can_be_freed(run):
    *_, s, _ = run
    owners = {ideal.owner for ideal in ideals(s) if ideal.reprice is not None}
    plan = s.plan
    for axis, there in (("tp", plan.tp > 1), ("pp", plan.pp > 1), ("dp", plan.dp > 1),
                        ("ep", plan.ep > 1), ("cp", plan.cp > 1)):  # fmt: skip
        assert (axis in owners) == there


def test_a_predicted_gain_is_that_of_really_changing_the_scenario(run):
    name, settings, s, result = run
    for ideal in ideals(s):
        if ideal.reprice is None:
            predicted = 1 - ideal.run(s).step_time_s / result.step_time_s
            really = sim.simulate(sim.load(name, {**settings, **ideal.settings})).step_time_s
            now = sim.simulate(sim.load(name, settings)).step_time_s
            assert predicted == pytest.approx(1 - really / now, abs=1e-6), ideal.name


# One node and a pipeline alone: NVLink carries messages and the sum of the tied embedding only.
def test_free_messages_gain_what_an_endless_link_gains():
    s = sim.load("gpt2-xl-1f1b", {"model.tie_word_embeddings": False, "run.detail": "stage"})
    link = next(x for x in ideals(s) if x.name.startswith("infinite NV"))
    freed = sim.simulate(s, repriced=free(("pp",))).step_time_s
    assert link.run(s).step_time_s == pytest.approx(freed, rel=1e-9)


# (p - 1)/(m + p - 1) of a plain 1F1B: 3 of 4 + 16 - 1 passes are spent on other ranks.
def test_the_bubble_of_the_path_is_that_of_the_formula():
    s = sim.load("gpt2-xl-1f1b", {"run.global_batch_size": 32, "model.tie_word_embeddings": False})
    assert s.num_microbatches == 16

    def even(program, ticks):
        return free(("pp", "tied"))(program, balance(program, ticks))

    path = critical_path(sim.simulate(s, repriced=even))
    passes = path.step_s - sum(
        v for k, v in path.owners_s.items() if k not in ("compute", "memory", "launch", "bubble")
    )
    assert path.owners_s["bubble"] / passes == pytest.approx(3 / 19, rel=0.03)


def test_perfect_balance_keeps_the_work_and_shortens_the_step():
    s = sim.load("gpt2-xl-1f1b", {"run.detail": "stage"})
    uneven, even = sim.simulate(s), sim.simulate(s, repriced=balance)
    assert even.step_time_s < uneven.step_time_s
    work = [r.breakdown.of("forward", "backward").sum() for r in (uneven, even)]
    assert work[1] == pytest.approx(work[0], rel=1e-9)


# Questions, case 13: 8 stages; a launch of 2 ms is longer than any kernel, so that 16 microbatches
# of 1 take longer than 8 of 2. The bubble formula says 46.7 % to 30.4 %, and yet nothing is gained.
def test_launch_gaps_are_not_taken_for_a_bubble():
    w = what_if(sim.load("gpt2-xl-1f1b", {
        "cluster.node.host_launch": "2 ms", "cluster.num_nodes": 1, "plan.pp": 8, "plan.dp": 1,
        "cluster.devices_per_node": 8, "run.global_batch_size": 16, "plan.microbatch_size": 2,
    }))  # fmt: skip
    assert w.scenario.num_microbatches == 8
    assert w.gain_of(MORE) < 0.01
    assert w.gain_of("no launch gaps") > 0.9
    assert w.verdict.startswith("launch-bound")
    assert "not bubble-bound" in w.verdict


# Questions, case 30: a rate changes the step, or its traffic is hidden and has slack.
def test_a_slower_link_is_a_longer_step_or_hidden_with_a_slack():
    name, settings = "llama-3-8b-3d", {"run.global_batch_size": 16, "run.detail": "stage"}
    s = sim.load(name, settings)
    now = sim.simulate(s).step_time_s
    for key in ("cluster.node.link.bandwidth", "cluster.node.nic.bandwidth"):
        slower = {key: "20 GB/s", "cluster.node.link.pair_bandwidth": "20 GB/s"}
        assert sim.simulate(sim.load(name, {**settings, **slower})).step_time_s > now


HIDDEN = {
    "plan.offload_activations": True, "run.global_batch_size": 8, "run.detail": "stage",
    "cluster.node.host.bandwidth": "1000 GB/s",
}  # fmt: skip


def test_hidden_communication_can_be_as_slow_as_its_slack_says():
    s = sim.load("gpt2-xl-1gpu", HIDDEN)
    w = what_if(s)
    hidden = [g for g in w.gains if g.slack is not None]
    assert hidden
    now = sim.simulate(s).step_time_s
    for g in hidden:
        if 1.02 < g.slack < 64 and g.ideal.owner:
            slow = sim.simulate(s, repriced=scaled((g.ideal.owner,), g.slack)).step_time_s
            slower = sim.simulate(s, repriced=scaled((g.ideal.owner,), 1.02 * g.slack)).step_time_s
            assert slow == pytest.approx(now, rel=1e-5)
            assert slower > now
        assert "hidden" in str(w)


def test_a_slack_is_found_to_one_percent():
    assert bisected(lambda factor: factor > 5) == pytest.approx(5, rel=0.01)
    assert bisected(lambda factor: False) == 64


def test_what_to_try_next_gains_what_it_says():
    name, settings = "gpt2-xl-1f1b", {"run.global_batch_size": 16}
    found = next_steps(sim.load(name, settings))
    now = sim.simulate(sim.load(name, settings)).summary
    assert found.singles
    for step in (*found.singles[:4], *found.chain):
        then = sim.simulate(sim.load(name, {**settings, **step.settings})).summary
        assert then.fits
        assert step.gain == pytest.approx(1 - then.step_time_s / now.step_time_s, abs=1e-6)
        more = then.device_memory_bytes - now.device_memory_bytes
        assert step.more_memory_bytes == pytest.approx(more, abs=1)
    gains = [step.gain for step in found.chain]
    assert gains == sorted(gains)


# Questions, case 35: at p = m = 8 two chunks make 15 passes 11.5, a gain of 1 - 11.5 / 15 = 23.3 %
# at most; 405B on 512 H100 measured 100 against 128 tokens/s, 21.9 %.
def test_chunks_gain_no_more_than_the_formula_allows():
    times = {"stages": 8, "microbatches": 8, "forward": 1.0, "backward": 2.0}
    plain = sim.simulate_schedule("1F1B", **times).step_time_s
    chunked = sim.simulate_schedule("Interleaved1F1B", chunks=2, **times).step_time_s
    assert plain / chunked == pytest.approx(15 / 11.5)


def test_prices_of_ones_own_are_refused_where_flows_share_links():
    s = sim.load("gpt2-xl-1f1b", {"run.network": "fluid"})
    with pytest.raises(DescriptionError, match="alpha-beta"):
        sim.simulate(s, repriced=free(("pp",)))


def test_the_command_writes_its_report_and_figure(trainsim, tmp_path):
    figure, report = tmp_path / "w.png", tmp_path / "w.json"
    code, out, _ = trainsim(
        "whatif", "gpt2-xl-1f1b", "--set", "run.global_batch_size=8", "--plot", str(figure),
        "--json", str(report),
    )  # fmt: skip
    assert code == 0
    for words in ("critical path", "if there were", "to try next", "assumed"):
        assert words in out
    assert figure.stat().st_size > 10_000
    assert '"what_if"' in report.read_text(encoding="utf-8")


def test_the_document_has_every_ideal_with_its_gain():
    w = what_if(sim.load("gpt2-xl-1f1b", {"run.global_batch_size": 8}))
    document = whatif_dict(w)
    assert [x["name"] for x in document["what_if"]] == [g.ideal.name for g in w.gains]
    assert document["critical_path"]["owners_s"] == w.path.owners_s


# The loaders of this workload take longer than its GPUs.
def test_a_step_that_waits_for_data_is_said_to():
    w = what_if(sim.load("resnet50-loader"))
    assert w.verdict.startswith("bound by data loading")
    assert not w.left_out
