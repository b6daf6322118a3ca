"""Operations over days: hand arithmetic, two engines, and what must hold whatever fails."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import simulator as sim
from simulator.describe import catalog
from simulator.operate import operate
from simulator.operate.best import best_interval
from simulator.operate.draw import ONSET, Happenings, happenings
from simulator.operate.interval import daly, lost_share, young
from simulator.operate.job import (
    CATEGORIES,
    NANOSECONDS,
    NO_NODE,
    SLOW_NODE,
    Job,
    interval_seconds,
    saving,
    state_bytes,
)
from simulator.operate.run import run_all, run_all_reference

HOUR = 3600.0
SAVE = {"interval": "10 min", "write_time": "60 s"}


def described(components=(), checkpoint=SAVE, scenario="gpt2-xl-ddp", **others):
    """A scenario of 8 devices in one node with operations; its steps take a second."""
    table = {"step_time": "1 s", "checkpoint": checkpoint, "components": list(components), **others}
    return sim.load(scenario, {"operations": table})


def failing(mtbf, per="cluster", takes_node=False, **others):
    return {"name": "part", "mtbf": mtbf, "per": per, "takes_node": takes_node, **others}


PLAIN = Job(
    duration=1000, steps=(10,), slow_steps=(20,), interval=5, asynchronous=False, blocked=4,
    drain=0,
    restore=3, restart=6, rescheduling=7, spares=0, replicas=(4, 0, 0, 0, 0),
    names=("bug", "part"), detection=(2, 5), repair=(NO_NODE, 100),
)  # fmt: skip
"""50 ticks of steps and a checkpoint of 4; a bug takes no node, a part takes one for 100 ticks."""


@pytest.fixture(params=[run_all, run_all_reference], ids=["compiled", "reference"])
def after(request):
    """Run a job in which something happens at stated ticks; return its times and its progress."""

    def run(job, *breaks):
        ticks, what = (
            np.array(x, np.int64) for x in (zip(*breaks, strict=True) if breaks else ((), ()))
        )
        offset = np.array([0, len(breaks)], np.int64)
        out = request.param(job, Happenings(offset, ticks, what))
        times = {c: t for c, t in zip(CATEGORIES, out.ticks[0].tolist(), strict=True) if t}
        return times, out.progress[0].tolist()

    return run


def but(**changes):
    return dataclasses.replace(PLAIN, **changes)


# --- one thing at a time, by hand ---------------------------------------------------------------


def test_without_failures_only_checkpoints_take_time(after):
    # 18 x (50 + 4) = 972, then 2 steps and 8 ticks of a third
    assert after(PLAIN) == ({"training": 928, "checkpoint": 72}, [92, 92 * 4, 18])


def test_a_failure_undoes_the_steps_since_the_last_checkpoint(after):
    # fails at 93, 39 ticks after the checkpoint at 50 to 54; found at 95, started 101, read 104
    times, (steps, _, saved) = after(but(duration=110), (93, 0))
    assert times == {
        "training": 50 + 6, "checkpoint": 4, "lost work": 39, "detection": 2, "restart": 6,
        "restore": 3,
    }  # fmt: skip
    assert (steps, saved) == (5, 1)


def test_a_failure_during_a_checkpoint_leaves_it_unwritten(after):
    times, (steps, _, saved) = after(but(duration=60), (53, 0))
    assert times == {"lost work": 50, "checkpoint": 3, "detection": 2, "restart": 5}
    assert (steps, saved) == (0, 0)


def test_a_failure_during_recovery_begins_it_anew(after):
    # found at 12, fails again while it starts at 15, found at 17, started 23, read 26
    times, _ = after(but(duration=30), (10, 0), (15, 0))
    assert times == {"lost work": 10, "detection": 4, "restart": 3 + 6, "restore": 3, "training": 4}


def test_without_a_spare_the_job_waits_for_the_repair(after):
    # the part fails at 10 and is found at 15; its node is back at 110
    times, _ = after(but(duration=130), (10, 1))
    assert times == {
        "lost work": 10, "detection": 5, "waiting for repair": 95, "rescheduling": 7, "restart": 6,
        "restore": 3, "training": 4,
    }  # fmt: skip


def test_with_a_spare_it_does_not_wait(after):
    times, _ = after(but(duration=40, spares=1), (10, 1))
    assert times == {"lost work": 10, "detection": 5, "rescheduling": 7, "restart": 6,
                     "restore": 3, "training": 9}  # fmt: skip


def test_what_fails_while_the_job_waits_takes_a_node_but_stops_nothing(after):
    # nodes are back at 110 and 150
    times, _ = after(but(duration=150), (10, 1), (50, 1))
    assert times == {"lost work": 10, "detection": 5, "waiting for repair": 135}


def test_an_elastic_job_goes_on_with_fewer_replicas_and_grows_at_a_checkpoint(after):
    # 4 replicas on 4 nodes; from 31 on 3 of 4 train: steps count for 10 x 3 // 4 = 7 ticks each.
    # The node is back at 110: five steps to 81, saved at 85, five more to 135, saved at 139, then
    # it is placed, started and read back at 155 and runs two steps and a tick with 4.
    job = but(duration=176, replicas=(4, 3, 2, 1, 0))
    times, (steps, shares, saved) = after(job, (10, 1))
    assert times == {
        "lost work": 10, "detection": 5, "rescheduling": 14, "restart": 12, "restore": 6,
        "training": 10 * 7 + 21, "fewer replicas": 10 * 3, "checkpoint": 8,
    }  # fmt: skip
    assert (steps, shares, saved) == (12, 10 * 3 + 2 * 4, 2)


def test_an_asynchronous_checkpoint_holds_training_back_for_the_snapshot_only(after):
    times, (_, _, saved) = after(but(duration=109, asynchronous=True, blocked=4, drain=30))
    assert times == {"training": 101, "checkpoint": 8}
    assert saved == 2


def test_a_write_longer_than_the_interval_holds_training_back(after):
    # snapshot at 50 to 54, written at 134; the next one, due at 104, waits 30 ticks for that
    times, _ = after(but(duration=140, asynchronous=True, blocked=4, drain=80))
    assert times == {"training": 100 + 2, "checkpoint": 4 + 30 + 4}


def test_a_failure_before_a_snapshot_is_written_goes_back_to_the_one_before(after):
    # snapshots at 50 to 54, written at 84, and 104 to 108, which would be written at 138
    times, (steps, _, _) = after(but(duration=140, asynchronous=True, drain=30), (137, 0))
    assert times["lost work"] == 50 + 29
    assert steps == 5
    later, (steps, _, _) = after(but(duration=141, asynchronous=True, drain=30), (139, 0))
    assert later["lost work"] == 31
    assert steps == 10


# Steps of 10 and 30 ticks by turns, from the second time on: 30, 10, 30, 10, 30, a checkpoint of 4
# at 110. What breaks at 119, in the 10 after it, undoes nothing but 5 of these; detection takes 2,
# restart 6, restore 3; the step of 10 that was interrupted is run again, 26 of the next one.
def test_steps_take_the_times_of_samples_by_turns():
    job = but(steps=(10, 30), slow_steps=(20, 60), duration=166)
    breaks = Happenings(np.array([0, 1]), np.array([119]), np.array([0]))
    for run in (run_all, run_all_reference):
        out = run(job, breaks, np.array([1]))
        times = {c: t for c, t in zip(CATEGORIES, out.ticks[0].tolist(), strict=True) if t}
        assert times == {"training": 146, "checkpoint": 4, "lost work": 5, "detection": 2,
                         "restart": 6, "restore": 3}  # fmt: skip
        assert out.progress[0].tolist() == [5 + 1, 4 * 6, 1]


def test_steps_are_slow_from_the_onset_until_the_slow_node_is_found(after):
    # the step that runs at the onset, 15, ends in its time; from 20 on steps take 20. Found at 45,
    # in the midst of the second: the node is replaced without being searched for.
    job = but(duration=70, names=("bug", SLOW_NODE), detection=(2, 0), spares=1)
    times, (steps, _, _) = after(job, (15, ONSET), (45, 1))
    assert times == {"lost work": 45, "rescheduling": 7, "restart": 6, "restore": 3, "training": 9}
    assert steps == 0
    times, _ = after(but(duration=61), (15, ONSET))
    assert times == {"training": 41, "slow node": 20}


# --- the two engines, and what must always hold -------------------------------------------------


@st.composite
def histories(draw):
    """A job of few ticks, so that things coincide, and what happens to it."""
    short = st.integers(0, 6)
    steps, nodes, replicas = (
        draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)),
        draw(st.integers(1, 5)),
        draw(st.integers(1, 4)),
    )
    left = [(nodes - gone) * replicas // nodes for gone in range(nodes + 1)]
    names = [f"part {k}" for k in range(draw(st.integers(1, 3)))]
    repair = [draw(st.just(NO_NODE) | st.integers(0, 40)) for _ in names]
    detection = [draw(short) for _ in names]
    parts, is_asynchronous = len(names), draw(st.booleans())
    job = Job(
        duration=draw(st.integers(1, 300)), steps=tuple(steps),
        slow_steps=tuple(step + draw(short) for step in steps),
        interval=draw(st.integers(1, 6)), asynchronous=is_asynchronous, blocked=draw(short),
        drain=draw(st.integers(0, 30)) if is_asynchronous else 0, restore=draw(short),
        restart=draw(short), rescheduling=draw(short), spares=draw(st.integers(0, 3)),
        replicas=tuple(left if draw(st.booleans()) else [left[0], *[0] * nodes]),
        names=(*names, SLOW_NODE), detection=(*detection, 0),
        repair=(*repair, draw(st.integers(0, 40))),
    )  # fmt: skip
    ticks = st.integers(1, job.duration)
    breaks = [
        (draw(ticks), draw(st.integers(0, parts - 1))) for _ in range(draw(st.integers(0, 20)))
    ]
    for tick in draw(st.lists(ticks, max_size=3)):
        breaks += [(tick, ONSET), (tick + 7, parts)]
    breaks = sorted(one for one in breaks if one[0] < job.duration)
    columns = np.array(breaks, np.int64).reshape(-1, 2)
    breaks = Happenings(np.array([0, len(breaks)]), columns[:, 0].copy(), columns[:, 1].copy())
    return job, breaks, np.array([draw(st.integers(0, len(steps) - 1))])


@settings(max_examples=150, deadline=None)
@given(history=histories())
def test_the_engines_agree_to_the_tick_and_time_adds_up_to_the_wall_clock(history):
    job, *happens = history
    fast, slow = run_all(job, *happens), run_all_reference(job, *happens)
    for ours, reference in zip(fast, slow, strict=True):
        assert ours.tolist() == reference.tolist()
    assert fast.ticks.sum() == job.duration
    assert (fast.ticks >= 0).all()


AGEING = {
    "exponential": {}, "weibull": {"shape": 0.7},
    "burn-in": {"burn_in_factor": 5.0, "burn_in_time": "2 days"},
}  # fmt: skip


@pytest.mark.parametrize("kind", AGEING)
def test_engines_agree_on_a_described_scenario(kind):
    part = failing("20 h", "device", takes_node=True, distribution=kind, **AGEING[kind])
    slow = {"mtbf": "5 days", "slowdown": 1.3, "detection_time": "2 h"}
    s = described([part], days=3, spare_nodes=1, slow_node=slow, step_time="30 s",
                  detection_time="3 min", restart_time="5 min", repair_time="3 h")  # fmt: skip
    fast, slow = (operate(s, seeds=5, engine=engine) for engine in ("compiled", "reference"))
    assert fast.to_dict() == slow.to_dict()
    assert str(fast) == str(slow)


def test_the_same_seed_gives_the_same_bytes_and_more_seeds_move_none():
    s = described([failing("5 h")], days=5)
    few, many = operate(s, seeds=3), operate(s, seeds=8)
    assert str(few) == str(operate(s, seeds=3))
    assert many.outcome.ticks[:3].tolist() == few.outcome.ticks.tolist()
    later = operate(sim.load("gpt2-xl-ddp", {
        "operations": {**raw([failing("5 h")], days=5), "seed": 2}}), seeds=1)  # fmt: skip
    assert later.outcome.ticks[0].tolist() == few.outcome.ticks[2].tolist()


def raw(components, **others):
    return {"step_time": "1 s", "checkpoint": SAVE, "components": components, **others}


def test_a_component_that_is_added_at_the_end_moves_no_other():
    one, other = failing("5 h"), {**failing("9 h"), "name": "another"}
    alone, both = (operate(described(parts, days=5), seeds=4) for parts in ([one], [one, other]))
    drawn = [happenings(o.operations, 8, 1, range(4)) for o in (alone, both)]
    assert drawn[0].tick.tolist() == drawn[1].tick[drawn[1].what == 0].tolist()


def test_a_longer_run_begins_with_the_failures_of_a_shorter_one():
    first, longer = (
        happenings(described([failing("5 h")], days=days).operations, 8, 1, range(1)).tick.tolist()
        for days in (2, 4)
    )
    assert longer[: len(first)] == first


@settings(max_examples=15, deadline=None)
@given(hours=st.floats(2, 50), factor=st.floats(1.5, 5))
def test_more_failures_never_give_more_goodput(hours, factor):
    often, seldom = (
        operate(described([failing(f"{h} h")], days=20, restart_time="2 min"), seeds=40)
        for h in (hours, hours * factor)
    )
    assert often.goodput.mean() < seldom.goodput.mean()


# --- what is drawn ------------------------------------------------------------------------------


def times_of(part, days=100, devices=1000, seeds=200):
    ops = described([part], days=days).operations
    return happenings(ops, devices, 1, range(seeds)).tick / NANOSECONDS / 86400


def test_failures_of_many_things_are_as_many_as_their_rate_says():
    # 1000 devices of 2,400 h over 100 days of 24 h: 1,000 failures; over 200 samples +- 0.5 %
    assert len(times_of(failing("2400 h", "device"))) / 200 == pytest.approx(1000, rel=0.01)


def test_a_count_multiplies_what_can_fail():
    assert len(times_of(failing("2400 h", "device", count=2))) / 200 == pytest.approx(
        2000, rel=0.01
    )


def test_weibull_of_shape_one_is_exponential():
    part = failing("2400 h", "device", distribution="weibull", shape=1.0)
    assert len(times_of(part)) / 200 == pytest.approx(1000, rel=0.01)


@pytest.mark.parametrize(("shape", "mean"), [(0.5, 10_000), (3.0, 100)])
def test_failures_follow_the_weibull_distribution(shape, mean):
    # scale = mean / gamma(1 + 1/k); of those that fail within 50 days some fail again, fewer than
    # the square of their share
    part = failing(f"{mean} d", "device", distribution="weibull", shape=shape)
    scale = mean / math.gamma(1 + 1 / shape)
    within = 1 - math.exp(-((50 / scale) ** shape))
    found = len(times_of(part, days=50, seeds=400)) / 400
    assert within * 1000 * 0.98 <= found <= (within + within**2) * 1000 * 1.02


def test_things_that_wear_out_fail_again_and_again_at_their_mean():
    # shape 20 fails every 10 days within a few hours: 10 times in 104 days
    part = failing("10 d", "device", distribution="weibull", shape=20.0)
    assert len(times_of(part, days=104, devices=10)) / 200 == pytest.approx(100, rel=0.01)


def test_burn_in_adds_failures_at_the_start():
    # rate 1000 / 100 d; five times as high at first, e-folding in 10 d: 4 x 10 d x 10 / d more
    part = failing("100 d", "device", distribution="burn-in", burn_in_factor=5.0,
                   burn_in_time="10 d")  # fmt: skip
    times = times_of(part)
    assert len(times) / 200 == pytest.approx(1000 + 400 * (1 - math.exp(-10)), rel=0.01)
    early = 100 + 400 * (1 - math.exp(-1))  # in the first 10 days
    assert (times < 10).sum() / 200 == pytest.approx(early, rel=0.02)


# --- checkpoints --------------------------------------------------------------------------------


def test_young_takes_the_root_of_twice_cost_times_mtbf():
    assert young(60, 3 * HOUR) == pytest.approx(1138.4, abs=0.1)
    assert young(5, 3 * HOUR) == pytest.approx(328.6, abs=0.1)


def test_young_says_what_is_lost():
    # 60 / 1138 + 1138 / 21,600 = 5.27 % + 5.27 %
    assert lost_share(young(60, 3 * HOUR), 60, 3 * HOUR) == pytest.approx(0.1054, abs=1e-4)
    assert lost_share(young(5, 3 * HOUR), 5, 3 * HOUR) == pytest.approx(0.0304, abs=1e-4)


def test_daly_corrects_young_and_gives_up_beyond_twice_the_mtbf():
    # C / 2M = 60 / 21600 = 0.002778: 1138.4 (1 + 0.05270 / 3 + 0.000309) - 60 = 1098.8
    assert daly(60, 3 * HOUR) == pytest.approx(1098.8, abs=0.1)
    assert daly(7200, 3600) == 3600


def test_adam_state_is_twelve_bytes_a_parameter():
    s = described(scenario="llama-3-8b-3d")
    assert state_bytes(s) == pytest.approx(96.4e9, rel=1e-3)


def test_muon_keeps_one_state_of_matrices_of_layers():
    # 32 layers of (4096 + 2 x 1024 + 4096) x 4096 and 3 x 4096 x 14336 are 6.98e9: 4 bytes less of
    # each, whatever the plan
    adam, muon = (
        state_bytes(sim.load("llama-3-8b-3d", {"run.optimizer": name}))
        for name in ("adamw", "muon")
    )
    assert adam - muon == 4 * 32 * ((2 * 4096 + 2 * 1024) * 4096 + 3 * 4096 * 14336)


def test_a_checkpoint_of_8b_takes_six_minutes_at_a_quarter_of_a_gigabyte_a_second():
    # 96.4 GB / 0.268 GB/s = 360 s; at 2 GB/s 48.2 s
    for bandwidth, seconds in (("0.2677 GB/s", 360), ("2 GB/s", 48.2)):
        s = described(checkpoint={"write_bandwidth": bandwidth}, scenario="llama-3-8b-3d")
        assert saving(s, s.operations).blocked == pytest.approx(seconds, rel=1e-3)


def test_an_asynchronous_one_holds_back_for_the_copy_to_the_hosts():
    # 96.4 GB / devices / 25 GB/s; of 8 devices 0.482 s
    save = {"write_bandwidth": "2 GB/s", "asynchronous": True, "snapshot_bandwidth": "25 GB/s"}
    s = described(checkpoint=save, scenario="llama-3-8b-3d")
    blocked = saving(s, s.operations).blocked
    assert blocked * s.cluster.world_size / 8 == pytest.approx(0.482, rel=1e-3)


def test_an_interval_is_whole_steps():
    s = described([failing("3 h")], {"interval": "young", "write_time": "60 s"}, step_time="100 s")
    assert interval_seconds(s, s.operations) == pytest.approx(1138.4, abs=0.1)
    assert operate(s, days=1, seeds=1).job.interval == 11


def test_simulation_finds_youngs_and_dalys_interval_where_their_assumptions_hold():
    s = described([failing("3 h")], {"interval": "young", "write_time": "60 s"}, days=60)
    best = best_interval(operate(s, seeds=200))
    assert best.best == pytest.approx(best.young, rel=0.05)
    assert best.best == pytest.approx(best.daly, rel=0.05)


def test_simulation_loses_what_young_says():
    s = described([failing("3 h")], {"interval": "young", "write_time": "60 s"}, days=60)
    goodput = operate(s, seeds=200).goodput.mean()
    # to first order 10.5 %; the exact loss is a little lower, for failures hit checkpoints too
    assert 1 - goodput == pytest.approx(0.1054, abs=0.01)


def test_an_asynchronous_job_had_better_save_less_often_than_young_says():
    # only 1 s is held back, so Young says sqrt(2 x 1 x 10,800) = 147 s; but until a write of 300 s
    # has ended a failure goes back to the checkpoint before, and sooner than that none can begin
    save = {
        "interval": "young",
        "asynchronous": True,
        "write_time": "300 s",
        "snapshot_time": "1 s",
    }
    o = operate(described([failing("3 h")], save, days=60), seeds=100)
    best = best_interval(o)
    assert best.young == pytest.approx(147, abs=0.1)
    assert best.best == pytest.approx(300, rel=0.1)
    assert o.job.interval == 300  # so that the rule is not followed below the write


def test_a_checkpoint_that_holds_nothing_back_follows_the_one_before():
    save = {"interval": "daly", "asynchronous": True, "write_time": "300 s",
            "snapshot_time": "0 s"}  # fmt: skip
    assert operate(described([failing("3 h")], save, days=1), seeds=1).job.interval == 300


def test_things_that_fail_young_want_fewer_checkpoints_than_the_mean_says():
    # 2,000 things of shape 0.5 and mean 250 days: one in 3 h on average in the long run, but within
    # 60 days far more fail, early on
    part = failing("250 d", "device", distribution="weibull", shape=0.5, count=250)
    best = best_interval(operate(described([part], days=60), seeds=60))
    assert best.best < 0.95 * best.young


def test_waiting_is_as_likely_as_more_nodes_in_repair_than_spares():
    # 321 failures that take a node in 54 days, each for a day: 5.94 in repair on average, Poisson
    # (M/D/infinity). More than 4: 1 - e^-5.94 (1 + 5.94 + 17.6 + 34.9 + 51.9) = 70.7 %; the first
    # day is spared half of it
    changes = {"operations.step_time": "7.07 s", "operations.spare_nodes": 4}
    o = operate(sim.load("llama-3-405b-operations", changes), seeds=100)
    assert o.by_category()["waiting for repair"].mean() == pytest.approx(0.70, abs=0.02)


# --- the comparison with Llama 3 ----------------------------------------------------------------


def test_llama_3_keeps_more_than_nine_tenths_of_its_time():
    s = sim.load("llama-3-405b-operations", {"operations.step_time": "7.07 s"})
    o = operate(s, seeds=100)
    assert o.goodput.min() > 0.9
    assert o.interruptions.mean() == pytest.approx(419, rel=0.02)


def test_its_rates_are_the_published_counts():
    table = catalog.root() / "workloads/measured/llama3_interruptions.csv"
    rows = [line.split(",") for line in table.read_text(encoding="utf-8").splitlines()[1:]]
    counts = sorted(int(row[2]) for row in rows)
    ops = sim.load("llama-3-405b-operations").operations
    ours = sorted(round(54 * 24 * HOUR * c.number(16384, 2048) / c.mtbf) for c in ops.components)
    assert sum(ours) == sum(counts) == 419
    # seven kinds of hosts' parts of 2 or 3 each are one component of 14
    assert [n for n in ours if n not in counts] == [14]
