"""Evaluations and logging between steps: what they cost, by hand, and what they leave alone."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data import loading, rows_of  # noqa: F401  # a fixture
from test_scenario_parity import alike_however_it_runs

import simulator as sim
from simulator.describe.between import Evaluation, due
from simulator.errors import DescriptionError
from simulator.jitter import study
from simulator.lower import lower
from simulator.lower.between import forward_only
from simulator.operate import operate
from simulator.program_text import format_program, parse_program
from simulator.report import summary


@pytest.fixture(scope="session")
def evaluating(scenario_of):
    """Return a function to a tiny scenario with evaluations."""

    def build(*, every=1, batches=3, **more):
        return replace(scenario_of(**more), evaluation=Evaluation(every=every, batches=batches))

    return build


def forward_s(s):
    """Return the seconds of one forward of the first rank."""
    r = sim.simulate(replace(s, evaluation=None))
    p, t = r.program, r.timeline
    mine = (p.stream == 0) & (p.rank == 0) & (p.action == 0) & (p.microbatch == 0) & (p.step == 0)
    return float((t.end - t.start)[mine].sum()) / 1e12


@pytest.mark.parametrize(
    ("every", "steps", "before"),
    [(1, 4, [1, 2, 3]), (2, 5, [2, 4]), (3, 4, [3]), (500, 4, [3]), (4, 4, [3])],
)
def test_what_is_done_every_so_many_steps_is_done_before_the_last_at_least(every, steps, before):
    assert due(every, steps) == before


@pytest.mark.parametrize("batches", [1, 7])
def test_an_evaluation_takes_its_forwards(evaluating, batches):
    s = evaluating(batches=batches)
    use = sim.simulate(s).summary.evaluation
    assert use.each_s == pytest.approx(batches * forward_s(s), rel=1e-9)


# 2 evaluations in 5 steps: each costs 3 forwards. In the long run one in 2 steps does.
def test_evaluations_repeat_and_are_spread_over_the_steps_between(evaluating):
    s = evaluating(every=2, run={"num_steps": 5})
    result = sim.simulate(s)
    use = result.summary.evaluation
    step = sim.simulate(replace(s, evaluation=None)).step_time_s
    assert use.count == 2
    assert use.each_s == pytest.approx(3 * forward_s(s), rel=1e-9)
    assert use.long_run_share == pytest.approx(use.each_s / (use.each_s + 2 * step), rel=1e-9)
    assert "every 2 steps" in str(result)
    assert any("has an evaluation before it, as one in 2 has" in note for note in result.notes)


# Forwards stream through a pipeline, and the next step's follow them: no bubble but the first.
def test_a_pipeline_evaluates_without_a_bubble_of_its_own(evaluating):
    s = evaluating(batches=16, plan={"pp": 4, "microbatch_size": 2})
    use = sim.simulate(s).summary.evaluation
    r = sim.simulate(replace(s, evaluation=None))
    p, t = r.tiled, r.times
    ticks = (t.end - t.start)[(p.stream == 0) & (p.action == 0) & (p.microbatch == 0)]
    own = p.rank[(p.stream == 0) & (p.action == 0) & (p.microbatch == 0)]
    slowest = np.bincount(own, weights=np.ravel(ticks)).max() / 2 / 1e12  # of two steps
    assert use.each_s == pytest.approx(16 * slowest, rel=0.1)


def test_ranks_of_several_stages_go_in_rounds():
    assert [list(map(str, row)) for row in forward_only([(0, 2), (1, 3)], 3)] == [
        ["0F0", "0F1", "2F0", "2F1", "0F2", "2F2"], ["1F0", "1F1", "3F0", "3F1", "1F2", "3F2"],
    ]  # fmt: skip


def test_an_evaluation_keeps_nothing_and_changes_nothing_else(evaluating):
    s = evaluating(batches=20, plan={"pp": 2, "dp": 2})
    plain = sim.simulate(replace(s, evaluation=None))
    result = sim.simulate(s)
    assert result.peak_memory_bytes.tolist() == plain.peak_memory_bytes.tolist()
    assert result.first_step_s == plain.first_step_s
    p = result.tiled
    assert set(p.microbatch[(p.action == 0) & (p.step == 1)].tolist()) >= set(range(4, 24))
    assert not np.isin(p.microbatch[p.action == 1], range(4, 24)).any()


def test_a_loader_brings_the_samples_of_an_evaluation(loading):  # noqa: F811
    s = loading(data={"transform_time": 1e-3}, run={"num_steps": 4})
    s = replace(s, evaluation=Evaluation(every=3, batches=5))
    result = sim.simulate(s)
    assert len(rows_of(result.program, "copy")) == 4 * 4 + 5 + 2  # and two ahead
    assert result.summary.evaluation.each_s == pytest.approx(5e-3, rel=1e-2)


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_engines_agree_on_random_evaluations(evaluating, data):
    pick = data.draw
    plan = {
        "dp": pick(st.integers(1, 2)), "pp": pick(st.integers(1, 3)), "tp": pick(st.integers(1, 2)),
        "zero": pick(st.sampled_from([0, 1, 3])),
        "schedule": pick(st.sampled_from(["1F1B", "GPipe"])),
    }  # fmt: skip
    if plan["zero"] == 3:
        plan["reshard_after_forward"] = pick(st.booleans())
    elif plan["pp"] > 1 and pick(st.booleans()):
        plan["p2p_overlap"] = False
    if plan["pp"] == 2 and "p2p_overlap" not in plan and pick(st.booleans()):
        split = [] if plan["zero"] == 3 else ["ZBVZeroBubble"]  # the two are refused together
        plan |= {"schedule": pick(st.sampled_from(["Interleaved1F1B", *split])), "chunks": 2}
    run = {"num_steps": 3, "log_time": pick(st.sampled_from([0.0, 1e-4]))}
    if run["log_time"]:
        run["log_every"] = pick(st.sampled_from([None, 2]))
    s = evaluating(
        every=pick(st.integers(1, 3)), batches=pick(st.integers(1, 5)), plan=plan, run=run,
        batch=4 * plan["dp"],
    )  # fmt: skip
    alike_however_it_runs(s)
    result = sim.simulate(s)
    assert result.breakdown.ticks.sum() == result.breakdown.window.sum()
    assert result.step_time_s == sim.simulate(s, folded=False).step_time_s
    flat = lower(s).flat
    assert parse_program(format_program(flat)) == flat


def test_links_are_shared_and_samples_drawn_with_evaluations_too(evaluating):
    s = evaluating(plan={"dp": 2, "pp": 2}, run={"network": "fluid", "log_time": 1e-4})
    compiled, reference = (sim.simulate(s, engine=e) for e in ("compiled", "reference"))
    assert compiled.times == reference.times
    jitter = sim.load("gpt2-xl-ddp", {"jitter": {"op_cv": 0.1, "samples": 4}}).jitter
    j = study(sim.simulate(replace(s, jitter=jitter)))
    assert j.mean_s > 0.9 * compiled.step_time_s


# ---- logging ----


@pytest.mark.parametrize("pp", [1, 4])
def test_a_log_of_every_step_lengthens_it_by_its_time(scenario_of, pp):
    s = scenario_of(plan={"pp": pp}, run={"log_time": 1e-3, "num_steps": 3})
    result = sim.simulate(s)
    plain = sim.simulate(scenario_of(plan={"pp": pp}, run={"num_steps": 3}))
    longer = result.step_time_s - plain.step_time_s
    if pp == 1:
        assert longer == pytest.approx(1e-3, rel=1e-9)
        assert result.summary.shares["log"] == pytest.approx(1e-3 / result.step_time_s)
    assert 0 < longer <= 1.001e-3  # a rank whose step ends early logs early
    assert result.summary.logging.each_s == pytest.approx(longer)
    assert result.summary.logging.count == 2


def test_a_log_every_ten_steps_costs_a_tenth_in_the_long_run(scenario_of):
    s = scenario_of(run={"log_time": 1e-3, "log_every": 10})
    use = sim.simulate(s).summary.logging
    assert use.each_s == pytest.approx(1e-3)
    step = sim.simulate(scenario_of()).step_time_s
    assert use.long_run_share == pytest.approx(1e-4 / (1e-4 + step), rel=1e-6)


# ---- described and refused ----


def test_a_file_describes_evaluations(trainsim):
    code, out, _ = trainsim(
        "run", "gpt2-xl-1f1b", "--set", "evaluation.every=500", "--set", "evaluation.batches=10",
        "--set", "run.log_time=5 ms", "--plot", "pipeline.png",
    )  # fmt: skip
    assert code == 0
    assert "  evaluation  10 batches of " in out
    assert "  logging     training is " in out
    assert "they keep nothing" in out


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"evaluation.every": 0}, "every: 0 must be at least 1"),
        ({"evaluation.batches": 0}, "batches: 0 must be at least 1"),
        ({"run.num_steps": 1}, "evaluation: is between two steps, and run.num_steps is 1"),
        ({"plan.schedule": "DualPipe", "plan.chunks": 2}, "two ranks hold each stage"),
        ({"plan.schedule": "PipeDream"}, "no moment lies between two steps"),
        ({"run.log_every": 5}, "say how long the host takes, or leave it out"),
        ({"run.log_time": "-1 ms"}, "log_time: -0.001 seconds must be at least 0"),
    ],
)
def test_what_makes_no_sense_is_refused(changes, sentence):
    with pytest.raises(DescriptionError) as caught:
        sim.load("gpt2-xl-1f1b", {"evaluation": {"every": 5, "batches": 2}, **changes})
    assert sentence in str(caught.value)


# 10 forwards every 5 steps make a step longer by two forwards on average.
def test_operations_spread_evaluations_over_steps():
    checkpoint = {"interval": "10 min", "write_time": "0 s"}
    s = sim.load("gpt2-xl-ddp", {
        "operations": {"checkpoint": checkpoint}, "evaluation": {"every": 5, "batches": 10},
        "run.log_time": "10 ms", "run.log_every": 2,
    })  # fmt: skip
    o = operate(s, seeds=1, days=0.1)
    summary = sim.simulate(replace(s, operations=None)).summary
    expected = o.step.step_time_s + summary.evaluation.each_s / 5 + 10e-3 / 2
    assert o.step_time_s == pytest.approx(expected, rel=1e-9)
    assert summary.evaluation.each_s == pytest.approx(10 * forward_s(s), rel=1e-2)
    assert "evaluations and logging make every step longer" in str(o)


# A sweep runs a thousand plans: a summary takes a quarter of one.
def test_a_run_with_nothing_between_its_steps_is_summed_up_once(scenario_of, monkeypatch):
    made = []
    monkeypatch.setattr(summary, "summarise", lambda result: made.append(result))
    result = sim.simulate(scenario_of())
    assert not made
    assert (result.summary, result.summary, len(made)) == (None, None, 1)
