"""Schedules side by side on the same work."""

import json

import pytest

import simulator as sim
from simulator.errors import DescriptionError
from simulator.explore.schedules import compare_schedules
from simulator.schedules import SCHEDULES


@pytest.fixture(scope="module")
def compared():
    return compare_schedules(sim.load("llama-2-7b-pp8"))


def test_every_schedule_is_run_fastest_first(compared):
    names = {r.name.split()[0] for r in compared.ran}
    assert names == {name for name, known in SCHEDULES.items() if known.size is None}
    steps = [r.step_time_s for r in compared.ran]
    assert steps == sorted(steps)
    assert compared.refused == ()


def test_the_parts_of_a_step_are_all_of_it(compared):
    for r in compared.ran:
        assert r.work + r.exposed + r.bubble == pytest.approx(1.0)


def test_a_row_is_what_the_scenario_gives_alone(compared):
    alone = sim.simulate(sim.load("llama-2-7b-pp8", {"plan.schedule": "ZB-H1"})).summary
    (row,) = [r for r in compared.ran if r.name == "ZB-H1"]
    assert (row.step_time_s, row.bubble) == (alone.step_time_s, alone.bubble_fraction)
    assert row.device_memory_bytes == alone.device_memory_bytes


def test_all_schedules_that_keep_semantics_do_the_same_work(compared):
    work = [r.work * r.step_time_s for r in compared.ran if r.name not in ("PipeDream", "DualPipe")]
    assert max(work) / min(work) < 1.01


def test_more_memory_buys_less_bubble_within_a_family(compared):
    at = {r.name: r for r in compared.ran}
    for cheap, dear in (("1F1B", "ZB-H1"), ("ZB-H1", "ZB-H2"), ("V-Min", "V-Half"),
                        ("V-Half", "ZBVZeroBubble")):  # fmt: skip
        assert at[cheap].device_memory_bytes < at[dear].device_memory_bytes
        assert at[cheap].bubble > at[dear].bubble


def test_a_schedule_that_cannot_take_the_plan_is_listed_with_its_reason():
    compared = compare_schedules(sim.load("llama-2-7b-pp8", {"run.global_batch_size": 4}))
    reasons = dict(compared.refused)
    assert "microbatches" in reasons["DualPipe"]
    assert "left out: DualPipe: " in str(compared)


def test_messages_that_would_wait_for_ever_are_listed_with_their_ranks():
    compared = compare_schedules(sim.load("llama-2-7b-pp8", {"plan.p2p_overlap": False}))
    assert dict(compared.refused)["ZB-H2"] == (
        "deadlock between ranks [0, 1], as messages block: plan.p2p_overlap is false"
    )


def test_there_is_nothing_to_compare_without_a_pipeline():
    with pytest.raises(DescriptionError, match=r"plan\.pp is 1"):
        compare_schedules(sim.load("gpt2-xl-1gpu"))


def test_the_command_prints_writes_and_draws(trainsim, tmp_path):
    figure, document = tmp_path / "s.png", tmp_path / "s.json"
    code, out, _ = trainsim(
        "show", "schedules", "llama-2-7b-pp8", "--json", str(document), "--plot", str(figure)
    )
    assert code == 0
    assert out.splitlines()[1].split() == [
        "schedule", "step", "MFU", "work", "exposed", "bubble", "device", "memory",
    ]  # fmt: skip
    assert figure.stat().st_size > 10_000
    rows = json.loads(document.read_text())["schedules"]
    assert rows[0]["step_time_s"] == min(r["step_time_s"] for r in rows)
