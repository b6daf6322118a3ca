"""Steps under jitter: against order statistics, hand-worked times, and runs without a cause."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import simulator as sim
from simulator.describe.jitter import Interference, Jitter, RandomSlow, Slow
from simulator.engine import run
from simulator.jitter import study
from simulator.jitter.draw import disturbed, drawn
from simulator.jitter.text import jittered_dict
from simulator.report.result import Result

EVERYTHING = Jitter(
    op_cv=0.1, flow_cv=0.2, gpu_cv=0.05, slow_gpus=(Slow(ranks=(1,), factor=1.5),),
    random_slow_gpus=RandomSlow(share=0.3, factor=1.2),
    slow_links=(Slow(ranks=(0,), factor=2.0),),
    random_slow_links=RandomSlow(share=0.3, factor=1.3),
    interference=Interference(period=1e-3, duration=1e-4), samples=12,
)  # fmt: skip
THREE_AXES = {"dp": 2, "pp": 2, "tp": 2}


@pytest.fixture
def jittered(scenario_of):
    """Return a function from a jitter to a study of a tiny scenario under it."""

    def made(jitter, plan=THREE_AXES, engine="compiled", run=None, **options):
        s = replace(scenario_of(plan=plan, run=run), jitter=jitter)
        return study(sim.simulate(s, engine=engine), engine=engine, **options)

    return made


@pytest.fixture
def barrier(op, program_of, scenario_of):
    """Return a function to a study of ranks that each work once, for some ticks, and then meet."""

    def made(jitter, ticks):
        ops = [op(rank, t) for rank, t in enumerate(ticks)]
        ops += [op(rank, 0, "dp", (rank,), "sum") for rank in range(len(ticks))]
        program, times = program_of(ops)
        s = replace(scenario_of(plan={"dp": len(ticks)}), jitter=jitter)
        return study(Result(program, run(program, times), s))

    return made


def expected_maximum(n, cv):
    """Return the mean greatest of n log-normals of mean 1: the integral of 1 - F(x)^n."""
    sigma = math.sqrt(math.log1p(cv * cv))
    x = np.linspace(1e-9, 60, 400_001)
    z = (np.log(x) + sigma**2 / 2) / sigma / math.sqrt(2)
    below = 0.5 * (1 + np.array([math.erf(v) for v in z]))
    return float(np.trapezoid(1 - below**n, x))


@pytest.mark.parametrize(("n", "cv"), [(1, 0.5), (2, 0.05), (8, 0.3), (64, 0.05), (64, 1.0)])
def test_a_barrier_waits_for_the_greatest_of_n_log_normals(barrier, n, cv):
    steps = barrier(Jitter(op_cv=cv, samples=2000), [10**9] * n).step_ticks / 1e9
    error = steps.std(ddof=1) / math.sqrt(len(steps))
    assert abs(steps.mean() - expected_maximum(n, cv)) < 4 * error


def test_noise_has_the_stated_mean_and_spread(barrier):
    steps = barrier(Jitter(op_cv=0.2, samples=4000), [10**9]).step_ticks / 1e9
    assert steps.mean() == pytest.approx(1.0, abs=4 * 0.2 / math.sqrt(4000))
    assert steps.std() == pytest.approx(0.2, rel=0.06)


# Each rank has three ops: the greatest of n sums of three equal log-normals is 3 times that of n.
def test_all_work_of_a_gpu_has_one_speed(op, program_of, scenario_of):
    ops = [op(rank, 10**9) for rank in range(8) for _ in range(3)]
    ops += [op(rank, 0, "dp", (3 * rank + 2,), "sum") for rank in range(8)]
    program, times = program_of(ops)
    s = replace(scenario_of(plan={"dp": 8}), jitter=Jitter(gpu_cv=0.1, samples=2000))
    steps = study(Result(program, run(program, times), s)).step_ticks / 3e9
    error = steps.std(ddof=1) / math.sqrt(len(steps))
    assert abs(steps.mean() - expected_maximum(8, 0.1)) < 4 * error


# Ranks work 10 and 7 us, and meet: rank 1 could be 3 us later, rank 0 not at all.
def test_the_slack_of_a_rank_is_by_how_much_it_could_be_later(barrier):
    ranks = barrier(Jitter(), [10_000_000, 7_000_000]).by_rank
    assert [r.slack_s for r in ranks] == [0.0, pytest.approx(3e-6)]
    assert [r.critical for r in ranks] == [1.0, 0.0]


# Twice as slow, rank 1 takes 14 us: 4 us more than the step had, 7 us more than it had itself.
def test_who_comes_last_delays_the_step(barrier):
    j = barrier(Jitter(slow_gpus=(Slow(ranks=(1,), factor=2.0),)), [10_000_000, 7_000_000])
    assert j.step_ticks.tolist() == [14_000_000]
    assert [r.delay_s for r in j.by_rank] == [0.0, pytest.approx(7e-6)]
    assert [r.delays_most for r in j.by_rank] == [0.0, 1.0]
    assert [r.path_s for r in j.by_rank] == [0.0, pytest.approx(14e-6)]
    assert j.worst_ops == [("F op", 1, 1.0)]
    assert j.gains["GPU of rank 1, x 2"].mean_s == pytest.approx(4e-6)


def test_without_jitter_nothing_is_delayed(jittered):
    j = jittered(Jitter())
    assert j.step_s.tolist() == [j.result.step_time_s]
    assert all(r.delays_most == 0 and r.delay_s == 0 for r in j.by_rank)
    assert "delayed by  nobody" in str(j)


# One replica of four is slow; messages are not hidden, so each rank's step is all its work, then
# the sums: half as long again is the step longer by half of the work of a rank.
@pytest.mark.parametrize("factor", [1.2, 1.5, 3.0])
def test_a_slow_gpu_lengthens_its_compute(jittered, factor):
    plan = {"dp": 4, "grad_overlap": False}
    j = jittered(Jitter(slow_gpus=(Slow(ranks=(2,), factor=factor),)), plan, run={"num_steps": 1})
    b = j.result.breakdown
    work = int(b.of("forward", "backward", "optimizer")[2])
    longer = int(j.step_ticks[0]) - round(j.result.step_time_s * 1e12)
    assert longer == pytest.approx((factor - 1) * work, abs=len(j.result.tiled.rank))
    assert [r.delays_most for r in j.by_rank] == [0.0, 0.0, 1.0, 0.0]
    assert j.by_rank[2].delay_s == pytest.approx(longer / 1e12)


# The only flows are the sums over two replicas, which nothing hides: they take twice as long.
def test_a_slow_link_lengthens_the_flows_of_its_rank(jittered):
    plan = {"dp": 2, "grad_overlap": False}
    j = jittered(Jitter(slow_links=(Slow(ranks=(1,), factor=2.0),)), plan, run={"num_steps": 1})
    moved = int(j.result.breakdown.of("dp")[0])
    assert int(j.step_ticks[0]) - round(j.result.step_time_s * 1e12) == moved
    assert j.by_kind["dp"].delay_s == pytest.approx(moved / 1e12)


# Four replicas of two stages: rank 0 sends to the other stage of its replica alone.
def test_a_slow_link_leaves_flows_of_others_alone(scenario_of):
    s = scenario_of(plan={"dp": 4, "pp": 2})
    r = sim.simulate(s, folded=False)
    base = r.times.end - r.times.start
    jitter = Jitter(slow_links=(Slow(ranks=(0,), factor=3.0),), samples=1)
    (draws,) = drawn(r.tiled, jitter, range(1))
    ticks = disturbed(r.tiled, base, jitter, draws)
    slower = ticks > base
    for row in np.flatnonzero(slower.any(axis=1)).tolist():
        joint = r.tiled.joint[row]
        classes = r.tiled.classes[r.tiled.partition[joint]]
        groups = [r.tiled.groups[int(r.tiled.joint_group[joint] + k)] for k in classes]
        assert slower[row].tolist() == [0 in group.tolist() for group in groups]
    assert not slower[~r.tiled.is_flow].any()
    assert slower.any()


@pytest.mark.parametrize("steps", [1, 3])
def test_times_on_the_critical_path_add_up_to_the_step(jittered, steps):
    j = jittered(EVERYTHING, run={"num_steps": steps})
    assert j.delays.on_path.sum() == j.step_ticks.sum()
    assert j.delays.path_kind.sum() == j.step_ticks.sum()
    assert sum(r.path_s for r in j.by_rank) == pytest.approx(j.mean_s)


def test_some_rank_of_each_sample_is_critical(jittered):
    j = jittered(EVERYTHING)
    assert sum(r.critical for r in j.by_rank) >= 1
    assert all(0 <= r.slack_s <= j.mean_s for r in j.by_rank)


CAUSES = {
    "noise of work, cv 0.1": {"op_cv": 0.0},
    "noise of flows, cv 0.2": {"flow_cv": 0.0},
    "spread of GPUs, cv 0.05": {"gpu_cv": 0.0},
    "GPU of rank 1, x 1.5": {"slow_gpus": ()},
    "30% of GPUs, x 1.2": {"random_slow_gpus": None},
    "link of rank 0, x 2": {"slow_links": ()},
    "30% of links, x 1.3": {"random_slow_links": None},
    "hosts hold 100 us every 1 ms": {"interference": None},
}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_replay_without_a_cause_is_a_run_without_it(jittered, cause):
    replayed = jittered(EVERYTHING).without
    assert list(replayed) == list(CAUSES)
    alone = jittered(replace(EVERYTHING, **CAUSES[cause]))
    assert replayed[cause].tolist() == alone.step_ticks.tolist()


@pytest.mark.parametrize("engine", ["events", "reference"])
def test_engines_give_the_same_bytes(jittered, engine):
    jitter = replace(EVERYTHING, samples=3)
    assert json.dumps(jittered_dict(jittered(jitter))) == json.dumps(
        jittered_dict(jittered(jitter, engine=engine))
    )


def test_fluid_runs_are_sampled_by_every_engine(jittered):
    jitter = Jitter(op_cv=0.1, interference=EVERYTHING.interference, samples=3)
    runs = [
        jittered(jitter, engine=engine, run={"network": "fluid"}).step_ticks.tolist()
        for engine in ("compiled", "events", "reference")
    ]
    assert runs[0] == runs[1] == runs[2]
    assert len(set(runs[0])) == 3


@settings(max_examples=10, deadline=None)
@given(cells=st.integers(1, 5000), samples=st.integers(1, 12))
def test_batches_of_any_size_give_the_same(scenario_of, cells, samples):
    s = replace(scenario_of(plan=THREE_AXES), jitter=EVERYTHING)
    r = sim.simulate(s)
    some = study(r, cells=cells, samples=samples)
    assert some.step_ticks.tolist() == study(r).step_ticks.tolist()[:samples]
    if samples == 12:
        assert jittered_dict(some) == jittered_dict(study(r))


def test_another_seed_draws_others(jittered):
    first, second = (jittered(replace(EVERYTHING, seed=seed)).step_ticks for seed in (0, 1))
    assert not (first == second).any()


# dp is the outermost axis: ranks 0 to 3 are the same in both, and draw the same.
def test_more_ranks_move_nobodys_noise(scenario_of):
    factors = []
    for dp in (2, 4):
        program = sim.simulate(scenario_of(plan={"dp": dp, "pp": 2})).tiled
        (draws,) = drawn(program, EVERYTHING, range(5))
        factors.append(draws)
    few, many = factors
    assert (many.ops[:, :, :2] == few.ops).all()
    assert (many.gpus[:, :4] == few.gpus).all()
    assert (many.phase[:, :4] == few.phase).all()


def test_members_of_a_flow_draw_one_time(scenario_of):
    program = sim.simulate(scenario_of(plan=THREE_AXES)).tiled
    (draws,) = drawn(program, EVERYTHING, range(1))
    rows = np.flatnonzero(program.is_flow)
    seen = {}
    for factor, row in zip(draws.flows[:, 0], rows.tolist(), strict=True):
        joint = int(program.joint[row])
        for k, x in zip(program.classes[program.partition[joint]].tolist(), factor, strict=True):
            assert seen.setdefault((joint, k), x) == x
    assert len(set(seen.values())) == len(seen)


# Pauses of 1 in 10 take a ninth more where one rank works alone, and more where ranks wait for
# each other's.
def test_interference_takes_its_share_of_a_rank_alone(barrier):
    held = Interference(period=1e-6, duration=1e-7)
    alone, many = (
        barrier(Jitter(interference=held, samples=50), [10**9] * n).mean_s for n in (1, 16)
    )
    assert alone == pytest.approx(1e-3 / 0.9, rel=1e-3)
    assert alone < many < alone + 1e-7


def test_interference_of_named_ranks_spares_the_others(barrier):
    held = Interference(period=1e-6, duration=5e-7, ranks=(1,))
    j = barrier(Jitter(interference=held, samples=5), [10**9, 10**8])
    assert j.step_s.tolist() == [1e-3] * 5


def test_a_sample_is_enough_where_nothing_is_drawn(jittered):
    j = jittered(Jitter(slow_gpus=(Slow(ranks=(0,), factor=1.1),), samples=50))
    assert len(j.step_ticks) == 1
    assert "nothing is drawn" in str(j)
