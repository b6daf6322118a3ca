"""Asynchronous parameter servers: who waits for whom, how long exchanges take, what is reported."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import simulator as sim
from simulator.describe.plan import Plan
from simulator.engine import run
from simulator.errors import DescriptionError, ProgramError
from simulator.hardware import price
from simulator.hardware.contention import contended
from simulator.hardware.network import GroupShape, flow_model, flow_seconds
from simulator.hardware.patterns import ORDERED
from simulator.lower import check, lower
from simulator.program import ACTION_CODE, ONE_SIDED, Flow
from simulator.program_text import format_program, parse_program
from simulator.report.result import Result

SERVERS = {"gradient_exchange": "parameter_server", "bucket_size": 1e9}
ENGINES = ("reference", "events", "compiled")


def named(program, name):
    """Return the rows of the flows of a name."""
    of = [isinstance(cost, Flow) and cost.name == name for cost in program.costs]
    return np.flatnonzero(np.array(of)[program.cost])


@pytest.fixture(scope="module")
def bare(scenario_of):
    """Return a function from a plan to a program of 8 steps whose computation is one backward.

    All takes no time but one push and one pull a step, a tick each, and that backward:
    `work` ticks by (step, replica).
    """

    def made(staleness, work):
        steps, dp = work.shape
        s = scenario_of(
            plan={"dp": dp, **SERVERS, "staleness": staleness}, batch=dp,
            run={"num_steps": steps, "detail": "stage"},
        )  # fmt: skip
        program = lower(s)
        ticks = np.zeros((len(program.rank), dp), np.int64)
        for name in ("push", "pull"):
            ticks[named(program, name)] = 1
        backward = np.flatnonzero(program.action == ACTION_CODE["B"])
        for step in range(steps):
            ticks[backward[program.step[backward] == step][0]] = work[step]
        return s, program, ticks

    return made


def ends(program, timeline):
    """Return (steps, replicas): when each replica ended each step."""
    return Result(program, timeline).rank_step_ends.max(axis=1)


def by_hand(work, staleness):
    """Return when each replica ends each step, from the words alone.

    It works, pushes for a tick, waits until all have pushed the step `staleness` before, and pulls
    for a tick.
    """
    steps, dp = work.shape
    pushed, done = np.zeros((2, steps, dp), np.int64)
    for k in range(steps):
        before = done[k - 1] if k else np.zeros(dp, np.int64)
        pushed[k] = before + work[k] + 1
        waits = pushed[k - staleness].max() if k >= staleness else 0
        done[k] = np.maximum(pushed[k], waits) + 1
    return done


# 10 ticks of work, 1 of push, 1 of pull: 12 a step, whatever the bound.
@pytest.mark.parametrize("staleness", [0, 1, 3, 100])
def test_identical_ranks_take_their_work_and_their_own_exchange(bare, staleness):
    _, program, ticks = bare(staleness, np.full((8, 4), 10))
    found = ends(program, run(program, ticks))
    assert found.T.tolist() == [[12 * k for k in range(1, 9)]] * 4


# The slow rank takes 22 a step and pushes step k at 22k + 21; the others take 12 alone. Bound 2:
# step k may pull when step k-2 is pushed. Step 3: ready at 47, pushed at 43: no wait, done at 48.
# Step 4: ready at 59, pushed at 65: done at 66, and from there on every 22.
def test_a_slow_rank_holds_the_others_back_only_at_the_bound(bare):
    work = np.tile([10, 10, 10, 20], (8, 1))
    _, program, ticks = bare(2, work)
    found = ends(program, run(program, ticks))
    assert found[:, 3].tolist() == [22 * k for k in range(1, 9)]
    for fast in range(3):
        assert found[:, fast].tolist() == [12, 24, 36, 48, 66, 88, 110, 132]


# Without a bound that is felt, every rank has a pace of its own.
def test_a_bound_beyond_the_run_holds_nobody_back(bare):
    _, program, ticks = bare(8, np.tile([10, 20], (8, 1)))
    found = ends(program, run(program, ticks))
    assert found[-1].tolist() == [8 * 12, 8 * 22]
    assert not len(named(program, "barrier"))


# A hiccup of 30 ticks in one step of one rank: with a bound of 3 the others do not notice (they are
# 30 ticks, less than 3 steps of 12, ahead); with 0 they lose all of it.
@pytest.mark.parametrize(("staleness", "end"), [(0, 126), (3, 96)])
def test_a_short_delay_is_absorbed_by_the_bound(bare, staleness, end):
    work = np.full((8, 2), 10)
    work[3, 1] = 40
    _, program, ticks = bare(staleness, work)
    assert ends(program, run(program, ticks))[-1].tolist() == [end, 126]


WORK = (
    st.integers(2, 4)
    .flatmap(
        lambda dp: st.lists(
            st.lists(st.integers(0, 9), min_size=dp, max_size=dp), min_size=1, max_size=6
        )
    )
    .map(lambda rows: np.array(rows, np.int64))
)


@settings(max_examples=40, deadline=None)
@given(work=WORK, staleness=st.integers(0, 7))
def test_all_engines_end_steps_when_the_words_say(bare, work, staleness):
    _, program, ticks = bare(staleness, work)
    times = [run(program, ticks, engine) for engine in ENGINES]
    assert times[0] == times[1] == times[2]
    assert (ends(program, times[2]) == by_hand(work, staleness)).all()


@pytest.fixture(scope="module")
def large(scenario_of, llama):
    """Return a function from a staleness to a program with pipeline, tensor and many buckets."""

    def made(staleness, network="alpha-beta", dp=3):
        plan = {"dp": dp, "pp": 2, "tp": 2, **SERVERS, "bucket_size": 2e4, "servers": 2}
        return lower(
            scenario_of(
                model=llama, plan={**plan, "staleness": staleness},
                run={"num_steps": 3, "network": network}, batch=2 * dp,
            )
        )  # fmt: skip

    return made


def compute_rows(program):
    return np.flatnonzero(program.stream == program.streams.index("compute"))


# With pushes of 2 ticks and pulls of 3 against exchanges of 5, and work of any length on any rank:
# a pull that waits for all pushes is what the synchronous servers do.
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_no_staleness_is_the_synchronous_exchange(large, seed):
    timelines = []
    for staleness in (None, 0):
        program = large(staleness)
        rows, ticks = compute_rows(program), np.ones((len(program.rank), program.num_tiles), int)
        for name, length in (("push_pull", 5), ("push", 2), ("pull", 3), ("barrier", 0)):
            ticks[named(program, name)] = length
        drawn = np.random.default_rng(seed).integers(0, 40, (len(rows), program.num_tiles))
        ticks[rows] = drawn
        timelines.append([column[rows] for column in run(program, ticks).columns])
    assert (timelines[0][0] == timelines[1][0]).all()
    assert (timelines[0][1] == timelines[1][1]).all()


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), staleness=st.integers(0, 3))
def test_all_engines_agree_on_random_ticks_with_pipeline_and_tensor_parallelism(
    large, seed, staleness
):
    program = large(staleness)
    ticks = np.random.default_rng(seed).integers(0, 9, (len(program.rank), program.num_tiles))
    times = [run(program, ticks, engine) for engine in ENGINES]
    assert times[0] == times[1] == times[2]


@pytest.mark.parametrize("staleness", [0, 1, 9])
def test_all_engines_agree_when_pushes_share_links(large, cluster_of, staleness):
    program, cluster = large(staleness, "fluid", dp=4), cluster_of(4, 4)
    latency, traffic = contended(program, price(program, cluster), cluster)
    slow = np.flatnonzero(program.stream == program.streams.index("compute"))
    latency[slow, 1] *= 3
    times = [run(program, latency, engine, traffic=traffic) for engine in ENGINES]
    assert times[0] == times[1] == times[2]


# Time of the exchange. 4 nodes of one device, 10 GB/s and 10 us: a share of 1/3 of the server's
# adapter carries 1 GB in 0.3 s.
def test_a_push_has_its_share_of_the_servers_adapter(cluster_of):
    cluster, shape = cluster_of(num_nodes=4, devices=1), GroupShape(4, 4, 1)
    for name in ONE_SIDED:
        seconds = flow_seconds(Flow(name, 1e9, servers=1), shape, cluster)
        assert seconds == pytest.approx(0.30001, rel=1e-12)


def test_a_push_and_a_pull_take_as_long_as_the_synchronous_exchange(cluster_of):
    cluster, shape = cluster_of(num_nodes=2), GroupShape(16, 2, 8)
    both, push, pull = (
        flow_seconds(Flow(name, 1e9, servers=3), shape, cluster)
        for name in ("push_pull", *ONE_SIDED)
    )
    assert both == push + pull


def test_links_alone_set_the_rate_of_a_push_in_a_fluid_run(cluster_of):
    model = flow_model(Flow("push", 1e9, servers=1), GroupShape(4, 4, 1), cluster_of(4, 1))
    assert model == ("PUSH", 1e-5, np.inf)


# Rank 5 of ranks 2, 5, 8 with servers on 2 and 5: half of its gradients go to 2, half stay.
def test_a_push_goes_from_the_first_rank_to_all_servers_but_itself():
    pushed, pulled = (ORDERED[name](np.array([5, 2, 8]), 2) for name in ("PUSH", "PULL"))
    assert [column.tolist() for column in pushed] == [[5], [2], [0.5]]
    assert [column.tolist() for column in pulled] == [[2], [5], [0.5]]


def exchange_seconds(scenario_of, cluster, dp, staleness, servers=1, **run):
    """Return the scenario's result and the bytes that a rank exchanges a step."""
    s = scenario_of(
        plan={"dp": dp, **SERVERS, "servers": servers, "staleness": staleness},
        cluster=cluster, run={"network": "fluid", "num_steps": 6, **run},
    )  # fmt: skip
    program = lower(s)
    return sim.simulate(s), program.costs[program.cost[named(program, "push")[0]]].bytes


