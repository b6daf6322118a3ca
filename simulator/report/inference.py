"""What serving the model would take beside what training it takes: weights and KV cache, by GPU.

Serving here is tensor-parallel like the plan and has no pipeline. Activations of a forward,
workspaces and what the framework reserves are left out.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any

from simulator.describe.model import Model
from simulator.describe.scenario import Scenario
from simulator.errors import DescriptionError
from simulator.lower.layers import blocks
from simulator.lower.shapes import Routing, shapes
from simulator.lower.trainable import embedding_weight
from simulator.report.text import table
from simulator.units import format_bytes

HALF = 2
"""Bytes of a bf16 number: what is not quantised, scales, and the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantised:
    """How the weights of a layer's matrix products are stored, in bits; all others stay bf16."""

    bits: int
    group: int | None = None
    """Weights along the inputs that share a scale; a whole row, an output's, when absent."""
    zero_point: int = 0
    """Bits of a group's zero point."""

    def __str__(self) -> str:
        zero = f" and a {self.zero_point}-bit zero point" if self.zero_point else ""
        return f"a bf16 scale{zero} for each {f'{self.group} weights' if self.group else 'output'}"


FORMATS: dict[str, Quantised | None] = {
    "bf16": None,
    "int8": Quantised(bits=8),
    "int4": Quantised(bits=4, group=128, zero_point=4),
}
"""Formats of weights.

int8: a scale an output channel, as LLM.int8() (Dettmers et al., 2022, arXiv 2208.07339) and
SmoothQuant keep. int4: groups of 128 with a zero point, as AWQ (Lin et al., 2023, arXiv
2306.00978) and its default ``q_group_size``; GPTQ (Frantar et al., 2022, arXiv 2210.17323) too
leaves the embedding and the output layer in 16 bits.
"""

