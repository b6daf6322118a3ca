"""Memory that is alive for a moment, buffers that are alive for ever, and what is beside both."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

import simulator as sim
from simulator.describe.cluster import Cluster
from simulator.describe.model import Model
from simulator.describe.scenario import Scenario
from simulator.errors import DescriptionError, ProgramError
from simulator.hardware.outside import nccl_bytes, outside
from simulator.lower import lower
from simulator.lower.layers import blocks, shapes
from simulator.lower.memory import buffer_bytes
from simulator.program import Kernel, Memory
from simulator.program_text import format_program, parse_program
from simulator.report.memory_text import memory_text

ScenarioOf = Callable[..., Scenario]
FUSED = {"fused_accumulation": True}
TOKEN = 32 * 2
"""Bytes of one bf16 number for each token of a microbatch."""


# Llama of hidden 64, MLP 160. When the gated activation runs backward the last layer has freed
# fc2's input (160 numbers a token); the gradients of the stream (64), of the output (160) and of
# the two inputs (320) are alive: 64 + 160 + 320 - 160 = 384 numbers above what was kept.
@pytest.mark.parametrize("detail", ["stage", "layer", "kernel"])
def test_the_backward_of_a_gated_mlp_peaks_in_its_activation(
    scenario_of: ScenarioOf, llama: Model, detail: str
) -> None:
    s = scenario_of(model=llama, plan={"pp": 2}, run={**FUSED, "detail": detail})
    result = sim.simulate(s)
    assert result.memory.peak[0] == result.activations.peak[0] + 384 * TOKEN


# A gradient that is added afterwards is a tensor of its own, as is Megatron-LM's empty one. fc2
# (64 x 160, 2 bytes) then peaks: stream 64, its output's and input's gradients 64 + 160.
@pytest.mark.parametrize("run", [{}, {**FUSED, "linear_layers": "megatron"}])
def test_a_gradient_apart_is_alive_while_its_product_runs(
    scenario_of: ScenarioOf, llama: Model, run: dict[str, Any]
) -> None:
    result = sim.simulate(scenario_of(model=llama, plan={"pp": 2}, run=run))
    extra = (64 + 64 + 160) * TOKEN + 2 * 64 * 160
    assert result.memory.peak[0] == result.activations.peak[0] + extra


# The loss reads bf16 logits (vocabulary 128) and keeps probabilities in fp32.
@pytest.mark.parametrize("detail", ["stage", "layer", "kernel"])
def test_logits_are_alive_beside_their_probabilities(
    scenario_of: ScenarioOf, llama: Model, detail: str
) -> None:
    s = scenario_of(model=llama, plan={"pp": 2}, run={**FUSED, "detail": detail})
    result = sim.simulate(s)
    assert result.memory.peak[1] == result.activations.peak[1] + 128 * TOKEN


# With sequence parallelism over 2 the stream's gradient is 64 / 2 a token, the MLP's 80 and 160:
# 32 + 80 + 160 - 80 = 192 in the activation. fc1 has freed those 80 and 160: its output's gradient
# is 160, its input is gathered (64), its input's gradient is 64 and scattered 32, the stream 32:
# 160 + 64 + 64 + 32 + 32 - 240 = 112.
def test_sequence_parallelism_divides_the_gradients_of_a_layer(
    scenario_of: ScenarioOf, llama: Model
) -> None:
    plan = {"pp": 2, "tp": 2, "sequence_parallel": True}
    result = sim.simulate(scenario_of(model=llama, plan=plan, run=FUSED))
    assert result.memory.peak[0] == result.activations.peak[0] + 192 * TOKEN


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("attention", ["flash", "unfused"])
def test_detail_does_not_change_the_peak(
    scenario_of: ScenarioOf, recompute: str, tp: int, attention: str
) -> None:
    plan = {"pp": 2, "tp": tp, "recompute": recompute}
    peaks = [
        sim.simulate(
            scenario_of(plan=plan, run={"detail": detail, "attention": attention})
        ).memory.peak.tolist()
        for detail in ("stage", "layer", "kernel")
    ]
    assert peaks[0] == pytest.approx(peaks[1])
    assert peaks[1] == pytest.approx(peaks[2])


@pytest.mark.parametrize("plan", [{"pp": 2}, {"dp": 2, "zero": 2}, {"dp": 2, "zero": 3}])
@pytest.mark.parametrize("detail", ["stage", "layer", "kernel"])
def test_all_that_comes_alive_is_freed(
    scenario_of: ScenarioOf, plan: dict[str, Any], detail: str
) -> None:
    result = sim.simulate(scenario_of(plan=plan, run={"detail": detail}))
    for part in Memory._fields:
        assert result.memory.only(part).of_rank(0)[1][-1:].sum() == pytest.approx(0.0)


# qkv 64 x (64 + 2 * 32), proj 64 x 64, fc1 64 x 320, fc2 160 x 64, 2 bytes each; torch's workspace
# of an A100 8 MiB + 128 KiB, Transformer Engine's 4 MiB.
def test_transformer_engine_keeps_a_tensor_for_each_shape_of_weight(
    scenario_of: ScenarioOf, llama: Model
) -> None:
    run = {**FUSED, "linear_layers": "transformer_engine"}
    torch = 8 * 2**20 + 128 * 2**10
    shapes = 64 * 128 + 64 * 64 + 64 * 320 + 160 * 64
    assert buffer_bytes(scenario_of(model=llama)) == torch
    assert buffer_bytes(scenario_of(model=llama, run=run)) == torch + 4 * 2**20 + 2 * shapes


def test_linear_layers_without_fused_accumulation_are_refused(scenario_of: ScenarioOf) -> None:
    with pytest.raises(DescriptionError, match="fused_accumulation is true"):
        scenario_of(run={"linear_layers": "megatron"})


# 1F1B keeps 2 microbatches on stage 0; the parts at the peak are all that is alive then.
def test_the_parts_at_the_peak_sum_to_it(scenario_of: ScenarioOf, llama: Model) -> None:
    result = sim.simulate(scenario_of(model=llama, plan={"pp": 2}, run=FUSED))
    peak = result.memory.at_peak(0)
    assert peak.memory.total == result.memory.peak[0]
    assert peak.memory.transients == 384 * TOKEN
    assert peak.kept == ((0, 0), (0, 1))
    assert result.tiled.layer[peak.row] == 1


def test_memory_is_shown_by_part_and_with_what_is_alive(
    scenario_of: ScenarioOf, llama: Model
) -> None:
    s = scenario_of(model=llama, plan={"pp": 2}, run=FUSED)
    text = memory_text(sim.simulate(s), s)
    assert "stage 0: activations of 2 microbatches (0, 1); layer B of B0 in layer 1" in text
    assert "transients  allocated  reserved" in text
    assert "gathered" not in text  # nothing is sharded


# tp 2 and dp 2 are a ring and a tree of one peer each, of all three protocols: 4 MiB, 8 x 8 x 512 x
# 16 and 8 x 120 x 640 x 8 bytes. One neighbour in the pipeline sends with SIMPLE. 16 channels.
def test_nccl_holds_a_buffer_of_each_protocol_for_each_channel_and_peer(
    scenario_of: ScenarioOf,
) -> None:
    s = scenario_of(plan={"tp": 2, "dp": 2, "pp": 2})
    protocols = 4 * 2**20 + 524_288 + 4_915_200
    channels = s.cluster.node.link.channels
    assert nccl_bytes(s) == channels * (2 * 2 * protocols + 4 * 2**20)
    assert nccl_bytes(scenario_of()) == 0


def test_what_fits_is_judged_by_all_that_is_on_the_device(
    scenario_of: ScenarioOf, cluster_of: Callable[..., Cluster]
) -> None:
    result = sim.simulate(scenario_of(run={"allocator_reserve": 1.25}))
    s, allocated = result.scenario, result.peak_memory_bytes
    assert s is not None
    assert result.reserved_memory_bytes.tolist() == (1.25 * allocated).tolist()
    assert result.device_memory_bytes.tolist() == (1.25 * allocated + outside(s)).tolist()
    assert result.device_memory_bytes[0] - allocated[0] > s.cluster.node.device.context
    room = {"memory": float(allocated[0]) * 1.25}
    small = scenario_of(run={"allocator_reserve": 1.25}, cluster=cluster_of(devices=1, device=room))
    assert not sim.simulate(small).summary.fits


def test_memory_in_a_program_parses_back_by_part(scenario_of: ScenarioOf) -> None:
    program = lower(scenario_of(plan={"dp": 2, "zero": 3})).flat
    text = format_program(program)
    assert parse_program(text).costs == program.costs
    assert any(cost.alloc.gathered for cost in program.costs)
    broken = re.sub(r"alloc=\S+", "alloc=1,2,3,4,5,6", text, count=1)
    with pytest.raises(ProgramError, match="more parts than activations, transients"):
        parse_program(broken)


# 32 tokens x 128 logits: torch's eager loss has a copy beside the logarithms in forward, 4 bytes
# each, and in backward the gradients of the logarithms and of the copy, 2 x 4 bytes, which are
# freed before the logits' own is written; in place that one stands beside the probabilities.
def test_the_eager_loss_has_two_more_tensors_of_logits(scenario_of: ScenarioOf) -> None:
    there, apart = (
        next(o for o in blocks(s.model, shapes(s)).head.operators if o.name == "loss")
        for s in (scenario_of(run={"loss_in_place": place}) for place in (True, False))
    )
    logits = 32 * 128
    assert (apart.backward_bytes, there.backward_bytes) == (2 * 4 * logits, 2 * logits)
    assert apart.forward_bytes - there.forward_bytes == 4 * logits
    assert apart.kept_bytes == there.kept_bytes == 4 * logits
    (before,), (after,) = there.input_grad, apart.input_grad
    assert isinstance(before, Kernel)
    assert isinstance(after, Kernel)
    assert after.bytes - before.bytes == 2 * 4 * logits


# 32 tokens x 64 logits a rank. Forward: logits in bf16, their fp32 copy, what is left of it above
# the largest, and the logarithms that are kept. Backward: zeros, exponentials and their sum.
def test_the_loss_over_divided_logits_has_three_tensors_of_them_either_way(
    scenario_of: ScenarioOf,
) -> None:
    s = scenario_of(plan={"tp": 2}, run={"loss_in_place": False})
    loss = next(o for o in blocks(s.model, shapes(s)).head.operators if o.name == "loss")
    assert loss.kept_bytes == 4 * 32 * 64
    assert loss.forward_bytes == (2 + 4 + 4) * 32 * 64
    assert loss.backward_bytes == 3 * 4 * 32 * 64


# Two bytes a logit are kept; forward reads them, backward reads them and writes as many.
def test_a_compiled_loss_writes_nothing_in_fp32(scenario_of: ScenarioOf) -> None:
    s = scenario_of(run={"compiled_loss": True})
    loss = next(o for o in blocks(s.model, shapes(s)).head.operators if o.name == "loss")
    assert (loss.kept_bytes, loss.forward_bytes, loss.backward_bytes) == (8192, 0, 8192)
    assert [k.bytes for k in (*loss.forward, *loss.input_grad) if isinstance(k, Kernel)] == [
        8192, 16384,
    ]  # fmt: skip
