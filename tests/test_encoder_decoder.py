"""T5: an encoder and a decoder that attends to it, relative positions."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scenario_parity import alike_however_it_runs

import simulator as sim
from simulator.describe import catalog
from simulator.describe.data import PRESETS, sample_of
from simulator.describe.huggingface import read_config
from simulator.describe.loader import load, scenario
from simulator.describe.model import Model
from simulator.describe.scenario import Scenario
from simulator.errors import DescriptionError
from simulator.exchange.megatron.export import to_megatron
from simulator.lower import lower
from simulator.lower.attention import Heads, flash_attention, unfused_attention
from simulator.lower.blocks import Blocks
from simulator.lower.layers import blocks, model_flops_per_token, num_parameters
from simulator.lower.memory import static_memory
from simulator.lower.operators import Elements, relative_positions
from simulator.lower.shapes import Shapes, shapes
from simulator.program import Flow, Kernel, Work
from simulator.report.inference import inference, inference_text

HALF = Elements(2, 2, 2, "bf16", "none")
CONFIG = json.loads(catalog.find("t5-11b", "models", Path()).read_text(encoding="utf-8"))
GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "d_kv": 64}
"""What T5 1.1 and FLAN-T5 changed."""

SMALL = {
    "d_model": 128, "d_kv": 32, "d_ff": 512, "num_heads": 8, "num_layers": 3, "vocab_size": 1024,
}  # fmt: skip
"""A T5 whose heads together, 256 wide, are wider than the model."""
BATCH, READ, WRITTEN = 4, 96, 64


def t5(**changes: Any) -> Model:
    return Model(name="t5", **read_config({**CONFIG, **changes}))


def small(run: dict[str, Any] | None = None, config: Any = None, **plan: Any) -> Scenario:
    """Return a scenario of the small T5 on the A100 of one node."""
    devices = plan.get("tp", 1) * plan.get("dp", 1)
    fields = {**CONFIG, **SMALL, **(config or {})}
    table = {
        "model": {"name": "t5", **read_config(fields)},
        "cluster": {"node": "dgx-a100", "devices_per_node": devices},
        "plan": {"dp": 1, "microbatch_size": BATCH, **plan},
        "run": {
            "global_batch_size": 2 * BATCH * plan.get("dp", 1), "sequence_length": READ,
            "decoder_sequence_length": WRITTEN, "attention": "unfused", **(run or {}),
        },
    }  # fmt: skip
    return scenario(table, Path("test.toml"))


def parts(s: Scenario) -> Blocks:
    return blocks(s.model, shapes(s))


# The counts of Hugging Face's checkpoints. T5-small by hand, h 512, f 2048, V 32128: V h; 6 layers
# of 4 h^2 + 2 h f + 2 h; 6 of 8 h^2 + 2 h f + 3 h; two last norms of h; two tables of 32 x 8.
@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        ({"d_model": 512, "d_ff": 2048, "d_kv": 64, "num_heads": 8, "num_layers": 6}, 60_506_624),
        ({"d_model": 768, "d_ff": 3072, "d_kv": 64, "num_heads": 12, "num_layers": 12},
         222_903_552),
        ({"d_ff": 4096, "d_kv": 64, "num_heads": 16}, 737_668_096),
        ({"d_ff": 16384, "num_heads": 32}, 2_851_598_336),
        ({}, 11_307_321_344),
        ({**GATED, "d_model": 512, "d_ff": 1024, "num_heads": 6, "num_layers": 8}, 76_961_152),
        ({**GATED, "d_model": 768, "d_ff": 2048, "num_heads": 12, "num_layers": 12}, 247_577_856),
        ({**GATED, "d_ff": 2816, "num_heads": 16}, 783_150_080),
        ({**GATED, "d_model": 2048, "d_ff": 5120, "num_heads": 32}, 2_849_757_184),
        ({**GATED, "d_model": 4096, "d_ff": 10240, "num_heads": 64}, 11_135_332_352),
        ({**GATED, "d_model": 512, "d_ff": 1024, "num_heads": 6, "num_layers": 8,
          "vocab_size": 250_112, "model_type": "mt5",
          "architectures": ["MT5ForConditionalGeneration"]}, 300_176_768),
    ],
    ids=["small", "base", "large", "3b", "11b", "1.1-small", "1.1-base", "1.1-large", "1.1-xl",
         "1.1-xxl", "mt5-small"],
)  # fmt: skip
def test_t5_has_its_published_parameters(config: dict[str, Any], parameters: int) -> None:
    assert num_parameters(t5(**config)) == parameters


def test_the_catalogues_t5_large_is_the_published_one() -> None:
    path = catalog.find("t5-large", "models", Path())
    model = Model(name="t5", **read_config(json.loads(path.read_text(encoding="utf-8"))))
    assert num_parameters(model) == 737_668_096


@settings(deadline=None)
@given(
    heads=st.integers(1, 5), head=st.integers(1, 9), hidden=st.integers(1, 30),
    inner=st.integers(1, 40), encoder=st.integers(1, 4), decoder=st.integers(1, 4),
    vocabulary=st.integers(1, 99), buckets=st.integers(1, 40), gated=st.booleans(),
    tied=st.booleans(),
)  # fmt: skip
def test_any_t5_has_the_parameters_of_its_formula(
    heads: int, head: int, hidden: int, inner: int, encoder: int, decoder: int, vocabulary: int,
    buckets: int, gated: bool, tied: bool,
) -> None:  # fmt: skip
    model = t5(
        num_heads=heads, d_kv=head, d_model=hidden, d_ff=inner, num_layers=encoder,
        num_decoder_layers=decoder, vocab_size=vocabulary, tie_word_embeddings=tied,
        relative_attention_num_buckets=buckets,
        feed_forward_proj="gated-gelu" if gated else "relu",
    )  # fmt: skip
    attention, mlp = 4 * hidden * heads * head, (2 + gated) * hidden * inner
    layers = encoder * (attention + mlp + 2 * hidden) + decoder * (2 * attention + mlp + 3 * hidden)
    rest = (2 - tied) * vocabulary * hidden + 2 * hidden + 2 * buckets * heads
    assert num_parameters(model) == layers + rest


# What torch's FlopCounterMode counts in a forward of Hugging Face's T5ForConditionalGeneration
# (transformers 4.57, torch 2.13), 4 samples of 96 tokens read and 64 written; its backward has
# twice as many. Of the first one: 384 encoder tokens, 256 decoder tokens, h 128, heads 256 wide,
# f 512: 3 x 2 x (384 x (4 h 256 + 2 h f) + 2 x 4 x 96^2 x 256) + 3 x 2 x (256 x (6 h 256 + 2 h f)
# + 384 x 2 h 256 + 2 x 4 x (64^2 + 64 x 96) x 256) + 2 x 256 h 1024.
@pytest.mark.parametrize(
    ("config", "flops"),
    [
        ({}, 1_564_475_392),
        ({"num_layers": 2, "num_decoder_layers": 3}, 1_325_400_064),
        ({"num_decoder_layers": 2}, 1_304_428_544),
        ({"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}, 1_816_133_632),
    ],
)
def test_a_forward_takes_the_flops_that_torch_counts(config: Any, flops: int) -> None:
    s = small(config=config)
    every = [*parts(s).layers, *parts(s).others]
    assert sum(block.model_flops for block in every) == flops
    assert model_flops_per_token(s) * BATCH * (READ + WRITTEN) == 3 * flops


def test_the_hand_worked_formula_is_what_torch_counts() -> None:
    h, wide, f, enc, dec = 128, 256, 512, BATCH * READ, BATCH * WRITTEN
    encoder = enc * (4 * h * wide + 2 * h * f) + 2 * BATCH * READ * READ * wide
    crossed = 2 * BATCH * WRITTEN * (WRITTEN + READ) * wide + enc * 2 * h * wide
    decoder = dec * (6 * h * wide + 2 * h * f) + crossed
    assert 3 * 2 * (encoder + decoder) + 2 * dec * h * 1024 == 1_564_475_392


# Every product that a program runs: forward, and two for each in backward.
def test_a_program_multiplies_three_times_what_a_forward_does() -> None:
    program = lower(small({"num_steps": 1, "detail": "kernel", "global_batch_size": BATCH}))
    works = [program.costs[cost] for cost in program.flat.cost]
    kernels = [k for w in works if isinstance(w, Work) for k in w.kernels if k.matmul]
    assert sum(k.flops * k.count for k in kernels) == 3 * 1_564_475_392


def test_tokens_are_those_of_both_stacks() -> None:
    result = sim.simulate(small())
    assert result.scenario is not None
    assert result.scenario.tokens_per_sample == READ + WRITTEN
    assert result.scenario.tokens_per_step == 2 * BATCH * (READ + WRITTEN)
    text = str(result)
    assert "x 96 + 64 tokens (encoder + decoder)" in text
    assert "tokens are the encoder's and the decoder's; MFU counts 3 x the forward" in text


# Bytes of n tokens of h = 128, heads w = 256, f = 512, a = 8 heads. Attention: the norm's input
# and the product's 4nh, q, k, v 6nw, softmax, its mask and its result 5 a b s^2, the result 2nw,
# the mask of the sum nh. MLP: 4nh, ReLU's input 2nf, its dropout's mask nf and result 2nf, nh.
def attention_bytes(queries: int, keys: int) -> int:
    n, m = BATCH * queries, BATCH * keys
    return 5 * n * 128 + 4 * n * 256 + 4 * m * 256 + 5 * 8 * BATCH * queries * keys


def mlp_bytes(tokens: int) -> int:
    n = BATCH * tokens
    return 5 * n * 128 + 5 * n * 512


def test_a_layer_of_the_encoder_keeps_what_attention_and_mlp_do() -> None:
    first = parts(small()).layers[0]
    assert first.kept_bytes == attention_bytes(READ, READ) + mlp_bytes(READ)


# Cross-attention keeps keys and values of 96 tokens, but not what they are made from: that is the
# encoder's output, kept once.
def test_a_layer_of_the_decoder_keeps_cross_attention_besides() -> None:
    last = parts(small()).layers[-1]
    crossed = attention_bytes(WRITTEN, READ)
    assert last.kept_bytes == attention_bytes(WRITTEN, WRITTEN) + crossed + mlp_bytes(WRITTEN)


# The encoder's last norm 2nh, the mask nh, the output 2nh; the mask of the decoder's embedding; the
# bias of 8 heads in bf16 and 8-byte buckets for 64^2 pairs.
def test_the_bridge_keeps_the_output_of_the_encoder_once() -> None:
    kept = parts(small()).bridge.kept_bytes
    assert kept == 5 * BATCH * READ * 128 + BATCH * WRITTEN * 128 + (2 * 8 + 8) * WRITTEN**2


def test_the_embedding_keeps_the_bias_of_the_encoders_scores() -> None:
    assert parts(small()).embedding.kept_bytes == BATCH * READ * 128 + (2 * 8 + 8) * READ**2


# The last norm's input, the mask, the head's input; fp32 probabilities.
def test_the_head_sees_the_decoders_tokens_alone() -> None:
    n = BATCH * WRITTEN
    assert parts(small()).head.kept_bytes == 5 * n * 128 + 4 * n * 1024


@pytest.mark.parametrize("recompute", ["none", "selective", "light", "full"])
@pytest.mark.parametrize("detail", ["kernel", "layer", "stage"])
def test_everything_kept_is_freed(detail: str, recompute: str) -> None:
    result = sim.simulate(small({"detail": detail}, dp=2, recompute=recompute))
    _, levels = result.memory.of_rank(0)
    assert levels[-1] == 0
    assert levels.min() >= 0


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_detail_moves_neither_time_nor_peak(recompute: str) -> None:
    found = [
        sim.simulate(small({"detail": detail}, tp=2, recompute=recompute))
        for detail in ("kernel", "layer", "stage")
    ]
    first = found[0]
    for result in found[1:]:  # ticks of kernels are rounded one by one
        assert result.step_time_s == pytest.approx(first.step_time_s, rel=1e-8)
        assert result.memory.peak[0] == first.memory.peak[0]


# With all layers recomputed each keeps its input alone, and all of them the encoder's output.
def test_full_recomputation_keeps_inputs_of_layers_and_the_encoders_output() -> None:
    found = parts(small())
    program = lower(small({"detail": "kernel", "num_steps": 1}, recompute="full"))
    works = [program.costs[cost] for cost in program.flat.cost[program.flat.microbatch == 0]]
    total = sum(w.alloc.activations for w in works if isinstance(w, Work))
    again = sum(block.kept_bytes for block in found.layers)  # alive twice: kept, then made again
    others = sum(block.kept_bytes for block in found.others)
    assert total == again + others


# Both cores of a decoder's layer run again: 2 x 2 products of scores and context.
def test_selective_recomputation_repeats_both_cores() -> None:
    s = small({"num_steps": 1}, recompute="selective")
    result = sim.simulate(s)
    core = 4 * BATCH * 256 * (READ**2 + WRITTEN**2 + WRITTEN * READ) * 3
    forward = 1_564_475_392
    summary = result.summary
    assert summary.hfu / summary.mfu == pytest.approx((3 * forward + core) / (3 * forward))


# tp 2 halves all but norms: two of a layer of the encoder, three of the decoder, two last ones.
def test_tensor_parallel_ranks_repeat_norms_alone() -> None:
    (only,) = static_memory(small(tp=2))
    norms = (3 * 2 + 3 * 3 + 2) * 128
    assert only.params == (num_parameters(small().model) - norms) // 2 + norms


# Two collectives of a region each way; a decoder's layer has a region more, and cross-attention
# gathers the encoder's output beside its own queries.
def test_sequence_parallel_ranks_gather_the_encoders_output_in_every_layer() -> None:
    s = small({"num_steps": 1, "global_batch_size": BATCH}, tp=2, sequence_parallel=True)
    program = lower(s)
    flows = [c for c in (program.costs[i] for i in program.cost) if isinstance(c, Flow)]
    read, written = 2.0 * BATCH * READ * 128, 2.0 * BATCH * WRITTEN * 128
    gathers = Counter(f.bytes for f in flows if f.name == "all_gather")
    scatters = Counter(f.bytes for f in flows if f.name == "reduce_scatter")
    # encoder, 3 layers: 2 regions x (forward, again for weights, gradient); the embedding's leave
    assert gathers[read] == 3 * 6 + 3 * 2 + 1
    assert scatters[read] == 3 * 4 + 3 + 1
    # decoder: 3 regions x 3; the head's entrance twice, the embedding's gradient
    assert gathers[written] == 3 * 9 + 2 + 1
    assert scatters[written] == 3 * 6 + 1 + 1


# 5 bf16 numbers of the encoder's output: of each layer's gradient a read, of the sum read, written.
def test_every_layer_of_the_decoder_adds_to_the_gradient_of_the_encoders_output() -> None:
    added = [o for o in parts(small()).layers[-1].operators if o.name == "encoder output"]
    (kernel,) = added[0].backward
    assert isinstance(kernel, Kernel)
    assert kernel.bytes == 3 * 2 * BATCH * READ * 128
    assert added[0].forward == ()


# While a layer of the decoder is in backward two gradients wait: the residual stream's, and that of
# the encoder's output.
def test_the_gradient_of_the_encoders_output_waits_for_the_decoder() -> None:
    layers = parts(small()).layers
    assert layers[0].operators[0].stream_bytes == 2 * BATCH * READ * 128
    assert layers[-1].operators[0].stream_bytes == 2 * BATCH * (READ + WRITTEN) * 128


# b a s t d of one product: 2 * 4 * 10 * 6 * 16; forward two, backward four.
def test_attention_to_an_encoder_multiplies_queries_with_all_its_tokens() -> None:
    heads = Heads(2, 10, 4, 4, 16, causal=False, key_sequence=6)
    found = unfused_attention(HALF, heads, dropout=True)
    kernels = [k for o in found for k in (*o.forward, *o.backward)]
    products = [k for k in kernels if isinstance(k, Kernel) and k.matmul]
    assert [k.flops for k in products] == [2.0 * 2 * 4 * 10 * 6 * 16] * 6
    assert sorted(k.matmul for k in products if k.matmul) == sorted(
        [(8, 10, 6, 16), (8, 10, 16, 6), (8, 10, 16, 6), (8, 6, 16, 10), (8, 10, 6, 16),
         (8, 6, 16, 10)]
    )  # fmt: skip
    fused = flash_attention(HALF, heads)
    assert fused.model_flops == sum(o.model_flops for o in found) == 2 * 2 * 2.0 * 4 * 10 * 6 * 16


# 8 heads' scores of 4 samples, 4 * 8 * 10^2, and one bias for all samples, 8 * 10^2.
def test_a_learned_bias_is_added_to_scores_and_its_gradient_summed_over_samples() -> None:
    heads = Heads(4, 10, 8, 8, 16, causal=False)
    plain = unfused_attention(HALF, heads, dropout=False)
    biased = unfused_attention(HALF, replace(heads, relative=True), dropout=False)
    (added,) = [o for o in biased if o.name == "position bias"]
    assert [o for o in biased if o.name != "position bias"] == list(plain)
    forward, backward = (*added.forward, *added.backward)
    assert isinstance(forward, Kernel)
    assert isinstance(backward, Kernel)
    assert forward.bytes == 2 * (3200 + 800 + 3200)
    assert backward.bytes == 2 * (3200 + 800 + 800)
    assert added.kept_bytes == 0


# 32 buckets of 8 heads; for 100 pairs 8-byte buckets and 8 bf16 numbers.
def test_relative_positions_have_a_number_for_each_bucket_and_head() -> None:
    found = relative_positions(HALF, heads=8, length=10, buckets=32)
    assert found.params == 256
    assert found.kept_bytes == 100 * (8 + 2 * 8)
    assert found.input_grad == ()


# A decoder's embedding has no gradient of its own: it adds to the encoder's.
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_rank_reduces_each_gradient_once(zero: int, tied: bool) -> None:
    s = small({"num_steps": 1, "global_batch_size": 2 * BATCH}, {"tie_word_embeddings": tied},
              dp=2, zero=zero)  # fmt: skip
    program = lower(s).flat
    sums = [
        program.costs[program.cost[op]].bytes  # type: ignore[union-attr]
        for op in range(len(program))
        if program.rank[op] == 0 and program.costs[program.cost[op]].name
        in ("all_reduce", "reduce_scatter")  # type: ignore[union-attr]
    ]  # fmt: skip
    assert sum(sums) == 2 * num_parameters(s.model)


# The embedding stays from the encoder's tokens to the decoder's, tied to a head or not, and to its
# own backward: it is gathered once a microbatch, layers twice.
@pytest.mark.parametrize("tied", [True, False])
def test_under_stage_3_the_embedding_stays_for_the_decoder(tied: bool) -> None:
    s = small({"num_steps": 1, "global_batch_size": 2 * BATCH}, {"tie_word_embeddings": tied},
              dp=2, zero=3)  # fmt: skip
    program = lower(s)
    flows = [c for c in (program.costs[i] for i in program.cost) if isinstance(c, Flow)]
    gathers = Counter(f.bytes for f in flows if f.name == "all_gather")
    embedding, table = 2.0 * 1024 * 128, 2 * 32 * 8
    assert gathers[embedding + table] == 1
    assert gathers[2 * 128 + table] == 2  # the bridge: the encoder's norm, the decoder's table
    assert gathers[2 * 128 + (0 if tied else embedding)] == 1  # the head: its norm
    assert sum(gathers.values()) == 2 * 6 + 4


@pytest.mark.parametrize(
    ("run", "plan"),
    [
        ({}, {"tp": 2, "sequence_parallel": True, "tp_overlap": "all"}),
        ({}, {"dp": 2, "recompute": "full"}),
        ({}, {"dp": 4, "zero": 3}),
        ({"compiled": True}, {"dp": 2, "zero": 2, "recompute": "selective"}),
        ({"optimizer": "adafactor", "clip_grad": True}, {"tp": 2, "recompute": "light"}),
        ({"precision": "fp16", "network": "fluid"}, {"dp": 2, "tp": 2}),
    ],
)
def test_engines_agree(run: dict[str, Any], plan: dict[str, Any]) -> None:
    alike_however_it_runs(small({"num_steps": 1, **run}, **plan))


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_engines_agree_on_any_t5(data: st.DataObject) -> None:
    draw = data.draw
    config = {
        "num_layers": draw(st.integers(1, 3)), "num_decoder_layers": draw(st.integers(1, 3)),
        "tie_word_embeddings": draw(st.booleans()), "dropout_rate": draw(st.sampled_from([0, 0.1])),
    }  # fmt: skip
    tp, zero = draw(st.sampled_from([1, 2])), draw(st.integers(0, 3))
    plan = {
        "tp": tp, "dp": draw(st.sampled_from([1, 2])), "zero": zero,
        "sequence_parallel": tp > 1 and draw(st.booleans()),
        "recompute": draw(st.sampled_from(["none", "selective", "light", "full"])),
    }  # fmt: skip
    detail = draw(st.sampled_from(["kernel", "layer", "stage"]))
    alike_however_it_runs(small({"num_steps": 1, "detail": detail}, config, **plan))


# Compiled, each sum and the norm after it in its layer are one kernel: one more of a decoder's.
def test_a_compiled_layer_of_the_decoder_joins_two_sums_with_norms() -> None:
    plain, joined = (
        [o.name for o in parts(small({"compiled": flag})).layers[-1].operators]
        for flag in (False, True)
    )
    gone = Counter(plain) - Counter(joined)
    assert gone == {"attention residual": 1, "cross residual": 1}


# Rotary in place of the bias: attention may be fused.
def test_a_decoder_with_rotary_positions_may_use_fused_attention() -> None:
    s = small()
    rotary = replace(s.model, position="rotary", relative_attention_num_buckets=0)
    fused = replace(s, model=rotary, run=replace(s.run, attention="flash"))
    assert sim.simulate(fused).step_time_s < sim.simulate(s).step_time_s
    assert model_flops_per_token(fused) == model_flops_per_token(s)


# Learned positions serve both stacks, as the matrix of tokens does: 512 h in place of two tables.
def test_learned_positions_are_shared_by_encoder_and_decoder() -> None:
    model = t5(**SMALL)
    learned = replace(model, position="learned", relative_attention_num_buckets=0)
    assert num_parameters(learned) - num_parameters(model) == 512 * 128 - 2 * 32 * 8


def test_a_decoder_reads_no_more_than_the_positions_that_are_learned() -> None:
    s = small()
    learned = replace(s.model, position="learned", relative_attention_num_buckets=0)
    longer = replace(s.run, decoder_sequence_length=513)
    with pytest.raises(DescriptionError, match="decoder_sequence_length 513 is more than the 512"):
        replace(s, model=learned, run=longer)


def test_an_encoder_alone_may_have_relative_positions() -> None:
    model = replace(t5(**SMALL), num_hidden_layers=3, num_decoder_layers=0, causal=False)
    x = Shapes(microbatch_size=1, sequence_length=8, tp=1, attention="unfused", elements=HALF)
    found = blocks(model, x)
    assert [o.name for o in found.embedding.operators] == ["embedding", "relative positions"]
    assert found.bridge.operators == ()
    names = [o.name for o in found.layer.operators]
    assert "position bias" in names
    assert "cross q" not in names


# 8-byte tokens: those read, those written, and their labels.
def test_a_sample_of_the_data_path_has_the_tokens_of_both_stacks() -> None:
    path = {
        "cluster.storage.disk": "nvme-gen4", "data.storage": "disk", "data.preset": "pre-tokenised",
    }  # fmt: skip
    s = load("t5-11b-64gpu", path)
    assert sample_of(s).device_bytes == 8 * (512 + 2 * 128)
    assert sample_of(s).bytes == PRESETS["pre-tokenised"].bytes * (512 + 128)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"architectures": ["T5EncoderModel"]}, "what is modelled is T5ForConditionalGeneration"),
        ({"feed_forward_proj": "dense-gelu"}, "feed_forward_proj 'dense-gelu' is not modelled"),
        ({"feed_forward_proj": "gated-tanh"}, "feed_forward_proj 'tanh' is not one of gelu"),
        ({"num_decoder_layers": 0}, "num_decoder_layers 0 must be a whole number of at least 1"),
        ({"d_kv": None}, "key 'd_kv' is missing"),
    ],
)
def test_a_config_of_another_kind_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DescriptionError) as caught:
        read_config({**CONFIG, **changes})
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_decoder_layers": 48}, "48 of 48 layers leave none to the encoder"),
        ({"causal": False}, "24 with causal False is not modelled"),
        ({"position": "alibi", "relative_attention_num_buckets": 0}, "position 'alibi' is not"),
        ({"relative_attention_num_buckets": 0}, "missing beside position 'relative'"),
        ({"position": "rotary"}, "32 is for position 'relative', not 'rotary'"),
        ({"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
         "24 with num_experts 8 is not modelled"),
    ],
)  # fmt: skip
def test_a_model_that_contradicts_itself_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DescriptionError) as caught:
        replace(t5(), **changes)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("run", "plan", "sentence"),
    [
        ({"attention": "flash"}, {}, "t5 learns the bias of its scores"),
        ({"lora_rank": 4}, {}, "run.lora_rank 4 with a decoder that attends to an encoder"),
        ({"frozen_layers": 2}, {}, "run.frozen_layers 2 with a decoder"),
        ({"fake_quantization": True}, {}, "run.fake_quantization with a decoder"),
        ({"decoder_sequence_length": 63}, {"tp": 2, "sequence_parallel": True},
         "plan.tp 2 does not divide run.decoder_sequence_length 63"),
    ],
)  # fmt: skip
def test_what_is_not_modelled_of_t5_is_refused(
    run: dict[str, Any], plan: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(DescriptionError) as caught:
        small(run, **plan)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        ({"pp": 2}, "a pipeline (plan.pp 2) with a decoder that attends to an encoder"),
        ({"cp": 2}, "plan.cp 2 does not divide a decoder that attends to an encoder"),
    ],
)
def test_a_plan_that_would_cut_between_encoder_and_decoder_is_refused(
    plan: dict[str, Any], sentence: str
) -> None:
    s = small(tp=2)
    with pytest.raises(DescriptionError) as caught:
        replace(s, plan=replace(s.plan, tp=1, **plan))
    assert sentence in str(caught.value)


def test_a_decoder_needs_a_length_of_its_own() -> None:
    s = small()
    with pytest.raises(DescriptionError, match="decoder_sequence_length is missing: the tokens of"):
        replace(s, run=replace(s.run, decoder_sequence_length=None))


def test_a_length_for_a_decoder_that_is_not_there_is_refused() -> None:
    table = {
        "model": "gpt2", "cluster": {"node": "dgx-a100"},
        "run": {"global_batch_size": 8, "sequence_length": 8, "decoder_sequence_length": 8},
    }  # fmt: skip
    with pytest.raises(DescriptionError, match="for decoders that follow an encoder, and gpt2"):
        scenario(table, Path("test.toml"))


# 3 layers of the decoder, 2 x 256 bf16 numbers each, for the 160 tokens of both stacks; weights as
# many as the model has parameters.
def test_serving_keeps_keys_and_values_of_both_stacks_in_the_decoder() -> None:
    s = small()
    found = inference(s)
    assert found.kv_cache_bytes_per_token == 3 * 2 * 256 * 2
    assert found.kv_cache_bytes_per_sequence == 3 * 2 * 256 * 2 * (READ + WRITTEN)
    assert found.weights["bf16"].weights_bytes == 2 * num_parameters(s.model)
    assert "in layers of the decoder, for tokens of the encoder too" in inference_text(s)


def test_megatrons_flags_do_not_describe_t5() -> None:
    with pytest.raises(DescriptionError, match="t5 has an encoder; flags are written for"):
        to_megatron(small())
