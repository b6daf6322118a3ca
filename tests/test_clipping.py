"""Gradient clipping and loss scaling: passes over gradients, and sums of one number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from test_scenario_parity import alike_however_it_runs

import simulator as sim
from simulator.describe.model import Model
from simulator.describe.scenario import Scenario
from simulator.errors import DescriptionError
from simulator.lower import lower
from simulator.lower.layers import num_parameters
from simulator.lower.memory import static_memory
from simulator.program import NONE, Program, Work

ScenarioOf = Callable[..., Scenario]
CLIP = {"clip_grad": True}


def kernels(program: Program) -> dict[str, float]:
    """Return the bytes of work by its name."""
    return {
        c.name: sum(k.bytes for k in c.kernels) for c in program.costs if isinstance(c, Work)
    }  # fmt: skip


def sums(program: Program, rank: int = 0) -> list[tuple[str, float, int]]:
    """Return stream, bytes and ranks of the sums in the first step's update of a rank's replica."""
    rows = (program.joint != NONE) & (program.step == 0) & (program.rank == rank)
    found = []
    for row in np.flatnonzero(rows & (program.action == program.action.max())).tolist():
        flow = program.costs[program.cost[row]]
        group = program.groups[int(program.joint_group[program.joint[row]])]
        if flow.name == "all_reduce":
            found.append((program.streams[program.stream[row]], flow.bytes, len(group)))
    return found


# The norm reads every gradient, clipping reads and writes it; unscaling too. 2 bytes each.
def test_passes_over_the_gradients(scenario_of: ScenarioOf) -> None:
    s = scenario_of(run={"precision": "fp16", "clip_grad": True})
    moved, size = kernels(lower(s)), 2 * num_parameters(s.model)
    names = ("unscale gradients", "gradient norm", "clip gradients")
    assert [moved[name] / size for name in names] == [2, 1, 2]


@pytest.mark.parametrize(("gradient", "size"), [(None, 2), ("fp32", 4)])
def test_passes_are_over_gradients_as_they_are_summed(
    scenario_of: ScenarioOf, gradient: str | None, size: int
) -> None:
    s = scenario_of(run={**CLIP, "gradient_dtype": gradient})
    assert kernels(lower(s))["gradient norm"] == size * num_parameters(s.model)


def test_no_pass_without_clipping_and_loss_scaling(scenario_of: ScenarioOf) -> None:
    program = lower(scenario_of(plan={"pp": 2, "tp": 2}))
    assert not {"unscale gradients", "gradient norm", "clip gradients"} & set(kernels(program))
    assert sums(program) == []


# 2 + 4 bytes of each parameter at 1e12 B/s, and two launches of 1 us.
def test_clipping_takes_two_passes_on_one_rank(scenario_of: ScenarioOf) -> None:
    plain, clipped = scenario_of(), scenario_of(run=CLIP)
    more = sim.simulate(clipped).step_time_s - sim.simulate(plain).step_time_s
    assert more == pytest.approx(6 * num_parameters(plain.model) / 1e12 + 2e-6, rel=1e-9)


# Along tp, shards and pipeline, where ranks hold different gradients; replicas hold the same.
@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ({}, []),
        ({"dp": 4}, []),
        ({"tp": 2}, [("tp", 2)]),
        ({"pp": 4}, [("pipeline", 4)]),
        ({"dp": 4, "zero": 1}, [("shards", 4)]),
        ({"dp": 4, "zero": 3, "dp_shard": 2}, [("shards", 2)]),
        ({"dp": 2, "tp": 2, "pp": 2, "zero": 2}, [("tp", 2), ("shards", 2), ("pipeline", 2)]),
    ],
)
def test_a_norm_is_summed_where_gradients_differ(
    scenario_of: ScenarioOf, plan: dict[str, Any], expected: list[tuple[str, int]]
) -> None:
    program = lower(scenario_of(plan=plan, run=CLIP))
    assert sums(program) == [(stream, 4.0, ranks) for stream, ranks in expected]


def test_an_overflow_and_a_norm_are_two_sums(scenario_of: ScenarioOf) -> None:
    s = scenario_of(plan={"pp": 2}, run={"precision": "fp16", "clip_grad": True})
    assert sums(lower(s)) == [("pipeline", 4.0, 2)] * 2


# Three ranks of a pipeline: the first has most to do, all scale their gradients when it is done.
def test_no_rank_clips_before_the_last_norm(scenario_of: ScenarioOf) -> None:
    result = sim.simulate(scenario_of(plan={"pp": 3}, run=CLIP))
    frame = result.to_frame()
    last = frame[frame.step == 1]
    assert last[last.name == "clip gradients"].start_s.nunique() == 1
    norms, clips = (last[last.name == n] for n in ("gradient norm", "clip gradients"))
    assert clips.start_s.min() > norms.end_s.max()


# Two chunks a rank: one norm of both, before the first update, after the sums of both over dp and,
# on the last rank, of the tied embedding of its second chunk.
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("zero", [0, 2])
def test_a_rank_of_chunks_takes_one_norm_of_all(
    scenario_of: ScenarioOf, zero: int, rank: int
) -> None:
    plan = {"pp": 2, "chunks": 2, "schedule": "Interleaved1F1B", "dp": 2, "zero": zero}
    result = sim.simulate(s := scenario_of(plan={**plan, "bucket_size": 1.0}, run=CLIP))
    program, timeline = result.program, result.timeline
    mine = (program.rank == rank) & (program.step == 1)
    named = np.array([cost.name == "gradient norm" for cost in program.costs])
    (norm,) = np.flatnonzero(mine & named[program.cost])
    held = sum(static_memory(s)[stage].params for stage in (rank, rank + 2))
    cost = program.costs[program.cost[norm]]
    assert isinstance(cost, Work)
    assert cost.kernels[0].bytes == 2 * held / (2 if zero else 1)
    sums = [program.streams.index(name) for name in ("dp", "reduce", "tied")]
    summed = mine & np.isin(program.stream, sums)
    assert summed.any()
    assert timeline.start[norm] >= timeline.end[summed].max()


def test_with_shards_each_rank_looks_at_its_own(scenario_of: ScenarioOf, llama: Model) -> None:
    s = scenario_of(model=llama, plan={"dp": 4, "zero": 1}, run=CLIP)
    assert kernels(lower(s))["gradient norm"] == 2 * num_parameters(llama) / 4


# FSDP's gradients are as its shards, fp32.
def test_fsdp_clips_fp32_gradients(scenario_of: ScenarioOf, llama: Model) -> None:
    s = scenario_of(model=llama, plan={"dp": 4, "zero": 3}, run=CLIP)
    assert kernels(lower(s))["gradient norm"] == 4 * num_parameters(llama) / 4


@pytest.mark.parametrize(
    ("precision", "given", "scales"),
    [("fp16", None, True), ("bf16", None, False), ("fp32", None, False), ("fp16", False, False)],
)
def test_loss_scaling_comes_with_fp16(
    scenario_of: ScenarioOf, precision: str, given: bool | None, scales: bool
) -> None:
    s = scenario_of(run={"precision": precision, "loss_scaling": given})
    assert ("unscale gradients" in kernels(lower(s))) == scales


# 4 bytes a parameter and one launch: what a step in fp16 takes more than one in bf16.
def test_loss_scaling_takes_one_pass(scenario_of: ScenarioOf) -> None:
    fp16, bf16 = (
        sim.simulate(scenario_of(run={"precision": precision})).step_time_s
        for precision in ("fp16", "bf16")
    )
    params = num_parameters(scenario_of().model)
    assert fp16 - bf16 == pytest.approx(4 * params / 1e12 + 1e-6, rel=1e-9)


@pytest.mark.parametrize(
    "plan",
    [
        {"dp": 2, "tp": 2, "pp": 2},
        {"dp": 4, "pp": 2, "zero": 1, "dp_shard": 2},
        {"dp": 2, "pp": 2, "zero": 3},
        {"dp": 2, "pp": 2, "chunks": 2, "schedule": "Interleaved1F1B", "zero": 2},
        {"pp": 3, "dp": 2, "order": ("tp", "pp", "dp"), "gradient_exchange": "parameter_server"},
    ],
)
@pytest.mark.parametrize("detail", ["stage", "kernel"])
def test_engines_agree_on_clipped_runs(
    scenario_of: ScenarioOf, plan: dict[str, Any], detail: str
) -> None:
    run = {"precision": "fp16", "clip_grad": True, "detail": detail}
    alike_however_it_runs(scenario_of(plan=plan, run=run))


@pytest.mark.parametrize("plan", [{"pp": 2, "tp": 2}, {"dp": 4, "zero": 1}])
def test_waiting_for_a_norm_is_exposed_communication(
    scenario_of: ScenarioOf, plan: dict[str, Any]
) -> None:
    kind = "pp" if "pp" in plan else "dp"
    exposed = [
        float(sim.simulate(scenario_of(plan=plan, run=run)).breakdown.of(kind).min())
        for run in ({}, CLIP)
    ]
    assert exposed[1] > exposed[0]


def test_a_fluid_run_routes_the_sums(scenario_of: ScenarioOf, cluster_of: Any) -> None:
    s = scenario_of(
        plan={"pp": 2, "dp": 2, "zero": 1},
        run={"network": "fluid", **CLIP},
        cluster=cluster_of(num_nodes=2, devices=2),
    )
    assert {(u.operation, u.payload_bytes, u.axis) for u in sim.simulate(s).flows} >= {
        ("all_reduce", 4.0, "pp"),
        ("all_reduce", 4.0, "dp"),
    }


@pytest.mark.parametrize("precision", ["bf16", "fp32", "tf32"])
def test_loss_scaling_is_for_fp16(scenario_of: ScenarioOf, precision: str) -> None:
    with pytest.raises(DescriptionError, match="loss_scaling: true is for precision 'fp16'"):
        scenario_of(run={"precision": precision, "loss_scaling": True})


def test_stale_gradients_have_no_norm(scenario_of: ScenarioOf) -> None:
    plan = {"dp": 2, "gradient_exchange": "parameter_server", "staleness": 1}
    with pytest.raises(DescriptionError, match=r"clip_grad with plan\.staleness 1"):
        scenario_of(plan=plan, run=CLIP)
