"""Passes over Megatron-LM's gradient buffers, and the copies of its fp32 optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from test_clipping import kernels
from test_scenario_parity import alike_however_it_runs

import simulator as sim
from simulator.describe.scenario import Scenario
from simulator.errors import DescriptionError
from simulator.lower import lower
from simulator.lower.layers import num_parameters

ScenarioOf = Callable[..., Scenario]
ALL = {"gradient_passes": ("clear", "check", "scale", "copy")}


# Bytes over a parameter, bf16 with fp32 sums: zeros are written, the norm reads, scaling reads and
# writes 4; the update reads 16 and writes 12; the copy reads 4 and writes 2.
def test_each_pass_moves_what_its_source_does(scenario_of: ScenarioOf) -> None:
    s = scenario_of(plan={"dp": 2}, run={"gradient_dtype": "fp32", **ALL})
    size, moved = num_parameters(s.model), kernels(lower(s))
    names = ("clear gradients", "check gradients", "scale gradients", "OPT")
    assert [moved[name] / size for name in names] == [4, 4, 8, 28 + 6]
    assert "copy gradients" not in moved


# 2 bytes are copied to 4; norm and clipping then read 4, and read and write 4.
def test_short_gradients_are_copied_before_they_are_looked_at(scenario_of: ScenarioOf) -> None:
    s = scenario_of(run={"clip_grad": True, "gradient_passes": ("copy",)})
    size, moved = num_parameters(s.model), kernels(lower(s))
    names = ("copy gradients", "gradient norm", "clip gradients")
    assert [moved[name] / size for name in names] == [6, 4, 8]


def test_without_passes_there_are_none(scenario_of: ScenarioOf) -> None:
    moved = kernels(lower(s := scenario_of(plan={"dp": 2})))
    assert not {"clear gradients", "check gradients", "scale gradients"} & set(moved)
    assert moved["OPT"] == 28 * num_parameters(s.model)  # reads 14, writes 14 in one kernel


@pytest.mark.parametrize(
    ("name", "dp", "times"), [("scale", 1, 0), ("scale", 2, 2), ("divide", 1, 2), ("divide", 2, 2)]
)
def test_one_rank_scales_nothing_but_divides_by_one(
    scenario_of: ScenarioOf, name: str, dp: int, times: int
) -> None:
    s = scenario_of(plan={"dp": dp}, run={"gradient_passes": (name,)})
    assert kernels(lower(s)).get("scale gradients", 0) == 2 * times * num_parameters(s.model)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("zero", [0, 1])
def test_sums_wait_for_the_passes_over_them(
    scenario_of: ScenarioOf, zero: int, overlap: bool
) -> None:
    how = {"bucket_size": 1.0} if overlap else {"grad_overlap": False}
    plan = {"dp": 2, "zero": zero, **how}
    frame = sim.simulate(scenario_of(plan=plan, run=ALL)).to_frame()
    mine = frame[(frame.step == 1) & (frame["rank"] == 0)]
    scaled = mine[mine.name == "scale gradients"]
    sums = mine[mine.stream.isin(["dp", "reduce"])]
    assert len(scaled) == len(sums) > 0
    assert (scaled.end_s.to_numpy() <= sums.start_s.to_numpy()).all()


# Zeros of 2 bytes a parameter at 1e12 B/s and a launch of 1 us: serial, before the next step.
def test_clearing_takes_its_bytes_time(scenario_of: ScenarioOf) -> None:
    plain, cleared = scenario_of(), scenario_of(run={"gradient_passes": ("clear",)})
    more = sim.simulate(cleared).step_time_s - sim.simulate(plain).step_time_s
    assert more == pytest.approx(2 * num_parameters(plain.model) / 1e12 + 1e-6, rel=1e-9)


# fp32 copies of a rank's own gradients live until its update has ended, and no longer.
def test_copies_live_through_the_update(scenario_of: ScenarioOf) -> None:
    program = lower(s := scenario_of(run={"gradient_passes": ("copy",)}))
    held = {cost.name: (cost.alloc, cost.free) for cost in program.costs if hasattr(cost, "alloc")}
    size = 4 * num_parameters(s.model)
    assert held["copy gradients"][0].transients == held["OPT"][1].transients == size
    assert held["copy gradients"][1].total == held["OPT"][0].total == 0


@pytest.mark.parametrize(
    "plan",
    [{"dp": 2, "zero": 1}, {"dp": 2, "pp": 2, "grad_overlap": False},
     {"pp": 2, "chunks": 2, "schedule": "Interleaved1F1B", "dp": 2, "p2p_overlap": False}],
)  # fmt: skip
@pytest.mark.parametrize("detail", ["stage", "layer"])
def test_engines_agree_on_passes(
    scenario_of: ScenarioOf, plan: dict[str, Any], detail: str
) -> None:
    alike_however_it_runs(scenario_of(plan=plan, run={**ALL, "clip_grad": True, "detail": detail}))


@pytest.mark.parametrize("plan", [{"dp": 2}, {"dp": 2, "pp": 2}])
def test_detail_moves_no_time(scenario_of: ScenarioOf, plan: dict[str, Any]) -> None:
    times = [
        sim.simulate(scenario_of(plan=plan, run={**ALL, "detail": detail})).step_time_s
        for detail in ("stage", "layer", "kernel")
    ]
    np.testing.assert_allclose(times, times[0], rtol=1e-9)


@pytest.mark.parametrize(
    ("plan", "passes", "message"),
    [({"dp": 2, "zero": 2}, ("clear",), "divides them"),
     ({}, ("clear", "clear"), "each once"),
     ({}, ("scale", "divide"), "the same pass")],
)  # fmt: skip
def test_what_cannot_be_is_refused(
    scenario_of: ScenarioOf, plan: dict[str, Any], passes: tuple[str, ...], message: str
) -> None:
    with pytest.raises(DescriptionError, match=message):
        scenario_of(plan=plan, run={"gradient_passes": passes})


def test_the_report_says_what_is_passed_over(scenario_of: ScenarioOf) -> None:
    said = str(sim.simulate(scenario_of(run=ALL)))
    assert "gradient buffers once a step: clear, check, scale, copy" in " ".join(said.split())
