"""Multi-head latent attention: shapes, FLOPs, memory and tensor parallelism by hand arithmetic."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import simulator as sim
from simulator.describe import catalog
from simulator.describe.huggingface import read_config
from simulator.describe.model import Model
from simulator.errors import DescriptionError
from simulator.lower import lower
from simulator.lower.attention import Heads, flash_attention, unfused_attention
from simulator.lower.layers import blocks, num_parameters
from simulator.lower.memory import static_memory
from simulator.lower.operators import Elements
from simulator.lower.recompute import MODULES, lightly
from simulator.lower.shapes import Shapes, shapes
from simulator.program import Flow, Kernel
from simulator.report.inference import kv_cache_bytes_per_token


def model_of(name: str, **changes: object) -> Model:
    config = json.loads((catalog.root() / f"workloads/models/{name}.json").read_text())
    return replace(Model(name=name, **read_config(config)), **changes)


MINICPM = model_of("minicpm3-4b")
TINY = Model(
    name="tiny-latent", hidden_size=64, intermediate_size=160, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=4, head_dim=24, vocab_size=128,
    max_position_embeddings=32, norm="rms_norm", activation="silu", gated_mlp=True,
    position="rotary", attention_bias=False, mlp_bias=False, tie_word_embeddings=False,
    q_lora_rank=32, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12,
)  # fmt: skip
BF16 = Elements(2, 2, 2, "bf16")


# A layer: 2560 x 768 + 768 + 768 x 40 x 96 (queries), 2560 x 288 + 256 + 256 x 40 x 128 (keys and
# values), 40 x 64 x 2560 (output), 3 x 2560 x 6400, 2 x 2560 (norms) = 62,674,944; 62 of them,
# a tied embedding of 73,448 x 2560, a last norm.
def test_minicpm3_has_its_published_parameters() -> None:
    assert num_parameters(MINICPM) == 62 * 62_674_944 + 73_448 * 2560 + 2560 == 4_073_875_968


# 2 x 2 heads x 8^2 scores, half of them masked: 128 for each number of a head; queries, keys have
# 24, values 12. Backward: scores, dq, dk over 24; dv and the scores' gradient over 12.
def test_flash_attention_counts_the_dims_of_keys_and_of_values() -> None:
    o = flash_attention(BF16, Heads(1, 8, 2, 2, 24, value_dim=12))
    (forward,), (backward,) = o.forward, o.input_grad
    assert forward.flops == 128 * (24 + 12)
    assert backward.flops == 128 * (3 * 24 + 2 * 12)
    assert o.model_flops == 2 * 128 * 36


# Each module spares bytes of its own, and only the up projections have products to run again.
def test_modules_of_light_recomputation_add_up() -> None:
    x = Shapes(microbatch_size=1, sequence_length=64, tp=1, elements=BF16, attention="flash")
    layer = blocks(MINICPM, x).layer.operators

    def saved(modules: tuple[str, ...]) -> float:
        return sum(o.saved_bytes or 0.0 for o in lightly(layer, modules))

    parts = [saved(()) - saved((module,)) for module in MODULES]
    assert all(part > 0 for part in parts)
    assert sum(parts) == saved(()) - saved(MODULES)
    assert saved(()) == sum(o.kept_bytes for o in layer)
    again = [
        sum(k.flops for o in lightly(layer, (module,)) for k in o.again if isinstance(k, Kernel)
            and k.matmul)
        for module in MODULES
    ]  # fmt: skip
    assert again[:2] == [0, 0]
    assert again[2] > 0


# 8 tokens x 2 heads: q and k of 24, v of 12 numbers of 2 bytes, and 4 bytes a row and head.
def test_flash_attention_keeps_queries_keys_and_shorter_values() -> None:
    o = flash_attention(BF16, Heads(1, 8, 2, 2, 24, value_dim=12))
    assert o.kept_bytes == 16 * (2 * (24 + 24 + 12) + 4)


def test_both_forms_of_attention_have_the_same_model_flops() -> None:
    heads = Heads(1, 8, 2, 2, 24, value_dim=12)
    apart = unfused_attention(BF16, heads, dropout=False)
    assert sum(o.model_flops for o in apart) == flash_attention(BF16, heads).model_flops


# One layer, one rank: 64 x 32 + 32 + 32 x 4 x 24, 64 x 24 + 16 + 16 x 4 x 28, 4 x 12 x 64.
def test_a_latent_layer_has_the_parameters_of_its_products() -> None:
    queries, keys, output = 2048 + 32 + 3072, 1536 + 16 + 1792, 3072
    layer = blocks(TINY, Shapes(
        microbatch_size=1, sequence_length=32, tp=1, elements=BF16, attention="flash"
    )).layer  # fmt: skip
    assert layer.params == queries + keys + output + 3 * 64 * 160 + 2 * 64


def test_queries_may_come_straight_from_the_hidden_state() -> None:
    straight = replace(TINY, q_lora_rank=None)
    saved = 64 * 32 + 32 + 32 * 96 - 64 * 96
    assert num_parameters(TINY) - num_parameters(straight) == 4 * saved


# Up projections, output and MLP are divided by 2; down projections and norms are on both ranks.
def test_tensor_parallel_ranks_repeat_the_down_projections(scenario_of) -> None:
    whole, half = (
        static_memory(scenario_of(model=TINY, plan={"tp": tp}))[0].params for tp in (1, 2)
    )
    repeated = 4 * (64 * 32 + 32 + 64 * 24 + 16 + 2 * 64) + 64
    assert half == (whole - repeated) // 2 + repeated


# Forward gathers 32 tokens of 32 query numbers, of 16 + 8 numbers of keys and values, and the MLP's
# 64; 2 bytes each. Each tp rank norms 16 tokens.
def test_sequence_parallel_ranks_gather_what_up_projections_read(scenario_of) -> None:
    s = scenario_of(model=TINY, plan={"tp": 2, "sequence_parallel": True}, run={"num_steps": 1})
    layer = blocks(TINY, shapes(s)).layer
    gathered = [
        part.bytes
        for o in layer.operators
        for part in o.forward
        if isinstance(part, Flow) and part.name == "all_gather"
    ]
    assert gathered == [2.0 * 32 * 32, 2.0 * 32 * 24, 2.0 * 32 * 64]


@pytest.mark.parametrize(
    "plan",
    [
        {"tp": 2},
        {"tp": 2, "sequence_parallel": True, "tp_overlap": "all"},
        {"pp": 2, "dp": 2, "zero": 3},
        {"recompute": "full"},
        {"recompute": "selective"},
    ],
)
@pytest.mark.parametrize("attention", ["flash", "unfused"])
def test_a_latent_model_runs_under_every_plan(scenario_of, plan, attention) -> None:
    result = sim.simulate(scenario_of(model=TINY, plan=plan, run={"attention": attention}))
    assert result.step_time_s > 0


# 62 layers x (256 + 32) x 2 bytes.
def test_the_cache_holds_what_keys_and_values_are_made_from() -> None:
    assert kv_cache_bytes_per_token(MINICPM, tp=8) == 62 * 288 * 2


def test_what_latent_attention_lacks_is_said() -> None:
    with pytest.raises(DescriptionError, match="v_head_dim: missing beside kv_lora_rank"):
        replace(TINY, v_head_dim=None)
    with pytest.raises(DescriptionError, match="q_lora_rank: is for latent attention"):
        replace(
            TINY, kv_lora_rank=None, qk_nope_head_dim=None, qk_rope_head_dim=None, v_head_dim=None
        )


def test_recomputation_by_operators_is_refused(scenario_of) -> None:
    with pytest.raises(DescriptionError, match="'selective-op' is not modelled of tiny-latent"):
        lower(scenario_of(model=TINY, plan={"recompute": "selective-op"}))
