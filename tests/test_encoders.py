"""Encoders of text and images, and decoders with ALiBi: parameters, FLOPs, what they keep."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_scenario_parity import alike_however_it_runs

import simulator as sim
from simulator.describe import catalog
from simulator.describe.huggingface import read_config
from simulator.describe.loader import scenario
from simulator.describe.model import Model, Patches
from simulator.describe.scenario import Scenario
from simulator.errors import DescriptionError
from simulator.lower import lower
from simulator.lower.attention import Heads, flash_attention, unfused_attention
from simulator.lower.layers import (
    Blocks,
    blocks,
    model_flops_per_token,
    num_parameters,
    shapes,
)
from simulator.lower.memory import static_memory
from simulator.lower.operators import (
    Elements,
    bias,
    positions,
)
from simulator.lower.trainable import model_flops_per_token as training_flops_per_token
from simulator.lower.trainable import parameters
from simulator.program import Flow, Kernel

HALF = Elements(2, 2, 2, "bf16", "none")
ScenarioOf = Callable[..., Scenario]


def catalogued(model: str, run: dict[str, Any] | None = None, **plan: Any) -> Scenario:
    """Return a scenario of a model of the catalogue on one DGX H100."""
    devices = plan.get("tp", 1) * plan.get("pp", 1) * plan.get("dp", 1)
    sample = {"image_size": 224} if model == "vit-large" else {"sequence_length": 512}
    table = {
        "model": model,
        "cluster": {"node": "dgx-h100", "devices_per_node": devices},
        "plan": {"dp": 1, **plan},
        "run": {"global_batch_size": 4, **sample, **(run or {})},
    }
    return scenario(table, Path("test.toml"))


def config(name: str) -> dict[str, Any]:
    read = json.loads(catalog.find(name, "models", Path()).read_text(encoding="utf-8"))
    assert isinstance(read, dict)
    return read


def bert(**changes: Any) -> Model:
    return Model(name="bert", **read_config({**config("bert-large"), **changes}))


def parts(s: Scenario) -> Blocks:
    return blocks(s.model, shapes(s))


# h = 1024: token, position and type embeddings (30522 + 512 + 2) h and their norm 2h, 31 782 912;
# 24 layers of 12h^2 + 13h = 12 596 224. BertModel adds its pooler, h^2 + h = 1 049 600:
# 335 141 888. Masked tokens are trained without it (transformers adds no pooling layer there) and
# with a head of h^2 + h, a norm of 2h, and a bias for each of 30 522 tokens.
def test_bert_large_for_masked_tokens_has_335_174_458_parameters() -> None:
    body = 31_782_912 + 24 * 12_596_224
    assert body + 1_049_600 == 335_141_888
    assert num_parameters(bert()) == body + 1_049_600 + 2_048 + 30_522 == 335_174_458


# Pre-training has BertModel whole, both heads: of masked tokens, and of the next sentence 2h + 2.
def test_bert_for_pre_training_has_the_pooler_of_bert_model_too() -> None:
    both = num_parameters(bert(architectures=["BertForPreTraining"]))
    heads = 1_049_600 + 2_048 + 30_522 + 2_050
    assert both - heads == 335_141_888
    assert both == 336_226_108


# Multiply-adds of a token, s = 512: 24 layers * (12 h^2 + 2 s h), the head's transform h^2 and
# 30 522 h: 301 989 888 + 25 165 824 + 1 048 576 + 31 254 528.
def test_a_token_of_bert_takes_359_million_multiply_adds_forward() -> None:
    forward = 301_989_888 + 25_165_824 + 1_048_576 + 31_254_528
    assert model_flops_per_token(catalogued("bert-large")) == 3 * 2 * forward


# The norm that BERT has after its embedding is the first of the first layer here, and its last
# layer's last one the final norm, so a layer keeps Korthikanti's 34 sbh + 5 a s^2 b, a = 16.
def test_a_layer_of_bert_keeps_what_a_layer_of_gpt_does() -> None:
    s = catalogued("bert-large", {"attention": "unfused"}, microbatch_size=2)
    length, batch, h, a = 512, 2, 1024, 16
    expected = 34 * length * batch * h + 5 * a * length * length * batch
    assert parts(s).layer.kept_bytes == expected


# Inputs of the last norm, the transform, its activation, its norm, the decoder: 2sbh each; fp32
# probabilities 4sbv.
def test_the_head_of_bert_keeps_five_inputs_and_the_probabilities() -> None:
    s = catalogued("bert-large", microbatch_size=2)
    tokens = 2 * 512
    assert parts(s).head.kept_bytes == tokens * (5 * 2 * 1024 + 4 * 30_522)


# b a s^2 d of one product: 2 * 4 * 64^2 * 16 multiply-adds; forward has two, backward five.
@pytest.mark.parametrize(("causal", "share"), [(True, 0.5), (False, 1.0)])
def test_an_encoder_multiplies_all_scores_and_a_decoder_half(causal: bool, share: float) -> None:
    found = flash_attention(HALF, Heads(2, 64, 4, 4, 16, causal=causal))
    product = 2.0 * 2 * 4 * 64 * 64 * 16
    kernels = [k for k in (*found.forward, *found.backward) if isinstance(k, Kernel)]
    assert [k.flops for k in kernels] == [2 * product * share, 5 * product * share]
    assert found.model_flops == 2 * product


# The transform is on every rank, as are norms and the pooler; tp 2 halves the tokens.
def test_the_heads_transform_is_on_every_tensor_parallel_rank() -> None:
    one, two = catalogued("bert-large"), catalogued("bert-large", tp=2)
    transform = 1024 * 1024 + 1024 + 2 * 1024
    assert parts(one).head.params == 2_048 + transform + 30_522 * 1024 + 30_522
    assert parts(two).head.params == 2_048 + transform + (30_522 * 1024 + 30_522) // 2


# A tied decoder of the last stage shares the embedding's matrix but has its bias.
@pytest.mark.parametrize("plan", [{}, {"pp": 2}])
def test_a_rank_reduces_each_gradient_once(plan: dict[str, int]) -> None:
    s = catalogued("bert-large", {"num_steps": 1}, dp=2, **plan)
    program = lower(s).flat
    sent: Counter[int] = Counter()
    for op in range(len(program)):
        cost = program.costs[program.cost[op]]
        if isinstance(cost, Flow) and program.streams[program.stream[op]] == "dp":
            sent[int(program.rank[op])] += int(cost.bytes)
    gradients = [int(stage.gradients) for stage in static_memory(s)]
    assert sorted(sent.values()) == sorted(gradients * 2)


def test_one_stage_holds_the_parameters_of_the_model() -> None:
    (only,) = static_memory(catalogued("bert-large"))
    assert only.params == num_parameters(bert())


# Patches 3 * 256 * h + h = 787 456; class token h; 197 positions 197 h; 24 layers of 12 596 224;
# the last norm 2h; 1000 h + 1000 of the classes.
def test_vit_large_has_304_326_632_parameters() -> None:
    s = catalogued("vit-large")
    expected = 787_456 + 1_024 + 201_728 + 24 * 12_596_224 + 2_048 + 1_025_000
    assert num_parameters(s.model) == expected == 304_326_632


# Multiply-adds of an image of 196 patches: 196 * 768 h; 197 tokens * 24 * 12 h^2; scores and
# context 24 * 2 * 197^2 h; classes 1000 h.
def test_an_image_of_vit_large_takes_61_6_billion_multiply_adds_forward() -> None:
    s = catalogued("vit-large")
    forward = 154_140_672 + 59_492_007_936 + 1_907_539_968 + 1_024_000
    assert s.sequence_length == 197
    assert model_flops_per_token(s) * 197 == pytest.approx(3 * 2 * forward, rel=1e-15)


# The image in bf16, 3 * 224^2 * 2 bytes; no dropout, no mask.
def test_the_embedding_of_vit_keeps_the_image() -> None:
    embedding = parts(catalogued("vit-large")).embedding
    assert embedding.kept_bytes == 3 * 224 * 224 * 2
    assert embedding.operators[0].input_grad == ()


# The last norm's input for 197 tokens, the class token for the classes, fp32 probabilities.
def test_the_head_of_vit_sees_the_class_token_alone() -> None:
    head = parts(catalogued("vit-large")).head
    assert head.kept_bytes == 2 * 197 * 1024 + 2 * 1024 + 4 * 1000
    assert head.model_flops == 2 * 1000 * 1024


def test_the_report_of_vit_counts_images() -> None:
    result = sim.simulate(catalogued("vit-large"))
    assert f"{4 / result.step_time_s:,.5g} images/s" in str(result)


@pytest.mark.parametrize("model", ["bert-large", "vit-large", "mpt-7b"])
@pytest.mark.parametrize(
    "plan",
    [{"tp": 2, "pp": 2}, {"dp": 2, "pp": 2, "recompute": "full"}, {"dp": 4, "zero": 3},
     {"tp": 2, "dp": 2, "recompute": "selective"}],
)  # fmt: skip
def test_engines_agree(model: str, plan: dict[str, Any]) -> None:
    alike_however_it_runs(catalogued(model, {"num_steps": 1}, **plan))


# With all layers frozen the decoder, tied to the frozen embedding, is frozen too, but not its bias
# nor what precedes it: the last norm 2h, the transform h^2 + h, its norm 2h, 30 522.
def test_frozen_layers_of_bert_leave_the_rest_of_its_head_trained() -> None:
    counts = parameters(catalogued("bert-large", {"frozen_layers": 24}))
    assert counts.trained == 2_048 + 1_049_600 + 2_048 + 30_522
    assert counts.total == 335_174_458


# Multiply-adds as above: patches and layers forward, the classes three times.
def test_frozen_layers_of_vit_compute_forward_alone() -> None:
    s = catalogued("vit-large", {"frozen_layers": 24})
    forward = 154_140_672 + 59_492_007_936 + 1_907_539_968
    expected = 2 * (forward + 3 * 1_024_000)
    assert training_flops_per_token(s) * 197 == pytest.approx(expected, rel=1e-15)


# Adafactor keeps r + c numbers for a matrix and one for each other parameter, 4 bytes each, beside
# 4 bytes a parameter of the master copy: a layer's qkv 4h, proj 2h, fc1 5h, fc2 5h, with
# its 13h of biases and norms; positions 197 + h, classes 1000 + h; the patches, of four dimensions,
# 768 h + h, the class token h, the last norm 2h, 1000.
def test_adafactor_keeps_rows_and_columns_of_vits_matrices_but_not_of_its_convolution() -> None:
    (only,) = static_memory(catalogued("vit-large", {"optimizer": "adafactor"}))
    h = 1024
    kept = 24 * (16 * h + 13 * h) + 197 + h + 1000 + h + 769 * h + h + 2 * h + 1000
    assert only.optimizer == 4 * 304_326_632 + 4 * kept


# 2 images of 4 patches, 16 wide, in bf16: what the patches wrote and the sum, 2 * 5 * 16 * 2 bytes
# each; backward the gradient of the sum, and where it was dropped out of, that before.
@pytest.mark.parametrize(("dropped", "gradients"), [(0, 1), (10, 2)])
def test_positions_hold_what_they_read_and_write(dropped: int, gradients: int) -> None:
    found = positions(HALF, tokens=10, hidden=16, rows=6, dropped=dropped)
    assert found.forward_bytes == 2 * 320
    assert found.backward_bytes == gradients * 320


def test_the_gradient_of_logits_is_alive_while_its_bias_sums_it() -> None:
    assert bias("b", HALF, tokens=8, outputs=100).backward_bytes == 2 * 8 * 100


@pytest.mark.parametrize("model", ["bert-large", "vit-large", "mpt-7b"])
@pytest.mark.parametrize(
    ("run", "plan"),
    [
        ({"frozen_layers": 14}, {"pp": 2}),
        ({"lora_rank": 4}, {"dp": 2, "zero": 3}),
        ({"precision": "fp8"}, {"tp": 2, "recompute": "selective-op"}),
        ({"fake_quantization": True, "fused_accumulation": False}, {"dp": 2}),
        ({"optimizer": "muon", "clip_grad": True}, {"tp": 2, "pp": 2}),
    ],
)
def test_engines_agree_however_it_is_trained(
    model: str, run: dict[str, Any], plan: dict[str, Any]
) -> None:
    alike_however_it_runs(catalogued(model, {"num_steps": 1, **run}, **plan))


# BLOOM, h 14336, L 70, V 250880: L (12h^2 + 13h) + V h + norms of the embedding and at the end, 2h
# each: the 176 247 271 424 of its paper (arXiv 2211.05100, table 3: 176 247 M). MPT-7B, h 4096,
# without biases: 32 (12h^2 + 2h) + 50432 h + h.
@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("bloom", 70 * (12 * 14336**2 + 13 * 14336) + 250_880 * 14336 + 4 * 14336),
        ("bloom", 176_247_271_424),
        ("mpt-7b", 32 * (12 * 4096**2 + 2 * 4096) + 50_432 * 4096 + 4096),
        ("mpt-7b", 6_649_286_656),
    ],
)
def test_positions_of_alibi_have_no_parameters(model: str, parameters: int) -> None:
    assert num_parameters(catalogued(model).model) == parameters


# Scores of 2 * 4 * 64^2 bf16 numbers are read and written; the bias has no gradient.
def test_unfused_attention_adds_alibis_bias_in_a_pass_over_the_scores() -> None:
    heads = Heads(2, 64, 4, 4, 16)
    plain = unfused_attention(HALF, heads, dropout=False)
    biased = unfused_attention(HALF, replace(heads, alibi=True), dropout=False)
    (added,) = [o for o in biased if o.name == "alibi"]
    assert [o for o in biased if o.name != "alibi"] == list(plain)
    (kernel,) = (*added.forward, *added.backward)
    assert isinstance(kernel, Kernel)
    assert kernel.bytes == 2 * 2 * (2 * 4 * 64 * 64)
    assert added.kept_bytes == 0
    assert added.forward_bytes == kernel.bytes  # what it reads, nobody keeps


def test_fused_attention_adds_alibis_bias_for_nothing() -> None:
    heads = Heads(2, 64, 4, 4, 16)
    assert flash_attention(HALF, heads) == flash_attention(HALF, replace(heads, alibi=True))


def test_alibi_knows_no_longest_sequence(scenario_of: ScenarioOf, gpt: Model) -> None:
    longer = scenario_of(model=replace(gpt, position="alibi"), sequence=64)
    assert longer.sequence_length == 64
    with pytest.raises(DescriptionError, match="64 is more than the 32 positions"):
        scenario_of(sequence=64)


def test_a_squared_relu_is_an_activation_of_its_own() -> None:
    squared = read_config({**config("llama-3-8b"), "hidden_act": "relu2"})
    assert Model(name="squared", **squared).activation == "relu2"


@pytest.mark.parametrize(
    ("model", "changes", "sentence"),
    [
        ("bert-large", {"architectures": ["BertForSequenceClassification"]},
         "what is modelled is BertForMaskedLM, BertForPreTraining"),
        ("bert-large", {"is_decoder": True}, "BERT is modelled as an encoder"),
        ("bert-large", {"position_embedding_type": "relative_key"}, "'relative_key' is not"),
        ("bert-large", {"hidden_size": 1000}, "num_attention_heads 16 does not divide"),
        ("vit-large", {"architectures": ["ViTForMaskedImageModeling"]},
         "what is modelled is ViTForImageClassification"),
        ("mpt-7b", {"attn_config": {"alibi": False}}, "MPT is modelled with ALiBi"),
        ("mpt-7b", {"attn_config": {"attn_pdrop": 2}}, "attn_config: attn_pdrop 2 must be"),
        ("bloom", {"num_attention_heads": 100}, "100 heads do not divide a hidden size of 14336"),
    ],
)  # fmt: skip
def test_a_config_of_another_kind_is_refused(
    model: str, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(DescriptionError) as caught:
        read_config({**config(model), **changes})
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("model", "run", "plan", "sentence"),
    [
        ("bert-large", {"image_size": 224}, {}, "224 is for images, and bert-large reads text"),
        ("bert-large", {"sequence_length": 1024}, {}, "1024 is more than the 512 positions"),
        ("vit-large", {"image_size": 384}, {}, "learned positions for images of 224 pixels"),
        ("vit-large", {}, {"tp": 2, "sequence_parallel": True}, "the class token alone"),
    ],
)
def test_a_run_that_does_not_suit_is_refused(
    model: str, run: dict[str, Any], plan: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(DescriptionError) as caught:
        catalogued(model, run, **plan)
    assert sentence in str(caught.value)


def test_a_text_without_length_is_refused() -> None:
    table = {"model": "gpt2", "cluster": {"node": "dgx-a100"}, "run": {"global_batch_size": 8}}
    with pytest.raises(DescriptionError, match="sequence_length is missing: the tokens of one"):
        scenario(table, Path("test.toml"))


def test_patches_must_fill_the_image() -> None:
    with pytest.raises(DescriptionError, match="15 does not divide image_size 224"):
        Patches(image_size=224, patch_size=15, num_channels=3)
