"""Models as operators, and operators as programs: parameters, FLOPs, activations, collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import simulator as sim
from simulator.describe.loader import scenario as scenario_from
from simulator.describe.model import Model
from simulator.describe.scenario import Scenario
from simulator.lower import lower, lower_schedule
from simulator.lower.layers import (
    Shapes,
    blocks,
    model_flops_per_token,
    num_parameters,
    recomputed_flops_per_token,
    shapes,
)
from simulator.lower.memory import static_memory
from simulator.lower.operators import Elements
from simulator.program import Flow, Program, Work
from simulator.schedules import actions_of

HALF = Elements(2, 2, 2, "bf16")
ScenarioOf = Callable[..., Scenario]


def catalogued(model: str, sequence: int, **plan: Any) -> Scenario:
    """Return a scenario of a model of the catalogue on one DGX H100."""
    table = {
        "model": model,
        "cluster": {"node": "dgx-h100", "devices_per_node": plan.get("tp", 1)},
        "plan": {"dp": 1, **plan},
        "run": {"global_batch_size": 1, "sequence_length": sequence},
    }
    return scenario_from(table, Path("test.toml"))


# gpt2: V=50257, h=768, L=12, 1024 positions. Embeddings (50257+1024)*768 = 39 383 808; a layer has
# 3h^2+3h (qkv), h^2+h (proj), 4h^2+4h and 4h^2+h (mlp), 4h (norms) = 12h^2+13h = 7 087 872, times
# 12 = 85 054 464; final norm 2h = 1 536; the head is tied. Sum 124 439 808.
# gpt2-xl: h=1600, L=48: 51281*1600 = 82 049 600; 48*(12*2.56e6+13*1600) = 1 475 558 400; 3 200.
# llama-3-8b: h=4096, kv 1024, inner 14336, L=32, V=128256, not tied: 2*128256*4096 = 1 050 673 152;
# a layer 2*4096^2 + 2*4096*1024 + 3*4096*14336 + 2*4096 = 218 112 000, times 32; 4 096.
# 70b: h=8192, kv 1024, inner 28672, L=80: 2*128256*8192 = 2 101 346 304; a layer 2*8192^2 +
# 2*8192*1024 + 3*8192*28672 + 2*8192 = 855 654 400; 8 192.
# mistral-7b is llama's layer with 32000 tokens: 262 144 000 + 32*218 112 000 + 4 096.
# qwen2.5-7b: h=3584, kv 512, inner 18944, L=28, V=152064, biases of q, k and v: 1 089 994 752; a
# layer 2*3584^2 + 3584 + 2*(3584*512 + 512) + 3*3584*18944 + 2*3584 = 233 057 792; 3 584.
# qwen3-8b: h=4096, kv 1024, inner 12288, L=36, V=151936: 1 244 659 712; a layer 2*4096^2 +
# 2*4096*1024 + 3*4096*12288 + 2*4096 + 2*128 = 192 946 432; 4 096.
# 405b: h=16384, kv 1024, inner 53248, L=126: 4 202 692 608; 2*16384^2 + 2*16384*1024 +
# 3*16384*53248 + 2*16384 = 3 187 703 808; 16 384.
@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("gpt2", 39_383_808 + 12 * 7_087_872 + 1_536),
        ("gpt2", 124_439_808),
        ("gpt2-xl", 82_049_600 + 1_475_558_400 + 3_200),
        ("gpt2-xl", 1_557_611_200),
        ("llama-3-8b", 1_050_673_152 + 32 * 218_112_000 + 4_096),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 2_101_346_304 + 80 * 855_654_400 + 8_192),
        ("llama-3-70b", 70_553_706_496),
        ("llama-3-405b", 4_202_692_608 + 126 * 3_187_703_808 + 16_384),
        ("llama-3-405b", 405_853_388_800),
        ("mistral-7b", 7_241_732_096),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen3-8b", 8_190_735_360),
    ],
)
def test_parameter_counts_are_right_to_the_unit(model: str, parameters: int) -> None:
    assert num_parameters(catalogued(model, 1024).model) == parameters


# 6N + 12 L h s with N the weights that multiply (head yes, look-up no, norms and biases no).
# gpt2-xl, s=1024: N = 48*12*1600^2 + 50257*1600 = 1 474 560 000 + 80 411 200 = 1 554 971 200;
# 6N = 9 329 827 200; 12*48*1600*1024 = 943 718 400.
# llama-3-8b, s=8192: N = 32*(2*4096^2 + 2*4096*1024 + 3*4096*14336) + 128256*4096
# = 32*218 103 808 + 525 336 576 = 7 504 658 432; 6N = 45 027 950 592;
# 12*32*4096*8192 = 12 884 901 888.
# llama-3-70b, s=8192: N = 80*855 638 016 + 128256*8192 = 68 451 041 280 + 1 050 673 152
# = 69 501 714 432; 6N = 417 010 286 592; 12*80*8192*8192 = 64 424 509 440.
@pytest.mark.parametrize(
    ("model", "sequence", "flops"),
    [
        ("gpt2-xl", 1024, 9_329_827_200 + 943_718_400),
        ("llama-3-8b", 8192, 45_027_950_592 + 12_884_901_888),
        ("llama-3-70b", 8192, 417_010_286_592 + 64_424_509_440),
    ],
)
def test_training_flops_of_a_token_are_six_per_weight_and_attention(
    model: str, sequence: int, flops: int
) -> None:
    assert model_flops_per_token(catalogued(model, sequence)) == flops


def test_model_flops_of_a_token_do_not_depend_on_the_plan() -> None:
    alone = catalogued("llama-3-8b", 4096)
    split = catalogued("llama-3-8b", 4096, tp=8)
    assert model_flops_per_token(alone) == model_flops_per_token(split)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_flops_of_a_token_do_not_depend_on_the_plan(recompute: str) -> None:
    alone = catalogued("llama-3-8b", 4096, recompute=recompute)
    split = catalogued("llama-3-8b", 4096, recompute=recompute, tp=8)
    assert recomputed_flops_per_token(alone) == recomputed_flops_per_token(split) > 0


# Question 35: 5762 tokens/s on an H100 of 989 TFLOP/s at s=8192 is 35.6 % by this convention when
# N is 8.03e9; with the look-up's 0.53e9 left out of N: 5762 * 57.913e9 / 989e12 = 33.7 %.
def test_question_35_the_mfu_convention_leaves_the_look_up_out() -> None:
    mfu = 5762 * model_flops_per_token(catalogued("llama-3-8b", 8192)) / 989e12
    np.testing.assert_allclose(mfu, 0.3374, atol=5e-5)
    with_look_up = 5762 * (6 * 8_030_261_248 + 12_884_901_888) / 989e12
    np.testing.assert_allclose(with_look_up, 0.356, atol=5e-4)


def kept(model: Model, s: int, b: int, t: int, attention: str = "unfused") -> float:
    x = Shapes(microbatch_size=b, sequence_length=s, tp=t, elements=HALF, attention=attention)
    return blocks(model, x).layer.kept_bytes


# Korthikanti et al., 2022, equation 1. Per token and hidden unit in bytes: norm inputs 2+2; inputs
# of qkv 2, proj 2, fc1 2, fc2 8, gelu 8; q and k 4, v 2; two dropout masks 1+1: 34. Per score:
# softmax 2, dropped-out 2, mask 1: 5.
@pytest.mark.parametrize(
    ("hidden", "heads", "s", "b"), [(64, 4, 32, 1), (1600, 25, 1024, 8), (12288, 96, 2048, 1)]
)
def test_a_gpt_layer_keeps_what_korthikanti_counts(
    gpt: Model, hidden: int, heads: int, s: int, b: int
) -> None:
    model = replace(
        gpt, hidden_size=hidden, intermediate_size=4 * hidden, num_attention_heads=heads,
        num_key_value_heads=heads, head_dim=hidden // heads,
    )  # fmt: skip
    assert kept(model, s, b, 1) == 34 * s * b * hidden + 5 * heads * s * s * b


# Equation 2: norm inputs, the inputs of qkv and fc1, and the dropout masks (10) lie on every rank.
# Here 22B of the paper: h=6144, a=64, s=2048, b=4: 10 + 24/t and 5as/h = 106.67 over t.
@pytest.mark.parametrize("t", [2, 4, 8])
def test_tensor_parallel_divides_what_korthikanti_says(gpt: Model, t: int) -> None:
    h, a, s, b = 6144, 64, 2048, 4
    model = replace(
        gpt, hidden_size=h, intermediate_size=4 * h, num_attention_heads=a,
        num_key_value_heads=a, head_dim=h // a,
    )  # fmt: skip
    assert kept(model, s, b, t) == 10 * s * b * h + 24 * s * b * h // t + 5 * a * s * s * b // t


# Flash attention keeps no scores but one fp32 a row and head: 34sbh + 4abs.
def test_flash_attention_keeps_no_scores(gpt: Model) -> None:
    h, a, s, b = 64, 4, 32, 2
    assert kept(gpt, s, b, 1, "flash") == 34 * s * b * h + 4 * a * b * s


# Without dropout neither the 2 masks of sbh, nor the scores' mask (1) and their second copy (2).
def test_without_dropout_a_layer_keeps_no_masks(gpt: Model) -> None:
    h, a, s, b = 64, 4, 32, 2
    model = replace(gpt, hidden_dropout=0.0, attention_dropout=0.0)
    assert kept(model, s, b, 1) == 32 * s * b * h + 2 * a * s * s * b


# tiny-llama: h=64, 4 query and 2 kv heads of 16, inner 160. Elements of a token: norms 2*64, qkv in
# 64, q+k+v 64+32+32, proj in 64, fc1 in 64, gate and up 2*160, fc2 in 160; flash 4 bytes * 4 heads.
def test_a_llama_layer_keeps_grouped_heads_and_both_halves_of_the_gate(llama: Model) -> None:
    s, b = 32, 2
    elements = 2 * 64 + 64 + (64 + 32 + 32) + 64 + 64 + 2 * 160 + 160
    assert kept(llama, s, b, 1, "flash") == s * b * (2 * elements + 4 * 4)


# Korthikanti et al., section 4.1: inputs of the last norm and of the head 2sbh each, fp32 logits
# 4sbv (divided over t with the vocabulary); the embedding keeps its dropout's mask, sbh.
@pytest.mark.parametrize("t", [1, 2, 4])
def test_the_ends_of_the_model_keep_what_korthikanti_counts(gpt: Model, t: int) -> None:
    s, b, h, v = 32, 2, 64, 128
    x = Shapes(microbatch_size=b, sequence_length=s, tp=t, elements=HALF, attention="unfused")
    parts = blocks(gpt, x)
    assert parts.head.kept_bytes == 4 * s * b * h + 4 * s * b * v // t
    assert parts.embedding.kept_bytes == s * b * h


# 33 000 are past an int16's 32 767.
def test_microbatches_keep_their_numbers_however_many_there_are() -> None:
    program = lower_schedule(actions_of("GPipe", 1, 33_000))
    assert int(program.microbatch.min()) == 0
    assert int(program.microbatch.max()) == 32_999


def work(program: Program) -> list[tuple[int, Work]]:
    """Return (op, cost) of all work."""
    return [
        (op, cost)
        for op in range(len(program))
        if isinstance(cost := program.costs[program.cost[op]], Work)
    ]


def flows(program: Program, stream: str) -> list[tuple[int, Flow]]:
    code = program.streams.index(stream)
    return [
        (op, cost)
        for op in range(len(program))
        if program.stream[op] == code and isinstance(cost := program.costs[program.cost[op]], Flow)
    ]


def matmul_flops(program: Program) -> float:
    """Return the FLOPs of products, without element-wise work, in all ops."""
    return sum(k.flops for _, cost in work(program) for k in cost.kernels if k.dtype != "fp32")


# tiny-gpt (h=64, L=4, V=128), s=32, one token: N = 4*12*64^2 + 128*64 = 204 800. Unfused attention
# multiplies all scores: 12Lhs = 98 304. 4 microbatches of 32 tokens.
@pytest.mark.parametrize("plan", [{}, {"pp": 2}, {"tp": 2}, {"tp": 4, "pp": 4}, {"dp": 2, "tp": 2}])
def test_the_program_does_the_flops_of_the_formula(
    scenario_of: ScenarioOf, plan: dict[str, int]
) -> None:
    s = scenario_of(plan=plan, run={"attention": "unfused", "num_steps": 1})
    tokens = 4 * 32 * plan.get("dp", 1)
    assert matmul_flops(lower(s).flat) == tokens * (6 * 204_800 + 98_304)
    assert model_flops_per_token(s) == 6 * 204_800 + 98_304


# Causal flash attention multiplies half of the scores (2 s^2 d b a forward instead of 4), and five
# products instead of four backward: 2 + 5 halves of 12Lhs/6 instead of 2 + 4 wholes: 7/12.
def test_flash_attention_skips_the_masked_half_and_recomputes_the_scores(
    scenario_of: ScenarioOf,
) -> None:
    s = scenario_of(run={"attention": "flash", "num_steps": 1})
    assert matmul_flops(lower(s).flat) == 4 * 32 * (6 * 204_800 + 98_304 * 7 / 12)


# Recomputation repeats the forward of the layers, 2*4*12*64^2 + 4*4*64*32 a token, not the head's.
def test_recomputation_repeats_the_forward_of_the_layers(scenario_of: ScenarioOf) -> None:
    s = scenario_of(plan={"recompute": "full"}, run={"attention": "unfused", "num_steps": 1})
    again = 2 * 4 * 12 * 64**2 + 4 * 4 * 64 * 32
    assert matmul_flops(lower(s).flat) == 4 * 32 * (6 * 204_800 + 98_304 + again)
    assert recomputed_flops_per_token(s) == again


# Megatron-LM: one all-reduce after attention and one after the MLP forward, one before each
# backward: 4 a layer and microbatch; of the vocabulary: 1 after the embedding, 1 before the head
# backward, 3 small ones in the loss.
def test_tensor_parallelism_all_reduces_four_times_a_layer_and_microbatch(
    scenario_of: ScenarioOf,
) -> None:
    program = lower(scenario_of(plan={"tp": 2}, run={"num_steps": 1})).flat
    counts = Counter(
        (int(program.rank[op]), int(program.layer[op]), int(program.microbatch[op]))
        for op, _ in flows(program, "tp")
    )
    for rank in range(2):
        for m in range(4):
            assert [counts[rank, layer, m] for layer in range(-1, 4)] == [5, 4, 4, 4, 4]


# Each moves the activations of the microbatch: 2 bytes * 32 tokens * 64; the loss fp32 a token.
def test_tensor_parallel_all_reduces_move_the_activations(scenario_of: ScenarioOf) -> None:
    program = lower(scenario_of(plan={"tp": 2}, run={"num_steps": 1})).flat
    sizes = Counter(cost.bytes for op, cost in flows(program, "tp") if program.rank[op] == 0)
    assert sizes == {2.0 * 32 * 64: 4 * (4 * 4 + 2), 4.0 * 32: 4 * 3}


# A recomputed forward all-reduces again: 2 more a layer.
def test_recomputation_repeats_the_all_reduces_of_the_forward(scenario_of: ScenarioOf) -> None:
    program = lower(scenario_of(plan={"tp": 2, "recompute": "full"}, run={"num_steps": 1})).flat
    layers = [op for op, _ in flows(program, "tp") if program.layer[op] == 2]
    assert len(layers) == 2 * 4 * 6  # ranks x microbatches x all-reduces


# bf16 gradients: 2 bytes a parameter that the rank holds, reduced once a step.
@pytest.mark.parametrize("detail", ["layer", "kernel"])
@pytest.mark.parametrize("bucket", [1.0, 1e5, 25e6])
@pytest.mark.parametrize("plan", [{}, {"pp": 2}, {"tp": 2}, {"pp": 2, "tp": 2}])
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_a_rank_reduces_each_of_its_gradients_once(
    scenario_of: ScenarioOf,
    request: pytest.FixtureRequest,
    name: str,
    plan: dict[str, int],
    bucket: float,
    detail: str,
) -> None:
    s = scenario_of(
        model=request.getfixturevalue(name),
        plan={"dp": 2, "bucket_size": bucket, **plan},
        run={"num_steps": 1, "detail": detail},
    )
    program = lower(s).flat
    reduced: Counter[int] = Counter()
    for op, cost in flows(program, "dp"):
        reduced[int(program.rank[op])] += int(cost.bytes)
    gradients = [int(stage.gradients) for stage in static_memory(s)]
    # order dp, pp, tp: rank = (dp * pp + stage) * tp + t
    stage_of = [rank // s.plan.tp % s.plan.pp for rank in range(s.plan.world_size)]
    assert [reduced[rank] for rank in range(s.plan.world_size)] == [gradients[g] for g in stage_of]


# tiny-gpt: embedding (128+32)*64 = 10 240; layer 12*64^2 + 13*64 = 49 984; head 2*64 tied.
def test_a_tied_embedding_of_one_stage_is_one_parameter(scenario_of: ScenarioOf) -> None:
    (only,) = static_memory(scenario_of())
    assert only.params == 10_240 + 4 * 49_984 + 128
    assert only.params == num_parameters(scenario_of().model)


# Megatron-LM keeps a copy on the last stage: + 128*64, summed once a step over the two.
def test_a_tied_embedding_of_two_stages_is_summed_between_them(scenario_of: ScenarioOf) -> None:
    s = scenario_of(plan={"pp": 2}, run={"num_steps": 1})
    assert [stage.params for stage in static_memory(s)] == [
        10_240 + 2 * 49_984,
        2 * 49_984 + 128 + 8_192,
    ]
    program = lower(s).flat
    assert [(int(program.rank[op]), cost.bytes) for op, cost in flows(program, "tied")] == [
        (0, 2.0 * 8_192),
        (1, 2.0 * 8_192),
    ]


def test_an_untied_head_is_not_summed_with_the_embedding(
    scenario_of: ScenarioOf, llama: Model
) -> None:
    assert not flows(lower(scenario_of(model=llama, plan={"pp": 2})).flat, "tied")


# Question 32: dp 2 x pp 2 x tp 2, every axis moves bytes; pp sends each microbatch's activations
# forward and their gradients back: 2 bytes * 32 tokens * 64.
def test_question_32_every_parallel_axis_emits_flows(scenario_of: ScenarioOf) -> None:
    program = lower(scenario_of(plan={"dp": 2, "pp": 2, "tp": 2}, run={"num_steps": 1})).flat
    moved = {name: flows(program, name) for name in program.streams}
    assert all(moved[axis] for axis in ("dp", "tp", "tied"))
    messages = [cost.bytes for name in moved if name.startswith("send") for _, cost in moved[name]]
    assert messages == [2.0 * 32 * 64] * (
        4 * 2 * 4
    )  # replicas (dp, tp) x directions x microbatches


# With one rank on an axis there is nothing to say on it.
def test_a_single_rank_emits_no_flows(scenario_of: ScenarioOf) -> None:
    assert not lower(scenario_of()).flat.is_flow.any()


def coordinates(order: tuple[str, ...], degrees: dict[str, int], rank: int) -> dict[str, int]:
    """Take a rank apart: consecutive ranks differ along the last axis."""
    out = {}
    for axis in reversed(order):
        rank, out[axis] = divmod(rank, degrees[axis])
    return out


@pytest.mark.parametrize(
    "order", [("dp", "pp", "tp"), ("tp", "pp", "dp"), ("pp", "dp", "tp"), ("dp", "tp", "pp")]
)
def test_groups_join_the_ranks_that_differ_along_one_axis_only(
    scenario_of: ScenarioOf, order: tuple[str, ...]
) -> None:
    degrees = {"dp": 2, "pp": 4, "tp": 2}
    program = lower(scenario_of(plan={**degrees, "order": order}, run={"num_steps": 1})).flat
    for joint in range(len(program.joint_group)):
        ranks = program.groups[program.joint_group[joint]].tolist()
        here = [coordinates(order, degrees, rank) for rank in ranks]
        member = int(program.joint_members[joint][0])
        stream = program.streams[program.stream[member]]
        axis = stream if stream in ("dp", "tp") else "pp"
        varying = [a for a in degrees if len({c[a] for c in here}) > 1]
        assert varying == [axis]
        stages = sorted(c["pp"] for c in here)
        if stream in ("dp", "tp"):
            assert len(ranks) == degrees[axis]
        elif stream == "tied":
            assert stages == [0, 3]
        else:
            assert stages[1] - stages[0] == 1


# Kernels that follow each other on one stream take the sum of their times, joined or not; rounding
# to ticks differs by at most half a tick a kernel, some 200 kernels a microbatch and stage.
@pytest.mark.parametrize("attention", ["flash", "unfused"])
@pytest.mark.parametrize(
    "plan",
    [{}, {"pp": 2}, {"tp": 2}, {"pp": 4, "tp": 2, "schedule": "GPipe"}, {"recompute": "full"}],
)
def test_detail_does_not_change_the_step_time(
    scenario_of: ScenarioOf, plan: dict[str, Any], attention: str
) -> None:
    layer, kernel = (
        sim.simulate(scenario_of(plan=plan, run={"detail": detail, "attention": attention}))
        for detail in ("layer", "kernel")
    )
    assert len(kernel.program) > 2 * len(layer.program)
    np.testing.assert_allclose(
        kernel.timeline.makespan, layer.timeline.makespan, rtol=0, atol=2 * 8 * 200
    )


# One bucket of everything leaves after the last backward kernel, joined or not.
def test_detail_does_not_change_when_a_single_bucket_leaves(scenario_of: ScenarioOf) -> None:
    layer, kernel = (
        sim.simulate(
            scenario_of(plan={"dp": 4, "bucket_size": 1e9}, run={"detail": detail})
        ).timeline.makespan
        for detail in ("layer", "kernel")
    )
    np.testing.assert_allclose(kernel, layer, rtol=0, atol=2 * 8 * 200)


def test_shapes_of_a_scenario_are_those_of_its_precision(scenario_of: ScenarioOf) -> None:
    assert shapes(scenario_of(run={"precision": "fp32"})).elements == Elements(
        4, 4, 4, "fp32", "separate"
    )
    assert shapes(scenario_of(run={"precision": "fp16"})).elements == Elements(
        2, 2, 2, "fp16", "separate"
    )


# Buckets close where runs of kernels end, however finely those are cut: the detail moves no time.
@pytest.mark.parametrize("bucket", [1e4, 1e5, 25e6])
@pytest.mark.parametrize(
    "plan",
    [
        {"dp": 2},
        {"dp": 2, "tp": 2},
        {"dp": 2, "pp": 2, "recompute": "full"},
        {"dp": 2, "pp": 2, "tp": 2, "scatter_gather": True},
        {"dp": 2, "tp": 2, "sequence_parallel": True, "tp_overlap": "all"},
    ],
)
def test_the_detail_of_a_run_moves_no_time(
    scenario_of: ScenarioOf, plan: Any, bucket: float
) -> None:
    kernel, layer, stage = (
        sim.simulate(scenario_of(plan={**plan, "bucket_size": bucket}, run={"detail": detail}))
        for detail in ("kernel", "layer", "stage")
    )
    rounding = 1e-12 * len(kernel.tiled.rank)  # half a tick an op, at most
    assert kernel.step_time_s == pytest.approx(layer.step_time_s, abs=rounding)
    assert stage.step_time_s == pytest.approx(layer.step_time_s, abs=rounding)


# A layer has 12h^2 + 13h = 49,984 parameters (h = 64), 2 bytes each: 99,968. A first bucket of 1
# byte leaves with the head and its norm, later ones hold at least 150 kB: two layers each, and the
# last one, below that, the embedding.
@pytest.mark.parametrize("detail", ["layer", "stage"])
def test_the_first_bucket_may_be_smaller(scenario_of: ScenarioOf, gpt: Model, detail: str) -> None:
    model = replace(gpt, tie_word_embeddings=False)
    plan = {"dp": 2, "bucket_size": 150e3, "first_bucket_size": 1.0}
    run = {"num_steps": 1, "detail": detail}
    program = lower(scenario_of(model=model, plan=plan, run=run)).flat
    sent = [cost.bytes for op, cost in flows(program, "dp") if program.rank[op] == 0]
    head, embedding = 2.0 * (128 * 64 + 2 * 64), 2.0 * (128 + 32) * 64
    assert sent == [head, 2 * 99_968, 2 * 99_968, embedding]