BATCHES = (1, 8, 64)
"""Sequences whose cache is listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """One format of the weights, on each GPU."""

    weights_bytes: float
    left_bytes: float
    """Of the device's memory beside them; below zero where they do not fit."""
    sequences: int
    """Whole sequences whose cache fits into that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inference:
    """What serving takes on each of `tp` GPUs."""

    tp: int
    sequence_length: int
    memory_capacity_bytes: float
    kv_cache_bytes_per_token: int
    kv_cache_bytes_per_sequence: int
    weights: dict[str, Weights]
    """By format, a key of `FORMATS`."""


def kv_cache_bytes_per_token(model: Model, tp: int = 1) -> int:
    """Return the bytes of keys and values that each of `tp` GPUs keeps for one token.

    2 (key and value) x layers x key-value heads / tp x head size x 2 bytes of bf16: Kwon et al.,
    2023 (arXiv 2309.06180), section 3, with the shared heads of grouped-query attention (Ainslie et
    al., 2023, arXiv 2305.13245). With latent attention layers x (kv_lora_rank + qk_rope_head_dim)
    x 2 bytes, whole on each GPU (DeepSeek-V2, arXiv 2405.04434, section 2.1.4). A decoder's layers
    keep as much for each token of its encoder, whose own layers keep nothing.
    """
    layers = model.num_decoder_layers or model.num_hidden_layers
    if model.kv_lora_rank is not None:
        width = model.kv_lora_rank + (model.qk_rope_head_dim or 0)
        return layers * width * HALF
    heads = model.num_key_value_heads // tp
    return 2 * layers * heads * model.head_dim * HALF


def decodes(s: Scenario) -> bool:
    """Return whether serving the model means one token after the other."""
    return isinstance(s.model, Model) and s.model.causal


def decoder(s: Scenario) -> Model:
    """Return the model of a scenario, which serving keeps a cache for.

    Raises:
        DescriptionError: when it is none.
    """
    if not isinstance(s.model, Model) or not s.model.causal:
        raise DescriptionError(_NONE.format(s.model.name))
    return s.model


_NONE = "what serving takes is told of decoders only, which keep a cache; {} is none"


def weight_bytes(s: Scenario, how: Quantised | None = None) -> float:
    """Return the bytes of the whole model's weights on each of the plan's tp GPUs."""
    model = replace(decoder(s), num_nextn_predict_layers=0)  # which only training needs
    x = replace(shapes(s), routing=Routing(etp=s.plan.tp))  # experts are divided like all else
    parts = blocks(model, x)
    params = sum(block.params for block in (*parts.others, *parts.layers))
    if model.tie_word_embeddings:
        params -= embedding_weight(parts)
    if how is None:
        return float(HALF * params)
    operators = [o for b in parts.layers for o in b.operators if o.name != "router"]
    held = Counter(matrix for o in operators for matrix in o.matrices)
    rest = params - sum(n * inputs * outputs for (inputs, outputs), n in held.items())
    return HALF * rest + sum(n * _stored(how, *size) for size, n in held.items())


def _stored(how: Quantised, inputs: int, outputs: int) -> float:
    """Return the bytes of a quantised matrix: its weights, and what each group adds to them."""
    groups = outputs * (-(-inputs // how.group) if how.group else 1)
    return (inputs * outputs * how.bits + groups * (8 * HALF + how.zero_point)) / 8


def inference(s: Scenario) -> Inference:
    """Return what serving a scenario's model takes, for sequences of the scenario's length: with an
    encoder's tokens where it has one.
    """
    token = kv_cache_bytes_per_token(decoder(s), s.plan.tp)
    sequence = token * s.tokens_per_sample
    capacity = min(node.device.memory for node in s.cluster.kinds)
    weights = {}
    for name, how in FORMATS.items():
        size = weight_bytes(s, how)
        left = capacity - size
        fit = max(0, int(left // sequence))
        weights[name] = Weights(weights_bytes=size, left_bytes=left, sequences=fit)
    return Inference(
        tp=s.plan.tp,
        sequence_length=s.tokens_per_sample,
        memory_capacity_bytes=capacity,
        kv_cache_bytes_per_token=token,
        kv_cache_bytes_per_sequence=sequence,
        weights=weights,
    )


def inference_text(s: Scenario) -> str:
    """Return `inference` as a table, with what the cache of some batches takes."""
    if not decodes(s):
        return _NONE.format(s.model.name)
    i, model = inference(s), decoder(s)
    tokens = f"sequences of {i.sequence_length:,} tokens"
    rows = [["inference", "weights", "left", f"{tokens} beside"]]
    rows += [
        [name, format_bytes(w.weights_bytes), format_bytes(w.left_bytes),
         f"{w.sequences:,}" if w.left_bytes >= 0 else "weights do not fit"]
        for name, w in i.weights.items()
    ]  # fmt: skip
    each, over = (f" on each of {i.tp} GPUs (tp)", f" / {i.tp}") if i.tp > 1 else ("", "")
    layers = f"{model.num_decoder_layers or model.num_hidden_layers} layers"
    cached = f"2 x {layers} x {model.num_key_value_heads} key-value heads{over} x {model.head_dim}"
    if model.is_latent:
        cached = f"{layers} x ({model.kv_lora_rank} latent + {model.qk_rope_head_dim} rotated)"
    both = [
        "  in layers of the decoder, for tokens of the encoder too; the encoder's layers keep none"
    ]
    token = format_bytes(i.kv_cache_bytes_per_token)
    batches = (f"{format_bytes(n * i.kv_cache_bytes_per_sequence)} for {n}" for n in BATCHES)
    scales = "; ".join(f"{name} has {how}" for name, how in FORMATS.items() if how is not None)
    return "\n".join([
        table(rows),
        f"KV cache {token} a token{each}: {cached} x {HALF} bytes",
        *(both if model.num_decoder_layers else []),
        f"  {', '.join(batches)} {tokens}",
        scales,
        f"embedding, head, norms{', routers' if model.num_experts else ''} and biases stay bf16; "
        "activations and workspaces are left out, and "
        f"there is no pipeline{', on the smallest kind of device' * s.cluster.is_mixed}",
    ])  # fmt: skip


def inference_dict(s: Scenario) -> dict[str, Any] | None:
    """Return `inference` as plain values, units in the names of keys; None for no decoder."""
    return asdict(inference(s)) if decodes(s) else None
