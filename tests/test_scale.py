"""Large runs: folding, many sets of durations, memory that is asked for first, interrupts."""

import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import simulator as sim
from simulator import budget
from simulator.engine import Folding, fold, run, run_many
from simulator.errors import DescriptionError, ProgramError
from simulator.hardware import price
from simulator.kernels import jit
from simulator.lower import lower, lower_schedule
from simulator.schedules import actions_of


def test_identical_replicas_fold_to_one_and_say_so(scenario_of):
    result = sim.simulate(scenario_of(plan={"dp": 2, "pp": 2, "tp": 2}))
    assert result.times.start.shape[1] == 1
    assert result.notes[-1] == "folded dp 2 -> 1, tp 2 -> 1: ranks identical"


def test_a_run_that_is_not_folded_keeps_every_replica(scenario_of):
    result = sim.simulate(scenario_of(plan={"dp": 2, "pp": 2, "tp": 2}), folded=False)
    assert result.times.start.shape[1] == 4
    assert not any("folded" in note for note in result.notes)


# One tile of a tp group is slower: tp does not fold, dp does, for it is slow on both replicas.
def test_an_axis_along_which_ranks_differ_does_not_fold(scenario_of):
    s = scenario_of(plan={"dp": 2, "tp": 2})
    program = lower(s)
    ticks = np.repeat(price(program, s.cluster), 4, axis=1)
    ticks[:, [1, 3]] += 5  # tiles count dp x tp
    folding = fold(program, ticks)
    assert folding.reason == "folded dp 2 -> 1: ranks identical"
    assert folding.column_of_tile.tolist() == [0, 1, 0, 1]
    whole = run(program, ticks, folding=Folding.none(program))
    assert run(program, ticks, folding=folding) == whole


def test_the_reference_engine_does_not_say_that_it_folded(scenario_of):
    result = sim.simulate(scenario_of(plan={"dp": 2, "pp": 2, "tp": 2}), engine="reference")
    assert not any("folded" in note for note in result.notes)


def test_a_report_is_the_same_folded_and_whole(scenario_of):
    s = scenario_of(plan={"dp": 2, "pp": 2, "tp": 2})
    one, all_ranks = (sim.simulate(s, folded=folded).to_dict() for folded in (True, False))
    del one["notes"], all_ranks["notes"]
    assert one == all_ranks


# Lowering lists one replica, however many there are: op count grows, rows do not.
def test_a_thousand_replicas_are_as_many_rows_as_one(scenario_of, cluster_of):
    few, many = (
        lower(scenario_of(plan={"pp": 2, "dp": dp}, cluster=cluster_of(dp, 2))) for dp in (2, 1000)
    )
    assert len(few.rank) == len(many.rank)
    assert len(many) == 500 * len(few)


def test_detail_stage_takes_as_long_as_detail_layer(scenario_of):
    plan = {"dp": 2, "pp": 2, "tp": 2, "bucket_size": 1e5, "recompute": "full"}
    layer, stage = (
        sim.simulate(scenario_of(plan=plan, run={"detail": detail}))
        for detail in ("layer", "stage")
    )
    assert len(stage.tiled.rank) < len(layer.tiled.rank) / 2
    # ticks are rounded once an op: half a tick for each of them at most
    assert stage.step_time_s == pytest.approx(layer.step_time_s, abs=1e-12 * len(layer.tiled.rank))
    assert stage.peak_memory_bytes == pytest.approx(layer.peak_memory_bytes, rel=1e-12)
    for name, share in layer.summary.shares.items():
        assert stage.summary.shares[name] == pytest.approx(share, abs=1e-6)


@pytest.mark.parametrize("compiled", [False, True])
def test_sets_of_durations_run_as_each_alone(scenario_of, compiled, monkeypatch):
    if compiled:
        monkeypatch.setattr(jit, "SMALL", 0)
    s = scenario_of(plan={"dp": 2, "pp": 2, "tp": 2})
    program = lower(s)
    base = price(program, s.cluster)
    rng = np.random.default_rng(7)
    ticks = (base[None] * rng.uniform(1, 2, (5, len(program.rank), 4))).astype(np.int64)
    assert list(run_many(program, ticks)) == [run(program, one) for one in ticks]


def test_sets_of_durations_of_a_flat_program_run_as_each_alone():
    program = lower_schedule(actions_of("1F1B", 3, 4))
    ticks = price(program)[None] * np.arange(1, 5)[:, None]
    assert list(run_many(program, ticks)) == [run(program, one) for one in ticks]


def test_sets_in_which_tiles_agree_run_one_tile(scenario_of):
    s = scenario_of(plan={"dp": 2, "tp": 2})
    program = lower(s)
    ticks = price(program, s.cluster)[None] * np.arange(1, 4)[:, None, None]
    times = list(run_many(program, ticks))
    assert [t.start.shape[1] for t in times] == [1, 1, 1]
    assert times == [run(program, one) for one in ticks]


def test_sets_of_the_wrong_size_are_refused():
    program = lower_schedule(actions_of("1F1B", 3, 4))
    with pytest.raises(ProgramError, match="do not fit sets"):
        next(run_many(program, np.zeros((2, 3), np.int64)))


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        (
            {"run.num_steps": 10**9},
            r"a run of 1,000,000,000 steps .* would need about .* of memory",
        ),
        ({"run.global_batch_size": 2 * 10**9}, "a schedule of 1,000,000,000 microbatches"),
    ],
)
def test_what_is_too_large_is_refused_with_the_number(changes, part):
    with pytest.raises(DescriptionError, match=part):
        sim.simulate(sim.load("gpt2-xl-1f1b", changes))


def test_a_timeline_that_does_not_fit_is_refused(monkeypatch, scenario_of):
    monkeypatch.setattr(budget, "available_bytes", lambda: 0.0)
    s = scenario_of(plan={"dp": 1000, "pp": 2}, batch=1_000_000)
    with pytest.raises(DescriptionError, match=r"running .* ops would need about .* 0 B are avail"):
        sim.simulate(s, folded=False)


def test_small_calls_are_interpreted_until_many_have_been_made(monkeypatch):
    calls = []
    kernel = jit.Kernel(lambda x: x + 1)
    monkeypatch.setattr(jit.Kernel, "visited", 0)
    monkeypatch.setattr(jit, "_compiled", lambda _function: lambda x: calls.append(x) or -x)
    assert kernel(jit.SMALL - 1, 3) == 4
    assert kernel(2, 3) == -3
    assert kernel(1, 4) == -4  # and from then on
    assert calls == [3, 4]


def test_ctrl_c_ends_a_run_cleanly(tmp_path):
    command = [sys.executable, "-m", "simulator", "run", "llama-3-8b-3d", "--engine", "reference",
               "--set", "run.num_steps=8", "--json", "out.json"]  # fmt: skip
    running = subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    time.sleep(3.0)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "Traceback" not in err
    assert (out, list(tmp_path.iterdir())) == ("", [])


def test_the_largest_scenario_reports_every_rank():
    result = sim.simulate(sim.load("llama-3-405b-16384gpu"), folded=False)
    assert len(result.tiled) > 20_000_000
    assert len(result.breakdown.window) == 16_384
    assert (result.breakdown.ticks.sum(axis=0) == result.breakdown.window).all()