# 3 ranks push S bytes each into the server's adapter at once, then pull as much: 2 x 3 x S over its
# rate, and 10 us each way. The server's own rank has no bytes to move, so it waits at the bound.
def test_one_server_saturates_its_adapter(scenario_of, cluster_of):
    cluster = cluster_of(num_nodes=4, devices=1, nic={"bandwidth": 1e8})
    result, size = exchange_seconds(scenario_of, cluster, 4, 1)
    pushes = named(result.program, "push")
    took = (result.timeline.end - result.timeline.start)[pushes]
    far = result.program.rank[pushes] > 0
    assert took[far] / 1e12 == pytest.approx(np.full(far.sum(), 3 * size / 1e8 + 1e-5), rel=1e-9)
    assert (took[~far] == 0).all()
    exposed = result.breakdown.of("dp")[1:] / 1e12
    assert exposed == pytest.approx(np.full(3, 2 * (3 * size / 1e8 + 1e-5)), rel=1e-9)


# A server on each of 8 ranks: 7/8 of the bytes leave and enter each, twice: what a ring moves.
def test_servers_on_all_ranks_approach_the_ring(scenario_of, cluster_of):
    cluster = cluster_of(num_nodes=8, devices=1, nic={"bandwidth": 1e8, "latency": 0.0})
    result, size = exchange_seconds(scenario_of, cluster, 8, 1, servers=8)
    exposed = result.breakdown.of("dp") / 1e12
    assert exposed == pytest.approx(np.full(8, 2 * 7 / 8 * size / 1e8), rel=1e-6)


