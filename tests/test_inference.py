"""What serving takes beside training: weights in three formats, and the KV cache."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import simulator as sim
from simulator.lower.layers import num_parameters
from simulator.report.inference import (
    FORMATS,
    inference,
    inference_text,
    kv_cache_bytes_per_token,
    weight_bytes,
)

GOLDEN = Path(__file__).parent / "golden"


def load(name, **plan):
    return sim.load(name, {f"plan.{key}": value for key, value in plan.items()})


LLAMA = load("llama-3-8b-3d", tp=1, dp=16)
GPT3 = sim.load("gpt3-175b-1024gpu")


# Grouped queries: 2 x 32 layers x 8 key-value heads x 128 x 2 bytes = 131,072 = 128 KiB.
def test_llama_3_8b_keeps_128_kib_a_token():
    assert kv_cache_bytes_per_token(LLAMA.model) == 131_072


# 2 x 96 layers x 96 heads x 128 x 2 bytes = 4,718,592 = 4.5 MiB; over tp 8 an eighth of it.
def test_gpt_3_keeps_4_and_a_half_mib_a_token():
    assert kv_cache_bytes_per_token(GPT3.model) == 4_718_592
    assert kv_cache_bytes_per_token(GPT3.model, tp=8) == 589_824


# OPT-13B, as PagedAttention's section 3 counts: 2 x 5120 hidden x 40 layers x 2 bytes = 800 KiB.
def test_opt_13b_keeps_the_800_kib_that_vllm_states():
    opt = replace(
        GPT3.model, num_hidden_layers=40, hidden_size=5120, num_attention_heads=40,
        num_key_value_heads=40, head_dim=128,
    )  # fmt: skip
    assert kv_cache_bytes_per_token(opt) == 800 * 1024


def test_weights_in_bf16_are_two_bytes_a_parameter():
    assert weight_bytes(LLAMA) == 2 * num_parameters(LLAMA.model) == 16_060_522_496


def test_a_tied_embedding_is_held_once():
    gpt2 = sim.load("gpt2-xl-1gpu")
    assert weight_bytes(gpt2) == 2 * num_parameters(gpt2.model)


# A layer of Llama-3 8B: qkv 4096 x 6144, proj 4096 x 4096, gate and up 4096 x 28672, down
# 14336 x 4096 = 218,103,808 weights; outputs 6144 + 4096 + 28672 + 4096 = 43,008. int8: a byte each
# and 2 bytes an output. The other 8,030,261,248 - 32 x 218,103,808 = 1,050,939,392 stay bf16.
def test_int8_has_a_scale_an_output():
    by_hand = 32 * (218_103_808 + 2 * 43_008) + 2 * 1_050_939_392
    assert weight_bytes(LLAMA, FORMATS["int8"]) == by_hand


# int4: half a byte each, and 16 + 4 bits for each group of 128: 218,103,808 / 128 = 1,703,936.
# 5.73 GB is what checkpoints of Llama-3 8B in AWQ's format take.
def test_int4_has_a_scale_and_a_zero_point_a_group():
    by_hand = 32 * (218_103_808 / 2 + 1_703_936 * 2.5) + 2 * 1_050_939_392
    assert weight_bytes(LLAMA, FORMATS["int4"]) == by_hand
    assert by_hand == pytest.approx(5.73e9, rel=1e-3)


# 1600 inputs of GPT-2 XL make 12.5 groups: 13.
def test_a_last_group_may_be_short():
    gpt2 = sim.load("gpt2-xl-1gpu")
    sizes = [(1600, 4800, 13), (1600, 1600, 13), (1600, 6400, 13), (6400, 1600, 50)]
    weights = sum(i * o for i, o, _ in sizes)
    stored = sum(i * o / 2 + o * groups * 2.5 for i, o, groups in sizes)
    rest = 2 * (num_parameters(gpt2.model) - 48 * weights)
    assert weight_bytes(gpt2, FORMATS["int4"]) == 48 * stored + rest


# 80 GiB - 16,060,522,496 = 69,838,823,424; a sequence of 8,192 tokens takes 2^30: 65 fit.
def test_as_many_sequences_as_fit_beside_the_weights():
    found = inference(LLAMA)
    assert found.kv_cache_bytes_per_sequence == 2**30
    assert found.weights["bf16"].sequences == 65


def test_weights_that_do_not_fit_leave_no_room_for_a_sequence():
    found = inference(sim.load("llama-3-405b-16384gpu"))
    assert found.weights["bf16"].left_bytes < 0
    assert found.weights["bf16"].sequences == 0
    assert found.weights["int4"].sequences > 0


def test_the_text_is_this():
    text = inference_text(sim.load("llama-3-8b-3d"))
    assert f"{text}\n" == (GOLDEN / "inference-llama-3-8b.txt").read_text(encoding="utf-8")


def test_show_memory_has_it_below_training(trainsim):
    code, out, _ = trainsim("show", "memory", "llama-3-8b-3d")
    assert code == 0
    assert out.index("optimizer") < out.index("KV cache 32.77 kB a token on each of 4 GPUs")


def test_show_memory_gives_it_as_json(trainsim):
    code, out, _ = trainsim("show", "memory", "llama-3-8b-3d", "--json", "-")
    document = json.loads(out)
    assert (code, document["fits"], len(document["peak_memory_bytes"])) == (0, True, 64)
    assert document["inference"]["kv_cache_bytes_per_token"] == 131_072 // 4
    assert document["inference"]["weights"].keys() == FORMATS.keys()
