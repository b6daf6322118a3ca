"""Linear products in fp8: bytes, casts, what is kept and gathered; compiled layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from test_parity import same_in_all

import simulator as sim
from simulator.describe.model import Model
from simulator.describe.scenario import Scenario
from simulator.errors import DescriptionError
from simulator.hardware import price
from simulator.hardware.compute import kernel_seconds
from simulator.lower import lower
from simulator.lower.layers import blocks, shapes
from simulator.lower.memory import static_memory
from simulator.lower.operators import Operator
from simulator.program import Flow, Kernel, Work
from simulator.report.summary import assumptions

FP8 = {"precision": "fp8"}
RATES = {"fp32": 1e13, "tf32": 5e13, "fp16": 1e14, "bf16": 1e14, "fp8": 2e14}
LINEAR = 64 * (64 + 2 * 32) + 64 * 64 + 64 * 2 * 160 + 160 * 64
"""Weights of a layer of the tiny Llama: qkv with 2 of 4 key heads, proj, fc1 with a gate, fc2."""


@pytest.fixture
def fp8_of(scenario_of: Any, cluster_of: Any, llama: Model) -> Callable[..., Scenario]:
    def make(
        plan: dict[str, Any] | None = None, run: dict[str, Any] | None = None, **device: Any
    ) -> Scenario:
        p = plan or {}
        ranks = p.get("dp", 1) * p.get("tp", 1) * p.get("pp", 1)
        cluster = cluster_of(devices=ranks, device={"peak": RATES, **device})
        chosen: Scenario = scenario_of(model=llama, plan=p, run=FP8 | (run or {}), cluster=cluster)
        return chosen

    return make


def layer_of(s: Scenario) -> dict[str, Operator]:
    return {o.name: o for o in blocks(s.model, shapes(s)).layer.operators}


def kernels(*parts: Any) -> dict[str, Kernel]:
    return {p.name: p for p in parts if isinstance(p, Kernel)}


# 32 tokens, 64 -> 320: a byte for each element read, two for each of the result.
def test_a_product_reads_a_byte_an_element_and_writes_two(fp8_of: Any) -> None:
    fc1 = kernels(*layer_of(fp8_of())["fc1"].forward)["fc1"]
    assert fc1.dtype == "fp8"
    assert fc1.bytes == 32 * 64 + 64 * 320 + 2 * 32 * 320
    assert fc1.flops == 2 * 32 * 64 * 320


def test_attention_and_head_stay_in_bf16(fp8_of: Any) -> None:
    s = fp8_of()
    parts = blocks(s.model, shapes(s))
    head = next(o for o in parts.head.operators if o.name == "head")
    core = layer_of(s)["attention"]
    assert {k.dtype for k in kernels(*head.forward, *core.forward).values()} == {"bf16"}


# Two bytes read, one written, one written transposed; Blackwell needs no transposed copy; a scale
# of the tensor's own reads it once more, unless the compiler finds it while the tensor is written.
@pytest.mark.parametrize(
    ("run", "architecture", "moved"),
    [
        ({}, "hopper", 4),
        ({}, "blackwell", 3),
        ({"fp8_scaling": "current"}, "hopper", 6),
        ({"fp8_scaling": "current", "compiled": True}, "hopper", 4),
    ],
)
def test_a_cast_reads_and_writes(fp8_of: Any, run: Any, architecture: str, moved: int) -> None:
    qkv = layer_of(fp8_of(run=run, architecture=architecture))["qkv"]
    assert kernels(*qkv.forward)["qkv cast"].bytes == moved * 32 * 64
    assert kernels(*qkv.input_grad)["qkv grad cast"].bytes == moved * 32 * 128


# Each of 2 ranks casts 16 of 32 tokens, 3 bytes an element, and transposes all: 1 read, 1 written.
def test_a_gathered_input_is_cast_in_parts(fp8_of: Any) -> None:
    s = fp8_of(plan={"tp": 2, "sequence_parallel": True})
    cast = kernels(*layer_of(s)["qkv"].forward)["qkv cast"]
    assert cast.bytes == 3 * 16 * 64 + 2 * 32 * 64


# Of a token, in bytes: norm's input 2 x 64, qkv's 64, q, k and v 2 x 128, attention's result 2 x 64
# and 4 a head, proj's input 64, norm's 2 x 64, fc1's 64, the activation's 2 x 320, fc2's 160.
def test_inputs_are_kept_as_bytes_beside_attentions_own_result(fp8_of: Any) -> None:
    s = fp8_of()
    a_token = 128 + 64 + 256 + 128 + 16 + 64 + 128 + 64 + 640 + 160
    assert blocks(s.model, shapes(s)).layer.kept_bytes == 32 * a_token


# A layer gathers two inputs forward and again in backward, and two gradients: a byte an element.
# What is reduce-scattered, and what the head gathers, forward and again, has two.
def test_layers_gather_bytes(fp8_of: Any) -> None:
    s = fp8_of(plan={"tp": 2, "sequence_parallel": True}, run={"num_steps": 1})
    p = lower(s).flat
    mine = (p.rank == 0) & (p.stream == p.streams.index("tp"))
    flows = [c for c in (p.costs[n] for n in p.cost[mine].tolist()) if isinstance(c, Flow)]
    sizes = [f.bytes for f in flows if f.name == "all_gather"]
    assert sizes.count(32 * 64) == 4 * 4 * 6
    assert sizes.count(2 * 32 * 64) == len(sizes) - 4 * 4 * 6 == 4 * 3
    assert {f.bytes for f in flows if f.name == "reduce_scatter"} == {2 * 32 * 64}


def test_weights_are_held_as_copies_and_their_transposes(fp8_of: Any) -> None:
    for architecture, copies in (("hopper", 2), ("blackwell", 1)):
        stage = static_memory(fp8_of(architecture=architecture))[0]
        assert stage.weights == 2 * stage.params + copies * 4 * LINEAR


def optimizer_kernels(s: Scenario) -> dict[str, Kernel]:
    works = [c for c in lower(s).costs if isinstance(c, Work) and c.name == "OPT"]
    return kernels(*works[0].kernels)


def test_weights_are_cast_once_a_step(fp8_of: Any) -> None:
    s = fp8_of()
    assert optimizer_kernels(s)["weight cast"].bytes == (2 + 1 + 1) * 4 * LINEAR
    assert "fc1 weight cast" not in kernels(*layer_of(s)["fc1"].forward)


# FSDP casts what it has gathered: 3 bytes a weight, kept until backward, in no rank all the time.
def test_gathered_weights_are_cast_in_forward(fp8_of: Any) -> None:
    s = fp8_of(plan={"dp": 2, "zero": 3})
    fc1 = layer_of(s)["fc1"]
    assert kernels(*fc1.forward)["fc1 weight cast"].bytes == 3 * 64 * 320
    assert fc1.kept_bytes == 32 * 64 + 64 * 320
    assert "weight cast" not in optimizer_kernels(s)
    stage = static_memory(s)[0]
    assert stage.weights == 4 * stage.params / 2


# With fp8 parameters a product's weight and its transposed copy, a byte each, are all that is held,
# each of two ranks casts half (3 bytes) and transposes all (2), and a byte is gathered.
def test_weights_in_fp8_alone_are_held_cast_and_gathered_as_bytes(fp8_of: Any) -> None:
    s = fp8_of(plan={"dp": 2, "zero": 1}, run={"fp8_weights": True})
    stage, low = static_memory(s)[0], 4 * LINEAR
    assert stage.weights == 2 * (stage.params - low) + 2 * low
    assert optimizer_kernels(s)["weight cast"].bytes == 3 * low / 2 + 2 * low
    gathers = [c.bytes for c in lower(s).costs if isinstance(c, Flow) and c.name == "all_gather"]
    assert gathers == [2 * (stage.params - low) + low]


# FSDP casts its shard once a step, gathers a byte and transposes it in backward (read and written);
# nothing stays cast until then. Beside the fp32 shard there may be one of low precision.
def test_gathered_weights_in_fp8_are_not_cast_in_forward(fp8_of: Any) -> None:
    s = fp8_of(plan={"dp": 2, "zero": 3}, run={"fp8_weights": True})
    fc1 = layer_of(s)["fc1"]
    assert "fc1 weight cast" not in kernels(*fc1.forward)
    assert fc1.kept_bytes == 32 * 64
    assert kernels(*fc1.input_grad)["fc1 weight transpose"].bytes == 2 * 64 * 320
    assert optimizer_kernels(s)["weight cast"].bytes == 3 * 4 * LINEAR / 2
    norms = 2 * 2 * 64  # of a layer, in bf16
    gathers = {c.bytes for c in lower(s).costs if isinstance(c, Flow) and c.name == "all_gather"}
    assert LINEAR + norms in gathers
    assert static_memory(s)[0].weights == 4 * static_memory(s)[0].params / 2
    s = fp8_of(
        plan={"dp": 2, "zero": 3, "sharding_library": "deepspeed"}, run={"fp8_weights": True}
    )
    assert static_memory(s)[0].weights == (2 * static_memory(s)[0].params - 4 * LINEAR) / 2


# Blocks of 32 lie in both directions, 33 / 32 bytes each. Held in full, weights move in bf16 and
# every rank casts all; gathered for each use, a rank casts its shard both ways and one way moves.
def test_weights_in_blocks_lie_both_ways(fp8_of: Any) -> None:
    mx = {"fp8_weights": True, "fp8_scaling": "mxfp8"}
    s = fp8_of(plan={"dp": 2, "zero": 1}, run=mx, architecture="blackwell")
    stage, low, byte = static_memory(s)[0], 4 * LINEAR, 33 / 32
    assert stage.weights == 2 * (stage.params - low) + 2 * byte * low
    assert optimizer_kernels(s)["weight cast"].bytes == (2 + 2 * byte) * low
    gathers = [c.bytes for c in lower(s).costs if isinstance(c, Flow) and c.name == "all_gather"]
    assert gathers == [2 * stage.params]
    plan = {"dp": 2, "zero": 3, "sharding_library": "deepspeed"}
    s = fp8_of(plan=plan, run=mx, architecture="blackwell")
    assert static_memory(s)[0].weights == (2 * (stage.params - low) + 2 * byte * low) / 2
    assert optimizer_kernels(s)["weight cast"].bytes == (2 + 2 * byte) * low / 2
    gathers = [c.bytes for c in lower(s).costs if isinstance(c, Flow) and c.name == "all_gather"]
    assert byte * LINEAR + 2 * 2 * 64 in gathers


def test_blackwell_transposes_nothing(fp8_of: Any) -> None:
    s = fp8_of(plan={"dp": 2, "zero": 3}, run={"fp8_weights": True}, architecture="blackwell")
    assert "fc1 weight transpose" not in kernels(*layer_of(s)["fc1"].input_grad)


# 2e14 FLOP/s in fp8, half of it sustained there and all of it in bf16.
def test_products_sustain_a_share_of_the_peak_by_precision(cluster_of: Any) -> None:
    rates = {"peak": RATES, "matmul_efficiency_in": {"fp8": 0.5}}
    device = cluster_of(device=rates).node.device
    for dtype, seconds in (("fp8", 1e-4), ("bf16", 1e-4), ("fp16", 1e-4)):
        kernel = Kernel("k", 1e10, 1.0, dtype, (1, 1, 1, 1))
        assert kernel_seconds(kernel, device) == (seconds, "compute")


def test_fp8_takes_less_time_than_bf16(fp8_of: Any) -> None:
    plain = {"precision": "bf16"}
    size = {"sequence": 8192}
    models = [fp8_of(run=run) for run in (FP8, plain)]
    wide = [
        replace(s, model=replace(s.model, hidden_size=8192, intermediate_size=32768), run=replace(
            s.run, sequence_length=size["sequence"])) for s in models
    ]  # fmt: skip
    fast, slow = (sim.simulate(s).step_time_s for s in wide)
    assert 0.5 < fast / slow < 0.8


@pytest.mark.parametrize("detail", ["stage", "layer", "kernel"])
@pytest.mark.parametrize("plan", [
    {"dp": 2, "zero": 3, "recompute": "full"},
    {"dp": 2, "zero": 3, "recompute": "selective-op"},
    {"tp": 2, "pp": 2, "sequence_parallel": True, "tp_overlap": "all"},
])  # fmt: skip
@pytest.mark.parametrize("alone", [False, True])
def test_engines_agree_and_nothing_stays_alive(
    fp8_of: Any, plan: Any, detail: str, alone: bool
) -> None:
    s = fp8_of(plan=plan, run={"detail": detail, "compiled": True, "fp8_weights": alone})
    program = lower(s)
    same_in_all(program, price(program, s.cluster))
    memory = sim.simulate(s).memory
    assert memory.of_rank(0)[1][-1] == pytest.approx(0.0)


def test_assumptions_name_what_is_not_in_fp8(fp8_of: Any) -> None:
    text = "\n".join(assumptions(fp8_of(matmul_efficiency_in={"fp8": 0.5})))
    assert "50.0% of the fp8 peak" in text
    assert "attention and head in bf16" in text


def test_a_device_without_a_rate_for_fp8_is_refused(scenario_of: Any) -> None:
    with pytest.raises(DescriptionError, match="'fp8': round device has no rate for it"):
        scenario_of(run=FP8)


def test_a_scaling_without_fp8_is_refused(scenario_of: Any) -> None:
    with pytest.raises(DescriptionError, match=r"'current' is for run\.precision 'fp8'"):
        scenario_of(run={"fp8_scaling": "current"})


@pytest.mark.parametrize(
    ("plan", "run", "words"),
    [
        ({}, {"precision": "bf16"}, "fp8_weights is for run.precision 'fp8', not 'bf16'"),
        ({}, {"frozen_layers": 1}, "fp8_weights is not modelled with run.frozen_layers"),
        ({"offload_optimizer": True}, {}, "fp8_weights is not modelled with plan.offload_optim"),
    ],
)
def test_weights_in_fp8_alone_have_their_limits(fp8_of: Any, plan: Any, run: Any, words: str):
    with pytest.raises(DescriptionError, match=words):
        fp8_of(plan=plan, run={"fp8_weights": True, **run})


# ---- compiled layers ----


# Apart: the sum reads 2 and writes 1, the norm reads and writes 1; backward the norm reads 2 and
# writes 1, the sum of gradients reads 2 and writes 1. As one: 4 either way. 2 bytes, 32 x 64.
def test_a_compiled_layer_does_not_read_what_lies_between_sum_and_norm(
    scenario_of: Any, llama: Model
) -> None:
    plain, compiled = (
        layer_of(scenario_of(model=llama, run={"compiled": flag})) for flag in (False, True)
    )
    size = 2 * 32 * 64
    both = (plain["attention residual"], plain["mlp norm"])
    assert sum(o.forward[0].bytes for o in both) == 5 * size
    assert sum(o.input_grad[0].bytes for o in both) == 6 * size
    assert "attention residual" not in compiled
    one = compiled["mlp norm"]
    assert (one.forward[0].bytes, one.input_grad[0].bytes) == (4 * size, 4 * size)
    assert one.params == plain["mlp norm"].params
    assert one.kept_bytes == plain["mlp norm"].kept_bytes


# ---- tensor-parallel collectives beside products ----


def ticks_of(s: Scenario) -> dict[str, int]:
    p = lower(s)
    ticks = price(p, s.cluster).reshape(len(p.rank), -1)[:, 0]
    return {p.costs[c].name: int(t) for c, t in zip(p.cost.tolist(), ticks.tolist(), strict=True)}


# One layer and microbatch: beside what `grads` hides, each of qkv and fc1 runs beside its gather
# forward, each of proj and fc2 beside its reduce-scatter, and beside the gather of its result's
# gradient in backward, where the weight's gradient comes after the input's.
@pytest.mark.parametrize("detail", ["stage", "layer", "kernel"])
def test_collectives_run_beside_the_products_that_they_feed_or_follow(
    scenario_of: Any, llama: Model, detail: str
) -> None:
    model = replace(llama, num_hidden_layers=1)

    def scenario(overlap: str, detail: str) -> Scenario:
        plan = {"tp": 2, "sequence_parallel": True, "tp_overlap": overlap}
        run = {"num_steps": 1, "detail": detail}
        made: Scenario = scenario_of(model=model, plan=plan, run=run, batch=1)
        return made

    took = ticks_of(scenario("none", "kernel"))
    gather, scatter = took["all_gather"], took["reduce_scatter"]
    saved = sum(min(gather, took[name]) for name in ("qkv", "fc1"))
    saved += sum(min(scatter, took[name]) for name in ("proj", "fc2"))
    backward = [took[f"{name} dgrad"] + took[f"{name} wgrad"] for name in ("proj", "fc2")]
    saved += sum(min(gather, both) for both in backward)
    before = sim.simulate(scenario("grads", detail)).timeline.makespan
    after = sim.simulate(scenario("all", detail)).timeline.makespan
    assert before - after == pytest.approx(saved, abs=10)  # joined work is rounded once


def test_pieces_need_sequence_parallelism(scenario_of: Any) -> None:
    with pytest.raises(DescriptionError, match="'all' is for sequence_parallel"):
        scenario_of(plan={"tp": 2, "tp_overlap": "all"})


# --- blocks of 32 with a scale of a byte each -------------------------------------------------

MX = {"fp8_scaling": "mxfp8"}
LOW = 1 + 1 / 32


@pytest.fixture
def mx_of(fp8_of: Any) -> Callable[..., Scenario]:
    def make(plan: dict[str, Any] | None = None, **device: Any) -> Scenario:
        made: Scenario = fp8_of(plan, MX, **{"architecture": "blackwell", **device})
        return made

    return make


# Two bytes read once; written along either dimension, a scale of a byte beside each 32.
def test_blocks_are_cast_for_both_directions_in_one_pass(mx_of: Any) -> None:
    qkv = layer_of(mx_of())["qkv"]
    assert kernels(*qkv.forward)["qkv cast"].bytes == (2 + 2 * LOW) * 32 * 64
    assert qkv.kept_bytes == LOW * 32 * 64


def test_a_product_reads_the_scales_of_blocks_too(mx_of: Any) -> None:
    fc1 = kernels(*layer_of(mx_of())["fc1"].forward)["fc1"]
    assert fc1.bytes == LOW * (32 * 64 + 64 * 320) + 2 * 32 * 320


# Each of 2 ranks casts its 16 of 32 tokens for both directions; no copy is turned into the other.
def test_each_rank_casts_its_part_of_a_gathered_input_for_both_directions(mx_of: Any) -> None:
    s = mx_of({"tp": 2, "sequence_parallel": True})
    cast = kernels(*layer_of(s)["qkv"].forward)["qkv cast"]
    assert cast.bytes == (2 + 2 * LOW) * 16 * 64


def test_gathers_bring_blocks_with_their_scales(mx_of: Any) -> None:
    p = lower(mx_of({"tp": 2, "sequence_parallel": True})).flat
    sizes = {c.bytes for c in p.costs if isinstance(c, Flow) and c.name == "all_gather"}
    assert sizes == {LOW * 32 * 64, 2 * 32 * 64}


def test_weights_are_held_in_blocks_along_both_dimensions(mx_of: Any) -> None:
    stage = static_memory(mx_of())[0]
    assert stage.weights == 2 * stage.params + 2 * LOW * 4 * LINEAR


# A shard's gathered weight is cast for both products of its layer, and both copies stay.
def test_gathered_weights_are_cast_in_blocks_along_both_dimensions(mx_of: Any) -> None:
    fc1 = layer_of(mx_of({"dp": 2, "zero": 3}))["fc1"]
    assert kernels(*fc1.forward)["fc1 weight cast"].bytes == (2 + 2 * LOW) * 64 * 320
    assert fc1.kept_bytes == LOW * (32 * 64 + 2 * 64 * 320)


def test_only_blackwell_multiplies_blocks(mx_of: Any) -> None:
    with pytest.raises(DescriptionError, match="multiplies no blocks that have scales"):
        mx_of(architecture="hopper")


def test_engines_agree_in_blocks(mx_of: Any) -> None:
    s = mx_of({"tp": 2, "sequence_parallel": True, "pp": 2})
    program = lower(s)
    same_in_all(program, price(program, s.cluster))


def test_the_report_says_what_shares_a_scale(fp8_of: Any, mx_of: Any) -> None:
    assert any("one scale a tensor" in line for line in assumptions(fp8_of()))
    assert any("one scale for each 32 elements" in line for line in assumptions(mx_of()))