# A rank whose push meets nobody has the whole adapter: half of the time of the two before it.
def test_a_push_that_meets_nobody_has_the_link_alone(scenario_of, cluster_of):
    cluster = cluster_of(num_nodes=4, devices=1, nic={"bandwidth": 1e8, "latency": 0.0})
    s = scenario_of(
        plan={"dp": 4, **SERVERS, "staleness": 9}, cluster=cluster,
        run={"network": "fluid", "num_steps": 1},
    )  # fmt: skip
    program = lower(s)
    latency, traffic = contended(program, price(program, cluster), cluster)
    latency[compute_rows(program), 3] += 10**12  # rank 3 comes when all others are done
    timeline = run(program, latency, traffic=traffic)
    push = named(program, "push")[0]
    took = (timeline.end - timeline.start)[push]
    assert took[1] == pytest.approx(2 * took[3], rel=1e-6)


@pytest.mark.parametrize("staleness", [0, 1, 5])
def test_folding_changes_nothing(scenario_of, cluster_of, staleness):
    s = scenario_of(
        plan={"dp": 4, **SERVERS, "staleness": staleness}, cluster=cluster_of(4, 1),
        run={"num_steps": 3},
    )  # fmt: skip
    folded, whole = (sim.simulate(s, folded=folded) for folded in (True, False))
    assert folded.times.start.shape[1] == 1
    assert whole.times.start.shape[1] == 4
    assert folded.times == whole.times


