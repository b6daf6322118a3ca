"""Device memory: what is alive all the time, and what comes and goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import simulator as sim
from simulator.describe.model import Model
from simulator.describe.scenario import Scenario
from simulator.lower import lower
from simulator.lower.layers import blocks, num_parameters, shapes
from simulator.lower.memory import bytes_per_parameter, static_memory
from simulator.program import Memory, Program, Work
from simulator.report.memory import memory_over_time
from simulator.timeline import Timeline

ScenarioOf = Callable[..., Scenario]


# Mixed precision: weight 2, gradient 2, fp32 master 4, Adam's moments 4 + 4 (ZeRO, section 3.1).
# fp32: 4 + 4 + two moments 8, no master.
@pytest.mark.parametrize(
    ("precision", "optimizer", "parts"),
    [
        ("bf16", "adam", (2, 2, 12)),
        ("fp16", "adamw", (2, 2, 12)),
        ("fp32", "adam", (4, 4, 8)),
        ("tf32", "adamw", (4, 4, 8)),
        ("bf16", "momentum", (2, 2, 8)),
        ("bf16", "sgd", (2, 2, 4)),
        ("fp32", "sgd", (4, 4, 0)),
        ("fp32", "momentum", (4, 4, 4)),
    ],
)
def test_bytes_of_a_parameter(
    scenario_of: ScenarioOf, precision: str, optimizer: str, parts: tuple[int, int, int]
) -> None:
    s = scenario_of(run={"precision": precision, "optimizer": optimizer})
    assert bytes_per_parameter(s) == parts


# Adam in either arithmetic 16 bytes: 7e9 parameters 112 GB before the first activation.
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_adam_of_seven_billion_parameters_needs_112_gb(
    scenario_of: ScenarioOf, precision: str
) -> None:
    assert sum(bytes_per_parameter(scenario_of(run={"precision": precision}))) * 7e9 == 112e9


# GPT-2's 1.5 B (1 557 611 200) in fp32 with Adam: 16 * 1.5576e9 = 24.92 GB.
def test_gpt_2_xl_in_fp32_holds_24_9_gb() -> None:
    s = sim.load("gpt2-xl-1gpu", {"run.precision": "fp32", "run.optimizer": "adam"})
    (only,) = static_memory(s)
    assert only.states == 16 * 1_557_611_200 == 24_921_779_200


def test_parameters_of_all_ranks_are_those_of_the_model(
    scenario_of: ScenarioOf, llama: Model
) -> None:
    # Untied, nothing repeated but the norms: 2 a layer and the final one, on each of 2 tp ranks.
    s = scenario_of(model=llama, plan={"pp": 2, "tp": 2})
    held = sum(stage.params for stage in static_memory(s)) * 2
    assert held == num_parameters(llama) + (2 * 4 + 1) * 64


# 1F1B of 2 stages: stage 0 keeps 2 microbatches, stage 1 keeps 1 with its head's logits and loss.
def test_the_peak_of_a_stage_is_its_microbatches_in_flight(scenario_of: ScenarioOf) -> None:
    s = scenario_of(plan={"pp": 2})
    parts = blocks(s.model, shapes(s))
    peak = sim.simulate(s).activations.peak
    assert peak.tolist() == [
        2 * (parts.embedding.kept_bytes + 2 * parts.layer.kept_bytes),
        1 * (2 * parts.layer.kept_bytes + parts.head.kept_bytes),
    ]


# Full recomputation keeps 2sbh a layer and microbatch (Korthikanti et al., 2022, section 5), and
# brings one layer's rest alive at a time, at the first backward when all m are kept (GPipe).
@pytest.mark.parametrize("tp", [1, 2])
def test_recomputation_keeps_the_input_of_each_layer(scenario_of: ScenarioOf, tp: int) -> None:
    s = scenario_of(plan={"pp": 2, "tp": tp, "recompute": "full", "schedule": "GPipe"})
    parts = blocks(s.model, shapes(s))
    layer_input = 2 * 32 * 1 * 64
    masks = 32 * 64  # of the embedding's dropout, one byte each
    kept = 4 * (masks + 2 * layer_input)
    rest = parts.layer.kept_bytes - layer_input
    assert sim.simulate(s).activations.peak[0] == kept + rest


@pytest.mark.parametrize("detail", ["layer", "kernel"])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("attention", ["flash", "unfused"])
def test_everything_kept_is_freed(
    scenario_of: ScenarioOf, detail: str, recompute: str, tp: int, attention: str
) -> None:
    s = scenario_of(
        plan={"pp": 2, "tp": tp, "recompute": recompute},
        run={"detail": detail, "attention": attention},
    )
    memory = sim.simulate(s).memory
    for rank in range(s.plan.world_size):
        assert memory.of_rank(rank)[1][-1] == 0.0
        assert memory.of_rank(rank)[1].min() >= 0.0


def kernel_costs(program: Program) -> dict[str, Work]:
    return {c.name: c for c in program.costs if isinstance(c, Work)}


# What an operator keeps is alive until its own gradient has been computed: fc2 needs its input
# (2 bytes * 32 tokens * 256) in `fc2 wgrad`; the op before, of the residual, frees one mask byte an
# element (32 * 64) and nothing of fc2's.
def test_a_kernel_frees_what_its_own_gradient_needed(scenario_of: ScenarioOf) -> None:
    costs = kernel_costs(lower(scenario_of(run={"detail": "kernel"})))
    assert costs["mlp residual grad"].free.activations == 32 * 64
    parts = ("fc2 dgrad", "fc2 wgrad", "fc2 accumulation")
    assert sum(costs[part].free.activations for part in parts) == 2 * 32 * 256


# norm 2 * 32 * 64, and fc2's input 2 * 32 * 256 when fc2 runs, not before.
def test_a_kernel_allocates_what_it_keeps_itself(scenario_of: ScenarioOf) -> None:
    costs = kernel_costs(lower(scenario_of(run={"detail": "kernel"})))
    assert costs["attention norm"].alloc.activations == 2 * 32 * 64
    assert costs["fc2"].alloc.activations == 2 * 32 * 256
    assert costs["mlp residual"].alloc.activations == 32 * 64


def test_detail_does_not_change_the_peak_without_recomputation(scenario_of: ScenarioOf) -> None:
    peaks = [
        sim.simulate(scenario_of(plan={"pp": 2}, run={"detail": detail})).memory.peak.tolist()
        for detail in ("layer", "kernel")
    ]
    assert peaks[0] == peaks[1]


def test_peak_memory_is_static_and_activations(scenario_of: ScenarioOf) -> None:
    s = scenario_of(plan={"pp": 2})
    result = sim.simulate(s)
    static = [stage.total for stage in static_memory(s)]
    assert result.peak_memory_bytes.tolist() == (result.memory.peak + static).tolist()


# Two ops of a rank back to back: the first frees 5 at tick 10, the second allocates 5 at tick 10;
# together 5, never 10.
def test_a_release_comes_before_an_allocation_at_the_same_time(
    op: Any, program_of: Callable[..., Any]
) -> None:
    program, _ = program_of([op(0, 10, name="a"), op(0, 10, name="b")])
    costs = tuple(replace(c, alloc=Memory(5.0), free=Memory(5.0)) for c in program.costs)
    timeline = Timeline(np.array([0, 10]), np.array([10, 20]))
    assert memory_over_time(replace(program, costs=costs), timeline).peak.tolist() == [5.0]


def test_a_rank_without_activations_peaks_at_zero(op: Any, program_of: Callable[..., Any]) -> None:
    program, _ = program_of([op(1, 10)], num_ranks=3)
    timeline = Timeline(np.array([0]), np.array([10]))
    assert memory_over_time(program, timeline).peak.tolist() == [0.0, 0.0, 0.0]


# Tensor parallelism of 2: 10 + 24/2 of 34 sbh plus half of the scores.
def test_tensor_parallelism_lowers_the_peak_by_what_korthikanti_says(
    scenario_of: ScenarioOf,
) -> None:
    h, a, s, b = 64, 4, 32, 1

    def layers_of(tp: int) -> float:
        scenario = scenario_of(plan={"pp": 4, "tp": tp}, run={"attention": "unfused"})
        return float(sim.simulate(scenario).activations.peak[tp])  # of stage 1: one layer, 3 kept

    assert layers_of(1) == 3 * (34 * s * b * h + 5 * a * s * s * b)
    assert layers_of(2) == 3 * (10 * s * b * h + 12 * s * b * h + 5 * a * s * s * b // 2)
