"""Two runs side by side: differences are exact, add up, and are what really changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kineto_traces import Rank

from simulator import load, simulate, simulate_schedule
from simulator.describe.cost import Cost
from simulator.explore.compare import Comparison, Side, compare
from simulator.explore.compare.inputs import collapsed
from simulator.explore.compare.plot import comparison_figure
from simulator.explore.compare.side import rounded
from simulator.explore.compare.text import NUMBERS, comparison_dict


def bare(microbatches: int, **more: Any) -> Side:
    return Side.of_result(simulate_schedule("1F1B", stages=4, microbatches=microbatches, **more))


def by_name(changes: Any) -> dict[str, tuple[float | None, float | None]]:
    return {c.name: (c.a, c.b) for c in changes}


@pytest.fixture(scope="module")
def scenarios(scenario_of: Callable[..., Any], cluster_of: Callable[..., Any]) -> tuple[Side, Side]:
    cluster = cluster_of(2, 4)
    a = scenario_of(plan={"pp": 2, "tp": 2, "dp": 2}, cluster=cluster, batch=16)
    b = scenario_of(plan={"pp": 4, "dp": 2}, cluster=cluster, batch=16)
    return Side.of_result(simulate(a)), Side.of_result(simulate(b))


@pytest.fixture(scope="module")
def found(scenarios: tuple[Side, Side]) -> Comparison:
    return compare(*scenarios)


def test_more_microbatches_add_computation_and_no_bubble() -> None:
    # 8 and 16 microbatches of 1 + 2 s on 4 stages: 33 s and 57 s, 9 s of them bubble in both.
    c = compare(bare(8), bare(16))
    changed = {n: ((b or 0) - (a or 0)) / 1e12 for n, (a, b) in by_name(c.parts).items()}
    assert (changed["forward"], changed["backward"]) == (8.0, 16.0)
    assert sum(changed[n] for n in ("fill", "stall", "drain")) == 0
    assert c.verdict == (
        "B's step is 72.7% longer (57 s instead of 33 s): 24 s more computation"
    )  # fmt: skip


def test_a_step_that_is_more_than_twice_as_long_is_said_in_times() -> None:
    # 1 microbatch: (1 + 3) x 3 = 12 s beside 33 s.
    assert compare(bare(1), bare(8)).verdict.startswith("B's step takes 2.75 times as long")


def test_two_of_the_same_differ_in_nothing() -> None:
    c = compare(bare(8), bare(8))
    assert c.verdict == "B's step takes as long as A's, 33 s"
    assert {p.difference for p in c.parts} == {0}


@pytest.mark.parametrize("attribute", ["parts", "path"])
def test_differences_add_up_to_that_of_the_steps(found: Comparison, attribute: str) -> None:
    changes = getattr(found, attribute)
    assert found.difference == round(
        (found.b.result.step_time_s - found.a.result.step_time_s) * 1e12
    )
    assert sum(c.difference for c in changes) == found.difference != 0


@pytest.mark.parametrize("changes", [
    {"num_steps": 3}, {"num_steps": 3, "detail": "stage"}, {"network": "fluid"},
])  # fmt: skip
def test_parts_add_up_whatever_the_run(scenario_of: Callable[..., Any], changes: Any) -> None:
    s = scenario_of(plan={"pp": 2, "dp": 2}, run=changes)
    side = Side.of_result(simulate(s))
    assert sum(side.parts.values()) == side.step


def test_parts_of_replicas_that_are_not_in_step_add_up_too(scenario_of: Callable[..., Any]) -> None:
    plan = {"dp": 4, "gradient_exchange": "parameter_server", "servers": 1, "staleness": 1}
    side = Side.of_result(simulate(scenario_of(plan=plan, run={"num_steps": 4})))
    assert sum(side.parts.values()) == side.step
    assert side.path is None


@given(st.lists(st.integers(-(10**6), 10**12), min_size=1, max_size=8), st.integers(1, 1000))
def test_rounded_parts_are_whole_and_add_up(sums: list[int], ranks: int) -> None:
    parts = {str(i): value / ranks for i, value in enumerate(sums)}
    total = round(sum(sums) / ranks)
    found = rounded(parts, total)
    assert sum(found.values()) == total
    assert all(abs(found[name] - parts[name]) < 2 for name in parts)


def test_tensor_parallel_communication_that_is_gone_is_in_the_parts(found: Comparison) -> None:
    tp = by_name(found.parts)["tp"]
    assert tp[0] == round(found.a.result.summary.exposed_communication_s["tp"] * 1e12) > 0
    assert tp[1] == 0
    assert by_name(found.flows)["tp all_reduce"][1] == 0


def test_inputs_that_differ_are_listed_by_key_and_no_others(found: Comparison) -> None:
    assert {(i.key, i.a, i.b) for i in found.inputs} == {("plan.tp", 2, 1), ("plan.pp", 2, 4)}


def test_a_device_of_another_name_is_one_line_with_all_that_it_brings(
    scenario_of: Callable[..., Any], cluster_of: Callable[..., Any]
) -> None:
    fast = cluster_of(
        1, 1, device={"name": "faster", "memory": 2e12, "peak": {"fp32": 1e13, "bf16": 2e14}}
    )
    sides = [Side.of_result(simulate(s)) for s in (
        scenario_of(cluster=cluster_of(1, 1)), scenario_of(cluster=fast),
    )]  # fmt: skip
    inputs = compare(*sides).inputs
    assert {i.key for i in inputs} > {"cluster.node.device.memory", "cluster.node.device.peak.bf16"}
    (line,) = collapsed(inputs)
    assert (line.key, line.texts) == ("cluster.node.device", ("round device", "faster"))
    assert line.with_it == len(inputs) - 1


def test_a_value_is_written_with_its_unit() -> None:
    a = load("gpt2-xl-1gpu")
    b = load("gpt2-xl-1gpu", {"cluster.node.device.memory": "40 GB"})
    c = compare(Side.of_result(simulate(a)), Side.of_result(simulate(b)))
    assert next(i.texts for i in c.inputs if i.key.endswith("memory"))[1] == "40 GB"


def test_with_another_batch_the_verdict_is_of_tokens_a_second(
    scenario_of: Callable[..., Any],
) -> None:
    # Twice the microbatches on one device: twice the work in less than twice the time.
    sides = [Side.of_result(simulate(scenario_of(batch=batch))) for batch in (4, 8)]
    c = compare(*sides)
    rates = by_name(c.numbers)["tokens_per_s"]
    more = (rates[1] or 0) / (rates[0] or 1) - 1
    assert c.verdict.startswith(f"B trains {more:.1%} more tokens a second; its step ")


def test_a_side_that_does_not_fit_is_said_to_by_how_much(
    scenario_of: Callable[..., Any], cluster_of: Callable[..., Any]
) -> None:
    small = scenario_of(cluster=cluster_of(1, 1, device={"memory": 1e6}))
    c = compare(Side.of_result(simulate(scenario_of())), Side.of_result(simulate(small)))
    summary = c.b.result.summary
    assert c.verdict.endswith(
        f"; B does not fit by {(summary.device_memory_bytes - 1e6) / 1e6:.4g} MB a device"
    )


def test_memory_that_differs_by_a_tenth_of_the_device_is_in_the_verdict() -> None:
    # GPipe keeps all 32 microbatches where 1F1B keeps 4, and takes as long.
    sides = (Side.of_result(simulate(load(name))) for name in ("gpt2-xl-1f1b", "gpt2-xl-gpipe"))
    c = compare(*sides)
    assert c.verdict.startswith("B's step takes as long as A's, ")
    assert "; more memory on the fullest device (" in c.verdict
    assert "; less memory on the fullest device (" in compare(c.b, c.a).verdict


def test_memory_parts_add_up_to_what_is_allocated_on_the_fullest_rank(found: Comparison) -> None:
    for side in (found.a, found.b):
        peak = side.result.summary.peak_memory_bytes
        assert sum(side.memory.values()) == pytest.approx(peak, rel=1e-12)


def test_kernels_add_up_to_the_work_of_a_rank(found: Comparison) -> None:
    for side in (found.a, found.b):
        work = sum(side.parts[name] for name in ("forward", "backward", "optimizer")) / 1e12
        assert sum(side.ops.values()) == pytest.approx(work, rel=1e-9)


def test_energy_and_money_are_compared_where_both_state_them(
    scenario_of: Callable[..., Any], cluster_of: Callable[..., Any]
) -> None:
    priced = cluster_of(1, 2, device={"tdp": 400.0, "idle_power": 50.0})
    s = replace(scenario_of(plan={"dp": 2}, cluster=priced), cost=Cost(device_price=2.5 / 3600))
    side = Side.of_result(simulate(s))
    price = by_name(compare(side, side).numbers)["devices_usd_per_step"][0]
    assert price == pytest.approx(2 * side.result.step_time_s * 2.5 / 3600)


def test_every_number_has_a_name_in_words(found: Comparison) -> None:
    assert {n.name for n in found.numbers} <= NUMBERS.keys()


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    # Two ranks compute 100 us, sum gradients for 40 us, and update for 10 us.
    folder = tmp_path / "traces"
    folder.mkdir()
    for r in range(2):
        rank = Rank(r, 2)
        rank.kernel("gemm", 0, 100)
        rank.collective("allreduce", 100, 40)
        rank.range("Optimizer.step#Adam.step", 139, 12)
        rank.kernel("adam", 140, 10)
        rank.save(folder)
    return folder


def test_a_scenario_is_compared_with_a_measured_run(
    trainsim: Callable[..., Any], measured: Path
) -> None:
    code, out, err = trainsim("compare", measured, "gpt2-xl-ddp", "--json", "-")
    assert (code, err) == (0, "")
    document = json.loads(out)
    parts = {p["name"]: p["a"] / 1e6 for p in document["parts_ticks"] if p["a"]}
    assert parts == {"forward": 100, "optimizer": 10, "dp": 40}
    assert (
        sum(p["difference"] for p in document["parts_ticks"]) == (document["step_difference_ticks"])
    )
    # What only scenarios know is not compared.
    assert (document["critical_path_ticks"], document["inputs"]) == (None, [])
    assert (document["ops_s"], document["memory_bytes"]) == ([], [])


def test_two_measured_runs_are_compared_by_kernel(
    trainsim: Callable[..., Any], measured: Path, tmp_path: Path
) -> None:
    other = tmp_path / "slower"
    other.mkdir()
    for r in range(2):
        rank = Rank(r, 2)
        rank.kernel("gemm", 0, 130)
        rank.save(other)
    _, out, _ = trainsim("compare", measured, other, "--json", "-")
    ops = {o["name"]: o["difference"] for o in json.loads(out)["ops_s"]}
    assert ops == pytest.approx({"gemm": 30e-6, "adam": -10e-6})


def test_a_measured_side_says_what_its_parts_rest_on(
    trainsim: Callable[..., Any], measured: Path
) -> None:
    _, out, _ = trainsim("compare", measured, "gpt2-xl-ddp")
    assert "measured, 2 ranks" in out
    assert "what a measured op waited for is read off its times" in out


def test_an_axis_can_be_given_to_a_group_of_a_measured_run(
    trainsim: Callable[..., Any], measured: Path
) -> None:
    _, out, _ = trainsim("compare", measured, "gpt2-xl-ddp", "--group", "0=tp", "--json", "-")
    assert {p["name"] for p in json.loads(out)["parts_ticks"] if p["a"]} >= {"tp"}


@pytest.mark.parametrize(("arguments", "reason"), [
    (["--set-a", "plan.tp=2"], "'plan.tp=2' cannot change"),
    (["--group", "tp"], "--group 'tp': write GROUP=AXIS"),
])  # fmt: skip
def test_what_a_measured_run_cannot_have_is_refused(
    trainsim: Callable[..., Any], measured: Path, arguments: list[str], reason: str
) -> None:
    code, out, err = trainsim("compare", measured, "gpt2-xl-ddp", *arguments)
    assert (code, out) == (2, "")
    assert reason in err


def test_a_group_without_a_measured_run_is_refused(trainsim: Callable[..., Any]) -> None:
    code, _, err = trainsim("compare", "gpt2-xl-1f1b", "gpt2-xl-ddp", "--group", "0=tp")
    assert code == 2
    assert "there is none" in err


def test_folding_moves_no_part(scenario_of: Callable[..., Any]) -> None:
    s = scenario_of(plan={"pp": 2, "dp": 2, "tp": 2})
    folded, whole = (Side.of_result(simulate(s, folded=f)) for f in (True, False))
    assert folded.parts == whole.parts


def test_the_figure_shows_every_part_and_the_step(found: Comparison) -> None:
    labels = [t.get_text() for t in comparison_figure(found).axes[1].get_yticklabels()]
    assert labels == [*(p.name for p in found.parts), "the step"]


def test_the_command_compares_a_scenario_with_itself_changed(
    trainsim: Callable[..., Any], tmp_path: Any
) -> None:
    code, out, err = trainsim(
        "compare", "gpt2-xl-1f1b", "--set", "plan.microbatch_size=4", "--json", "c.json",
        "--plot", "c.png",
    )  # fmt: skip
    assert (code, err) == (0, "")
    document = json.loads((tmp_path / "c.json").read_text())
    assert document["inputs"] == [{"key": "plan.microbatch_size", "a": 2, "b": 4}]
    assert (
        sum(p["difference"] for p in document["parts_ticks"]) == (document["step_difference_ticks"])
    )
    assert document["verdict"] in out
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_without_b_the_settings_of_a_hold_for_both(trainsim: Callable[..., Any]) -> None:
    code, out, _ = trainsim(
        "compare", "gpt2-xl-1gpu", "--set-a", "plan.microbatch_size=2",
        "--set", "run.attention=unfused", "--json", "-",
    )  # fmt: skip
    assert code == 0
    assert [i["key"] for i in json.loads(out)["inputs"]] == ["run.attention"]


def test_one_scenario_alone_is_refused(trainsim: Callable[..., Any]) -> None:
    code, out, err = trainsim("compare", "gpt2-xl-1f1b")
    assert (code, out) == (2, "")
    assert "name what to compare with" in err


def test_the_document_holds_plain_values_only(found: Comparison) -> None:
    assert json.loads(json.dumps(comparison_dict(found)))["verdict"] == found.verdict