# The report. Ranks of 12 and 22 ticks a step do 1/12 + 1/22 steps of half a batch a tick: a batch
# takes 2 / (1/12 + 1/22) = 264/17 ticks. The slow one is at 88 when the fast one ends at 96: its
# step from 66 to 88 counts, not a later one.
def test_ranks_of_different_pace_share_a_step_by_their_rates(bare):
    s, program, ticks = bare(8, np.tile([10, 20], (8, 1)))
    result = Result(program, run(program, ticks), s)
    first, last = (own[0].tolist() for own in result.own_windows)
    assert (first, last) == ([84, 66], [96, 88])
    assert result.step_time_s == pytest.approx(264 / 17 / 1e12, rel=1e-12)


def test_categories_of_every_rank_sum_to_its_own_step(bare):
    s, program, ticks = bare(8, np.tile([10, 20], (8, 1)))
    b = Result(program, run(program, ticks), s).breakdown
    assert b.window.tolist() == [12, 22]
    assert (b.ticks.sum(axis=0) == b.window).all()
    assert b.of("backward").tolist() == [10, 20]
    assert b.of("dp").tolist() == [2, 2]


# The fast rank works 10 of 22 ticks and pulls for 1. With a bound of 0 it waits 10 for the push of
# the slow one after its own push of 1. With a bound of 1 it waits for a push that is older than its
# own, which holds nothing up: 11 ticks of waiting.
@pytest.mark.parametrize(("staleness", "drain"), [(0, 10), (1, 11)])
def test_waiting_at_the_bound_is_bubble(bare, staleness, drain):
    s, program, ticks = bare(staleness, np.tile([10, 20], (8, 1)))
    result = Result(program, run(program, ticks), s)
    assert result.breakdown.window.tolist() == [22, 22]
    assert result.breakdown.of("drain").tolist() == [drain, 0]
    assert result.breakdown.of("dp").tolist() == [12 - drain, 2]
    assert result.step_time_s == pytest.approx(22e-12)


def test_the_parts_of_the_report_sum_to_the_step(scenario_of, cluster_of):
    cluster = cluster_of(num_nodes=4, devices=1, nic={"bandwidth": 1e8})
    result, _ = exchange_seconds(scenario_of, cluster, 4, 9)
    windows = result.breakdown.window
    assert windows.min() < windows.max()  # the server's own rank is quicker
    summary = result.summary
    assert sum(summary.shares.values()) == pytest.approx(1.0)
    assert summary.exposed_communication_s["dp"] == pytest.approx(
        summary.shares["dp"] * result.step_time_s
    )


def test_ranks_that_are_not_in_step_are_noted(scenario_of, cluster_of):
    cluster = cluster_of(num_nodes=4, devices=1, nic={"bandwidth": 1e8})
    apart, _ = exchange_seconds(scenario_of, cluster, 4, 9)
    level, _ = exchange_seconds(scenario_of, cluster, 4, 1, num_steps=12)
    assert any("replicas are not in step" in note for note in apart.notes)
    assert not any("replicas are not in step" in note for note in level.notes)


def test_the_report_says_that_gradients_are_stale():
    stale, plain = (
        str(
            sim.simulate(
                sim.load("gpt2-xl-ddp", {"plan.gradient_exchange": "parameter_server"} | o)
            )
        )
        for o in ({"plan.staleness": 3}, {})
    )
    assert "more than 3 step(s) ahead of the slowest, which in 2 step(s) it never is" in stale
    assert "steps are counted as if all were worth the same" in stale
    assert "worth the same" not in plain
    assert "a bucket's pull waits for all its pushes" in plain


