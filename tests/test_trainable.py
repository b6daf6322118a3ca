"""Frozen layers and adapters: what they spare, what they add, what they keep."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from test_scenario_parity import alike_however_it_runs

import simulator as sim
from simulator.describe.model import Model
from simulator.describe.scenario import Scenario
from simulator.errors import DescriptionError
from simulator.hardware.compute import kernel_seconds
from simulator.lower import lower
from simulator.lower.layers import blocks, num_parameters, shapes
from simulator.lower.memory import static_memory
from simulator.lower.operators import Operator
from simulator.lower.trainable import model_flops_per_token, parameters, tuned
from simulator.program import ACTION_CODE, NONE, Flow, Kernel, Program, Work

ScenarioOf = Callable[..., Scenario]

# tiny-gpt: h 64, inner 256, vocabulary 128, 32 positions, 4 layers, biases, a tied head.
MATRICES, LAYER = 12 * 64 * 64, 12 * 64 * 64 + 13 * 64
EMBEDDING, TOKENS = (128 + 32) * 64, 32
LORA = {"lora_rank": 8}
# rank x (inputs + outputs) of qkv, proj, fc1 and fc2
ADAPTERS = 8 * ((64 + 192) + (64 + 64) + (64 + 256) + (256 + 64))


def seconds_of(parts: Iterable[object], s: Scenario) -> float:
    """Return what kernels take on one rank, each with its launch of 1 us."""
    device = s.cluster.node.device
    found = [part for part in parts if isinstance(part, Kernel)]
    return sum(kernel_seconds(kernel, device)[0] + 1e-6 for kernel in found)


def backward_of(operators: Iterable[Operator], s: Scenario) -> float:
    return sum(seconds_of(o.backward, s) for o in operators)


def step(s: Scenario) -> float:
    return sim.simulate(s).step_time_s


def flow_bytes(program: Program, stream: str) -> float:
    """Return what the flows of a stream carry in the first step, of one replica."""
    mine = (program.step == 0) & (program.joint != NONE)
    rows = np.flatnonzero(mine & (program.stream == program.streams.index(stream)))
    found = [program.costs[program.cost[row]] for row in rows.tolist()]
    return sum(flow.bytes for flow in found if isinstance(flow, Flow))


# ---- frozen layers ----


# Four microbatches spare the backward of two layers, that of the embedding and the gradient of the
# head's weight, which is the embedding's; the update spares 28 bytes of each of their parameters.
def test_frozen_layers_free_the_time_of_their_backward_exactly(scenario_of: ScenarioOf) -> None:
    s = scenario_of()
    parts = blocks(s.model, shapes(s))
    (head,) = (o for o in parts.head.operators if o.name == "head")
    spared = 2 * backward_of(parts.layer.operators, s) + seconds_of(head.weight_grad, s)
    spared += backward_of(parts.embedding.operators, s)
    update = 28 * (2 * LAYER + EMBEDDING) / 1e12
    freed = step(s) - step(scenario_of(run={"frozen_layers": 2}))
    assert freed == pytest.approx(4 * spared + update, rel=1e-9)


# The first trained layer alone: its weights' gradients are what is left of a layer more frozen.
def test_each_further_layer_frees_as_much(scenario_of: ScenarioOf, llama: Model) -> None:
    times = [step(scenario_of(model=llama, run={"frozen_layers": n})) for n in (1, 2, 3, 4)]
    assert np.diff(times, 2) == pytest.approx(0.0, abs=1e-11)
    assert times[0] > times[1]


# bf16: 2 bytes of every weight; gradient 2, master 4 and moments 8 of what is trained: two layers
# and the final norm.
def test_memory_of_frozen_layers_by_hand(scenario_of: ScenarioOf) -> None:
    (only,) = static_memory(scenario_of(run={"frozen_layers": 2}))
    trained = 2 * LAYER + 128
    assert only.params == 4 * LAYER + EMBEDDING + 128
    assert only.weights == 2 * only.params
    assert (only.gradients, only.optimizer) == (2 * trained, 12 * trained)


def test_an_untied_head_is_trained(scenario_of: ScenarioOf, llama: Model) -> None:
    s = scenario_of(model=llama, run={"frozen_layers": 4})
    assert parameters(s).trained == 64 + 64 * 128  # the final norm and the head
    assert static_memory(s)[0].gradients == 2 * (64 + 64 * 128)


# Frozen layers keep nothing, nor does the embedding; the head, tied, keeps no input of 2 * 32 * 64.
def test_frozen_layers_keep_no_activations(scenario_of: ScenarioOf) -> None:
    s = scenario_of(run={"frozen_layers": 3})
    parts = blocks(s.model, shapes(s))
    kept = parts.layer.kept_bytes + parts.head.kept_bytes - 2 * TOKENS * 64
    assert sim.simulate(s).activations.peak.tolist() == [kept]


# The tied head keeps its input divided by sequence: less than a whole one would free.
def test_what_is_frozen_keeps_no_less_than_nothing(scenario_of: ScenarioOf) -> None:
    s = scenario_of(plan={"tp": 4, "sequence_parallel": True}, run={"frozen_layers": 4})
    assert blocks(s.model, shapes(s)).head.kept_bytes >= 0
    assert (sim.simulate(s).activations.peak >= 0).all()


@pytest.mark.parametrize("frozen", [2, 3])
def test_stages_with_nothing_to_train_have_no_backward(
    scenario_of: ScenarioOf, frozen: int
) -> None:
    program = lower(scenario_of(plan={"pp": 4}, run={"frozen_layers": frozen}))
    kinds = {(int(k), int(stage)) for k, stage in zip(program.action, program.stage, strict=True)}
    stages = {name: {at for kind, at in kinds if kind == ACTION_CODE[name]} for name in ACTION_CODE}
    assert stages["F"] == {0, 1, 2, 3}
    assert stages["B"] == stages["OPT"] == set(range(frozen, 4))
    assert stages["SEND_B"] == set(range(frozen + 1, 4))  # the first trained stage sends no further
    assert stages["RECV_B"] == set(range(frozen, 3))


@pytest.mark.parametrize("frozen", [1, 2, 3])
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_only_gradients_that_are_trained_are_summed(
    scenario_of: ScenarioOf, llama: Model, frozen: int, zero: int
) -> None:
    s = scenario_of(
        model=llama, plan={"dp": 2, "zero": zero}, run={"frozen_layers": frozen}, batch=2
    )
    summed = flow_bytes(lower(s), "reduce" if zero else "dp")
    assert summed == 2 * parameters(s).trained
    if zero:  # and only their weights come back
        assert flow_bytes(lower(s), "unshard") == 2 * parameters(s).trained


def test_a_frozen_embedding_is_not_summed_over_the_ends(scenario_of: ScenarioOf) -> None:
    s = scenario_of(plan={"pp": 2}, run={"frozen_layers": 1})
    assert flow_bytes(lower(s), "tied") == 0.0


# Forward everywhere once, backward of two layers and the final head twice: 2 FLOPs a weight and
# token; attention 4 x heads x dim x sequence. Tied: the head's weight has no gradient.
def test_model_flops_leave_out_what_is_not_needed(scenario_of: ScenarioOf) -> None:
    layer = 2 * MATRICES + 4 * 64 * TOKENS
    head = 2 * 64 * 128
    s = scenario_of(run={"frozen_layers": 2})
    assert model_flops_per_token(s) == 2 * layer + 2 * 3 * layer + 2 * head


# ---- adapters ----


def test_parameters_of_adapters_by_hand(scenario_of: ScenarioOf) -> None:
    s = scenario_of(run=LORA)
    assert parameters(s) == (num_parameters(s.model) + 4 * ADAPTERS, 4 * ADAPTERS)


# Llama-2-7B, rank 16 on proj (4096 + 4096) and fc2 (11008 + 4096): 16 x 23296 a layer, of 32.
def test_adapters_of_some_products_of_llama_2_7b(scenario_of: ScenarioOf) -> None:
    llama = Model(
        name="llama-2-7b", hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=32, head_dim=128, vocab_size=32000,
        max_position_embeddings=4096, norm="rms_norm", activation="silu", gated_mlp=True,
        position="rotary", attention_bias=False, mlp_bias=False, tie_word_embeddings=False,
    )  # fmt: skip
    s = scenario_of(model=llama, run={"lora_rank": 16, "lora_targets": ("proj", "fc2")})
    assert parameters(s).trained == 16 * 23296 * 32 == 11_927_552


def test_layers_below_the_first_trained_one_have_no_adapters(scenario_of: ScenarioOf) -> None:
    s = scenario_of(run={**LORA, "frozen_layers": 3})
    assert parameters(s) == (num_parameters(s.model) + ADAPTERS, ADAPTERS)
    (only,) = static_memory(s)
    assert (only.params, only.gradients) == (parameters(s).total, 2 * ADAPTERS)


# bf16: 2 bytes a weight, adapters' too; 2 + 4 + 8 bytes more of each parameter of adapters.
def test_memory_of_adapters_by_hand(scenario_of: ScenarioOf) -> None:
    (only,) = static_memory(scenario_of(run=LORA))
    assert only.weights == 2 * (4 * LAYER + EMBEDDING + 128 + 4 * ADAPTERS)
    assert (only.gradients, only.optimizer) == (2 * 4 * ADAPTERS, 12 * 4 * ADAPTERS)


# 4 + 0.127 bits a weight of the matrices of layers (QLoRA, section 3); int8 one byte.
@pytest.mark.parametrize(("base", "size"), [("nf4", 4.127 / 8), ("int8", 1)])
def test_base_weights_lie_in_fewer_bytes(scenario_of: ScenarioOf, base: str, size: float) -> None:
    plain, short = (
        static_memory(scenario_of(run={**LORA, "base_weights": b}))[0] for b in (None, base)
    )
    assert plain.weights - short.weights == pytest.approx(4 * MATRICES * (2 - size))


def operator(s: Scenario, name: str) -> Operator:
    (found,) = (o for o in tuned(s).blocks.layer.operators if o.name == name)
    return found


# fc1, 64 to 256 at rank 8 and 32 tokens: x W, x A, (x A) B; dy W', dy B', dh A', then h' dy, x' dh.
def test_products_of_an_adapter(scenario_of: ScenarioOf) -> None:
    fc1 = operator(scenario_of(run=LORA), "fc1")
    matmuls = [k.matmul for k in fc1.forward + fc1.backward if isinstance(k, Kernel) and k.matmul]
    assert matmuls == [
        (1, 32, 256, 64), (1, 32, 8, 64), (1, 32, 256, 8),
        (1, 32, 64, 256), (1, 32, 8, 256), (1, 32, 64, 8),
        (1, 8, 256, 32), (1, 64, 8, 32),
    ]  # fmt: skip


# Each adds its output to another array and its input's gradient too: 3 moves of 2 bytes.
def test_an_adapter_adds_what_it_gives(scenario_of: ScenarioOf) -> None:
    fc1 = operator(scenario_of(run=LORA), "fc1")
    sums = [k.bytes for k in fc1.forward + fc1.backward if "adapter sum" in getattr(k, "name", "")]
    assert sums == [3 * 2 * TOKENS * 256, 3 * 2 * TOKENS * 64]


# x of fc1 for A's gradient, 2 * 32 * 64 bytes, and x A for B's, 2 * 32 * 8.
def test_an_adapter_keeps_its_input_and_the_narrow_product(scenario_of: ScenarioOf) -> None:
    assert operator(scenario_of(run=LORA), "fc1").kept_bytes == 2 * TOKENS * (64 + 8)


def test_a_product_without_adapter_keeps_nothing(scenario_of: ScenarioOf) -> None:
    s = scenario_of(run={**LORA, "lora_targets": ("qkv",)})
    fc1 = operator(s, "fc1")
    assert (fc1.kept_bytes, fc1.weight_grad, fc1.trained) == (0.0, (), 0)


# nf4 is read, 4.127 / 8 bytes, and bf16 written, 2, of 64 x 256 weights: forward and backward.
def test_quantised_weights_are_copied_out_before_each_product(scenario_of: ScenarioOf) -> None:
    fc1 = operator(scenario_of(run={**LORA, "base_weights": "nf4"}), "fc1")
    for parts in (fc1.forward, fc1.input_grad):
        copy, product, *_ = parts
        assert isinstance(copy, Kernel)
        assert isinstance(product, Kernel)
        assert copy.bytes == pytest.approx((4.127 / 8 + 2) * 64 * 256)
        assert product.matmul is not None


def test_frozen_layers_too_lie_in_base_weights(scenario_of: ScenarioOf) -> None:
    run = {**LORA, "base_weights": "int8", "frozen_layers": 2}
    (only,) = static_memory(scenario_of(run=run))
    assert only.weights == 2 * only.params - 4 * MATRICES
    names = {o.name for o in tuned(scenario_of(run=run)).still.operators for _ in o.forward}
    assert "fc1" in names


# Forward and the gradient of the input of each base product, all three of each adapter; attention
# as ever; the head passes its gradient on.
def test_model_flops_of_adapters(scenario_of: ScenarioOf) -> None:
    layer = 2 * 2 * MATRICES + 3 * 2 * ADAPTERS + 3 * 4 * 64 * TOKENS
    assert model_flops_per_token(scenario_of(run=LORA)) == 4 * layer + 2 * 2 * 64 * 128


def test_only_gradients_of_adapters_are_summed(scenario_of: ScenarioOf) -> None:
    s = scenario_of(plan={"dp": 2}, run=LORA)
    assert flow_bytes(lower(s), "dp") == 2 * 4 * ADAPTERS


def test_adapters_spare_time_and_memory_of_a_large_model() -> None:
    full, lora, short = (
        sim.simulate(sim.load("gpt2-xl-1gpu", changes))
        for changes in (
            {},
            {"run.lora_rank": 16},
            {"run.lora_rank": 16, "run.base_weights": "nf4"},
        )
    )
    assert full.step_time_s > short.step_time_s > lora.step_time_s  # copying out takes time
    peaks = [float(r.peak_memory_bytes[0]) for r in (full, lora, short)]
    assert peaks == sorted(peaks, reverse=True)


# ---- FSDP ----


# Each rank holds a half: of adapters the fp32 weight, 2-byte gradient turned 4 and moments; of the
# rest bf16, matrices of layers in 4.127 bits.
def test_fsdp_shards_what_is_frozen_as_it_computes(scenario_of: ScenarioOf) -> None:
    run = {**LORA, "base_weights": "nf4"}
    (only,) = static_memory(scenario_of(plan={"dp": 2, "zero": 3}, run=run))
    other = 4 * 13 * 64 + EMBEDDING + 128
    base = 4 * MATRICES * 4.127 / 8
    assert only.weights == pytest.approx((4 * 4 * ADAPTERS + 2 * other + base) / 2)
    assert (only.gradients, only.optimizer) == (4 * 4 * ADAPTERS / 2, 8 * 4 * ADAPTERS / 2)


# One microbatch: all blocks gathered forward, layers again in backward; the head, its weight the
# embedding's, stays. Nothing but adapters is reduced.
@pytest.mark.parametrize(("base", "size"), [(None, 2), ("int8", 1)])
def test_fsdp_gathers_weights_as_they_lie(
    scenario_of: ScenarioOf, base: str | None, size: int
) -> None:
    run = {**LORA, "base_weights": base}
    program = lower(scenario_of(plan={"dp": 2, "zero": 3}, run=run, batch=2))
    layers = 4 * (size * MATRICES + 2 * (13 * 64 + ADAPTERS))
    head = 2 * (128 + 64 * 128)
    assert flow_bytes(program, "unshard") == 2 * layers + 2 * EMBEDDING + head
    assert flow_bytes(program, "reduce") == 2 * 4 * ADAPTERS


def test_fsdp_gathers_frozen_layers_once(scenario_of: ScenarioOf, llama: Model) -> None:
    plan = {"dp": 2, "zero": 3}
    some, more = (
        flow_bytes(
            lower(scenario_of(model=llama, plan=plan, run={"frozen_layers": n}, batch=2)),
            "unshard",
        )
        for n in (1, 2)
    )
    (layer,) = {blocks(llama, shapes(scenario_of(model=llama))).layer.params}
    assert some - more == 2 * layer


# ---- both, under plans ----

PLANS = (
    {"dp": 2, "pp": 2},
    {"dp": 2, "pp": 4, "zero": 2},
    {"dp": 2, "zero": 1, "recompute": "full"},
    {"dp": 2, "zero": 3},
    {"dp": 2, "zero": 3, "pp": 2, "reshard_after_forward": False},
    {"dp": 4, "zero": 3, "dp_shard": 2, "prefetch": 0, "recompute": "full"},
    {"pp": 2, "chunks": 2, "schedule": "Interleaved1F1B", "dp": 2},
    {"pp": 3, "recompute": "full", "recompute_layers": 1, "schedule": "GPipe"},
    {"dp": 2, "gradient_exchange": "parameter_server", "staleness": 1},
)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("run", [{"frozen_layers": 2}, {**LORA, "frozen_layers": 1}, LORA])
@pytest.mark.parametrize("detail", ["stage", "kernel"])
def test_engines_agree_and_memory_returns(
    scenario_of: ScenarioOf, plan: dict[str, Any], run: dict[str, Any], detail: str
) -> None:
    s = scenario_of(plan=plan, run={**run, "detail": detail})
    alike_however_it_runs(s)
    memory = sim.simulate(s).memory
    for rank in range(s.plan.world_size):
        alive = memory.of_rank(rank)[1]
        assert alive.min(initial=0.0) >= 0.0
        assert not alive.size or alive[-1] == 0.0


@pytest.mark.parametrize("detail", ["stage", "layer", "kernel"])
def test_detail_moves_no_time(scenario_of: ScenarioOf, detail: str) -> None:
    run = {**LORA, "frozen_layers": 1, "base_weights": "nf4"}
    times = [step(scenario_of(run={**run, "detail": d})) for d in ("kernel", detail)]
    assert times[1] == pytest.approx(times[0], rel=1e-7)  # kernels are rounded to a picosecond


def test_frozen_layers_with_tensor_parallelism_keep_their_forward_collectives(
    scenario_of: ScenarioOf,
) -> None:
    plan = {"tp": 2, "sequence_parallel": True}
    s = scenario_of(plan=plan, run={"frozen_layers": 4, "detail": "kernel"})
    program = lower(s)
    one = (program.step == 0) & (program.microbatch == 0)
    mine = one & (program.rank == 0) & (program.layer == 1)
    mine &= program.stream == program.streams.index("tp")
    assert np.count_nonzero(mine) == 4  # two regions a layer: gather, reduce-scatter


def test_a_frozen_stage_takes_part_in_a_norm(scenario_of: ScenarioOf) -> None:
    s = scenario_of(plan={"pp": 2}, run={"frozen_layers": 2, "clip_grad": True})
    alike_however_it_runs(s)
    norms = [c for c in lower(s).costs if isinstance(c, Work) and c.name == "gradient norm"]
    assert [c.kernels[0].bytes for c in norms] == [2 * (2 * LAYER + 128)]


def test_the_report_counts_both_kinds_of_parameters(scenario_of: ScenarioOf) -> None:
    result = sim.simulate(scenario_of(run=LORA))
    assert result.to_dict()["parameters"] == {
        "total": num_parameters(result.scenario.model) + 4 * ADAPTERS,  # type: ignore[union-attr]
        "trained": 4 * ADAPTERS,
        "active": num_parameters(result.scenario.model) + 4 * ADAPTERS,  # type: ignore[union-attr]
    }
    assert "32.77 thousand of them trained" in str(result)
    assert "LoRA rank 8" in str(result)


# Full recomputation repeats the forward of the two layers that are trained, not of all four.
def test_frozen_layers_recompute_nothing(scenario_of: ScenarioOf) -> None:
    plan = {"recompute": "full"}
    every, some = (
        sim.simulate(scenario_of(plan=plan, run={"frozen_layers": n})).summary for n in (0, 2)
    )
    layer = 2 * MATRICES + 4 * 64 * TOKENS
    assert every.hfu / every.mfu == pytest.approx(1 + 4 * layer / (12 * layer + 3 * 2 * 64 * 128))
    assert some.hfu / some.mfu == pytest.approx(1 + 2 * layer / (8 * layer + 2 * 2 * 64 * 128))


# ---- refused ----


@pytest.mark.parametrize(
    ("plan", "run", "said"),
    [
        ({}, {"frozen_layers": 5}, "frozen_layers 5: tiny-gpt has 4 layers"),
        ({}, {**LORA, "frozen_layers": 4}, "adapters need one that is not frozen"),
        ({"tp": 2}, LORA, "lora_rank 8 with plan.tp 2"),
        ({}, {"base_weights": "nf4"}, "base_weights: 'nf4' is for adapters"),
        ({}, {"lora_targets": ("qkv",)}, "lora_targets: .* is for adapters"),
        ({}, {**LORA, "lora_targets": ()}, "must name one or more"),
        ({}, {**LORA, "lora_targets": ("qkv", "qkv")}, "each once"),
        ({}, {**LORA, "fake_quantization": True}, "but lora_rank 8 freezes them"),
        ({}, {**LORA, "precision": "fp8"}, "'fp8' with run.lora_rank"),
        ({}, {"fake_quantization": True, "precision": "fp8"}, "'fp8' with run.fake_quantization"),
        (
            {"pp": 2, "chunks": 2, "schedule": "Interleaved1F1B", "p2p_overlap": False},
            {"frozen_layers": 1},
            "a rank would wait for them",
        ),
    ],
)
def test_what_contradicts_is_refused(
    scenario_of: ScenarioOf, plan: dict[str, Any], run: dict[str, Any], said: str
) -> None:
    with pytest.raises(DescriptionError, match=said):
        scenario_of(plan=plan, run=run)
