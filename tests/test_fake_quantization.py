"""Quantisation-aware training: passes over weights and inputs, and what they keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from test_scenario_parity import alike_however_it_runs

import simulator as sim
from simulator.describe.scenario import Scenario
from simulator.errors import DescriptionError
from simulator.hardware.compute import kernel_seconds
from simulator.lower import lower
from simulator.lower.operators import Operator
from simulator.lower.trainable import tuned
from simulator.program import Kernel, Work

ScenarioOf = Callable[..., Scenario]
QAT = {"fake_quantization": True}

# fc1 of tiny-gpt: 32 tokens, 64 inputs, 256 outputs.
INPUT, WEIGHT = 32 * 64, 64 * 256


def operator(s: Scenario, name: str) -> Operator:
    (found,) = (o for o in tuned(s).blocks.layer.operators if o.name == name)
    return found


def extra(s: Scenario, name: str = "fc1") -> dict[str, float]:
    """Return the bytes of the kernels that quantisation adds to a product."""
    o = operator(s, name)
    return {
        k.name: k.bytes
        for k in o.forward + o.backward
        if isinstance(k, Kernel) and k.name.endswith(("fake quantise", "mask"))
    }


# Observed (2 bytes), read and written (4), mask 1: 7 an element. Backward: 2 + 1 + 2.
def test_passes_over_the_input_and_the_weight(scenario_of: ScenarioOf) -> None:
    assert extra(scenario_of(run=QAT)) == {
        "fc1 input fake quantise": 7 * INPUT,
        "fc1 weight fake quantise": 7 * WEIGHT,
        "fc1 input mask": 5 * INPUT,
        "fc1 weight mask": 5 * WEIGHT,
    }


# One microbatch: the weight's gradient is written in its own 4 bytes, 4 + 1 + 4.
def test_the_gradient_of_a_weight_is_masked_as_it_was_written(scenario_of: ScenarioOf) -> None:
    s = scenario_of(run={**QAT, "gradient_dtype": "fp32"}, batch=1)
    assert extra(s)["fc1 weight mask"] == 9 * WEIGHT


# The mask of the input; the rounded weight, 2 bytes, and its mask. The rounded input, 2 bytes,
# takes the place of the input.
def test_a_product_keeps_masks_and_the_rounded_weight(scenario_of: ScenarioOf) -> None:
    assert operator(scenario_of(run=QAT), "fc1").kept_bytes == 3 * INPUT + 3 * WEIGHT


def test_every_product_with_a_weight_is_rounded_and_nothing_else(scenario_of: ScenarioOf) -> None:
    program = lower(scenario_of(run={**QAT, "detail": "kernel"}))
    names = {c.name for c in program.costs if isinstance(c, Work) and "fake quantise" in c.name}
    rounded = {name.rsplit(" ", 3)[0] for name in names}
    assert rounded == {"qkv", "proj", "fc1", "fc2", "head"}


# Four microbatches, four layers and the head: the kernels' own times, each with its launch of 1 us.
def test_a_step_is_longer_by_the_added_passes(scenario_of: ScenarioOf) -> None:
    s = scenario_of(run=QAT)
    parts, device = tuned(s).blocks, s.cluster.node.device
    added = [
        (count, kernel)
        for block, count in ((parts.layer, 4), (parts.head, 1))
        for o in block.operators
        for kernel in o.forward + o.backward
        if isinstance(kernel, Kernel) and kernel.name.endswith(("fake quantise", "mask"))
    ]
    seconds = sum(count * (kernel_seconds(kernel, device)[0] + 1e-6) for count, kernel in added)
    longer = sim.simulate(s).step_time_s - sim.simulate(scenario_of()).step_time_s
    assert longer == pytest.approx(4 * seconds, rel=1e-9)


def test_arithmetic_is_not_quantised(scenario_of: ScenarioOf) -> None:
    plain, rounded = (sim.simulate(scenario_of(run=run)).summary for run in ({}, QAT))
    assert rounded.mfu * rounded.step_time_s == pytest.approx(plain.mfu * plain.step_time_s)


@pytest.mark.parametrize(
    "plan",
    [
        {"dp": 2, "tp": 2, "pp": 2, "tp_overlap": "grads"},
        {"pp": 2, "recompute": "full"},
        {"dp": 2, "zero": 3},
    ],
)
def test_engines_agree_and_memory_returns(scenario_of: ScenarioOf, plan: dict[str, Any]) -> None:
    s = scenario_of(plan=plan, run=QAT)
    alike_however_it_runs(s)
    memory = sim.simulate(s).memory
    assert all(memory.of_rank(rank)[1][-1] == 0.0 for rank in range(s.plan.world_size))


# Four products, each with its input and its weight.
def test_frozen_layers_round_forward_only(scenario_of: ScenarioOf) -> None:
    still = tuned(scenario_of(run={**QAT, "frozen_layers": 1})).still
    kernels = [k.name for o in still.operators for k in o.forward if isinstance(k, Kernel)]
    assert sum(name.endswith("fake quantise") for name in kernels) == 8
    assert all(o.backward == () and o.kept_bytes == 0.0 for o in still.operators)


@pytest.mark.parametrize(
    ("plan", "run", "said"),
    [
        ({"tp": 2, "sequence_parallel": True}, {}, "fake_quantization with plan.sequence_parallel"),
        ({}, {"fused_accumulation": True}, "set run.fused_accumulation = false"),
    ],
)
def test_what_contradicts_is_refused(
    scenario_of: ScenarioOf, plan: dict[str, Any], run: dict[str, Any], said: str
) -> None:
    with pytest.raises(DescriptionError, match=said):
        scenario_of(plan=plan, run={**QAT, **run})