# The program itself.
@pytest.mark.parametrize("detail", ["stage", "layer", "kernel"])
def test_every_bucket_is_pushed_then_pulled_by_each_rank_alone(scenario_of, detail):
    plan = {"dp": 2, "tp": 2, **SERVERS, "bucket_size": 1e4}
    sync, program = (
        lower(scenario_of(plan={**plan, **more}, run={"detail": detail}))
        for more in ({}, {"staleness": 1})
    )
    exchanges, pushes, pulls = (
        p.cost[named(p, name)] for p, name in
        ((sync, "push_pull"), (program, "push"), (program, "pull"))
    )  # fmt: skip
    sizes = [sync.costs[c].bytes for c in exchanges]
    assert len(sizes) > 2
    for costs in (pushes, pulls):
        assert [program.costs[c].bytes for c in costs] == sizes
    flat = program.flat
    for row in named(flat, "push"):
        group = flat.groups[flat.joint_group[flat.joint[row]]]
        assert group[0] == flat.rank[row]
        assert sorted(group) == [flat.rank[row] % 2, flat.rank[row] % 2 + 2]


# 3 steps and a bound of 1: pulls of steps 1 and 2 wait for pushes of steps 0 and 1.
def test_a_pull_waits_for_the_pushes_of_the_step_at_the_bound(scenario_of):
    program = lower(scenario_of(plan={"dp": 2, **SERVERS, "staleness": 1}, run={"num_steps": 3}))
    clocks = named(program, "barrier")
    assert program.step[clocks].tolist() == [1, 2]
    pushes, pulls = named(program, "push"), named(program, "pull")
    assert [program.predecessors(c).tolist() for c in clocks] == [[pushes[0]], [pushes[1]]]
    assert [program.predecessors(p).tolist() for p in pulls] == [[], [clocks[0]], [clocks[1]]]


@pytest.mark.parametrize("staleness", [0, 2])
def test_the_text_of_a_program_parses_back_and_is_accepted(large, staleness):
    text = format_program(large(staleness))
    assert "flow push bytes=" in text
    assert "flow pull bytes=" in text
    program = parse_program(text)
    assert format_program(program) == text
    assert check(program) is program


def test_a_push_with_ops_on_the_servers_is_refused(large):
    program = large(0).flat
    swapped = np.array([c.name == "push" for c in program.costs])
    costs = tuple(
        replace(c, name="all_reduce", servers=0) if swap else c
        for c, swap in zip(program.costs, swapped, strict=True)
    )
    with pytest.raises(ProgramError, match=r"joins ranks .* but has ops on"):
        check(replace(program, costs=costs))


def test_a_group_that_lists_a_server_twice_is_refused(large):
    program = large(0).flat
    groups = program.groups
    group = program.joint_group[program.joint[named(program, "push")[0]]]
    ranks = groups.ranks.copy()
    ranks[groups.offset[group] + 2] = ranks[groups.offset[group] + 1]
    with pytest.raises(ProgramError, match="twice"):
        check(replace(program, groups=replace(groups, ranks=ranks)))


def test_a_push_on_another_rank_than_its_groups_first_is_refused(large):
    program = large(0).flat
    groups = program.groups
    group = program.joint_group[program.joint[named(program, "push")[0]]]
    ranks = groups.ranks.copy()
    at = groups.offset[group]
    ranks[[at, at + 1]] = ranks[[at + 1, at]]
    with pytest.raises(ProgramError, match="but has ops on"):
        check(replace(program, groups=replace(groups, ranks=ranks)))


@pytest.mark.parametrize(
    ("plan", "complaint"),
    [
        (
            {"dp": 4, "staleness": 2},
            "staleness: 2 is for gradient_exchange 'parameter_server', not",
        ),
        ({"dp": 1, **SERVERS, "staleness": 2}, "staleness: 2 needs ranks to be ahead of"),
        ({"dp": 4, **SERVERS, "staleness": -1}, "staleness: -1 must be at least 0"),
        ({"dp": 4, **SERVERS, "staleness": 1.5}, "staleness: 1.5 is not a whole number"),
    ],
)
def test_a_plan_refuses_a_staleness_that_cannot_be(plan, complaint):
    with pytest.raises(DescriptionError, match=complaint):
        Plan(**plan)


def test_stale_gradients_of_a_tied_embedding_over_stages_are_refused(scenario_of, gpt, llama):
    plan = {"dp": 2, "pp": 2, **SERVERS, "staleness": 1}
    with pytest.raises(DescriptionError, match="tied embedding after the exchange"):
        scenario_of(model=gpt, plan=plan)
    assert scenario_of(model=llama, plan=plan).plan.staleness == 1
    assert scenario_of(model=gpt, plan={**plan, "pp": 1}).plan.staleness == 1
