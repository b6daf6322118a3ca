"""Megatron-LM's flags of the network, as the fields of a model."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

from simulator.exchange.megatron.arguments import Arguments
from simulator.exchange.megatron.draft import Draft
from simulator.exchange.megatron.stages import layers_of

NORMS = {"LayerNorm": "layer_norm", "RMSNorm": "rms_norm"}
POSITIONS = {"learned_absolute": "learned", "rope": "rotary"}

TOKENS: Mapping[str, int] = {
    r"GPT2BPETokenizer": 50257,
    r"Llama2Tokenizer": 32000,
    r".*(llama-?2|mixtral-8x7b|mixtral-8x22b|mistral-7b-v0\.1).*": 32000,
    r".*llama-?3.*": 128256,
    r".*deepseek-v3.*": 128815,
    r".*gpt-?2.*": 50257,
}
"""Tokens of a tokenizer, by its type or the name of its model."""

SWIGLU_MULTIPLE = 64
"""To a multiple of which Megatron-LM cuts the width of a gated MLP that is not stated."""


def model(draft: Draft) -> None:
    """Fill the table of the model."""
    args = draft.args
    hidden, heads = args["hidden-size"], args["num-attention-heads"]
    for name, value in (("num-layers", layers_of(args)), ("hidden-size", hidden),
                        ("num-attention-heads", heads)):  # fmt: skip
        if not value:
            args.complain(name, "Megatron-LM needs it, and it is not given")
    if args.problems:
        return
    gated, activation = _activation(draft)
    draft.put("model.hidden_size", hidden, "hidden-size")
    draft.put("model.intermediate_size", width(args), "ffn-hidden-size", "swiglu")
    draft.put("model.num_hidden_layers", layers_of(args), "num-layers", "encoder-num-layers")
    draft.put("model.num_attention_heads", heads, "num-attention-heads")
    grouped = args["group-query-attention"]
    latent = args["multi-latent-attention"]
    groups = args["num-query-groups"] if grouped and not latent else heads
    draft.put(
        "model.num_key_value_heads", groups, "group-query-attention",
        *(("num-query-groups",) if grouped else ()),
    )  # fmt: skip
    if args.said("num-query-groups") and not grouped:
        draft.leave_out("num-query-groups", "Megatron-LM heeds it with --group-query-attention")
    if args["kv-channels"] is None and hidden % heads:
        args.complain("kv-channels", f"{heads} heads do not divide a hidden size of {hidden}")
    if latent:
        draft.takes("kv-channels")
        size = args["qk-head-dim"] + args["qk-pos-emb-head-dim"]
        draft.put("model.head_dim", size, "qk-head-dim", "qk-pos-emb-head-dim")
    else:
        draft.put("model.head_dim", args["kv-channels"] or hidden // heads, "kv-channels")
    _vocabulary(draft)
    _positions(draft)
    _norms(draft)
    draft.put("model.activation", activation, "swiglu", "quick-geglu", "squared-relu")
    draft.put("model.gated_mlp", gated, "swiglu", "quick-geglu")
    _biases(draft)
    untied = args["untie-embeddings-and-output-weights"]
    draft.put("model.tie_word_embeddings", not untied, "untie-embeddings-and-output-weights")
    if window := args["window-size"]:
        _window(draft, window)
    for key, flag in (("embedding_dropout", "hidden-dropout"), ("hidden_dropout", "hidden-dropout"),
                      ("attention_dropout", "attention-dropout")):  # fmt: skip
        draft.put(f"model.{key}", args[flag], flag)
    _experts(draft)
    _latent_attention(draft)
    if args["mtp-num-layers"]:
        draft.put("model.num_nextn_predict_layers", args["mtp-num-layers"], "mtp-num-layers")
    else:
        draft.takes("mtp-num-layers")


def width(args: Arguments) -> int:
    """Return the width of the MLP: four times the hidden size, two thirds of that where gated."""
    stated, hidden = args["ffn-hidden-size"], args["hidden-size"] or 0
    if stated:
        return int(stated)
    if args["swiglu"]:
        return int((4 * hidden * 2 / 3) / SWIGLU_MULTIPLE) * SWIGLU_MULTIPLE
    return 4 * int(hidden)


def _activation(draft: Draft) -> tuple[bool, str]:
    args = draft.args
    chosen = [f for f in ("swiglu", "quick-geglu", "squared-relu") if args[f]]
    if len(chosen) > 1:
        args.complain(chosen[1], f"it cannot be had together with --{chosen[0]}")
    return {
        "swiglu": (True, "silu"), "quick-geglu": (True, "gelu"), "squared-relu": (False, "relu2"),
    }.get(chosen[0] if chosen else "", (False, "gelu"))  # fmt: skip


def _vocabulary(draft: Draft) -> None:
    """Set the vocabulary, padded as Megatron-LM pads it."""
    args, tp = draft.args, draft.args["tensor-model-parallel-size"]
    padded = args["padded-vocab-size"]
    if padded:
        draft.put("model.vocab_size", padded, "padded-vocab-size")
        draft.takes("vocab-size", "make-vocab-size-divisible-by", "tokenizer-type",
                    "tokenizer-model", "vocab-extra-ids")  # fmt: skip
        return
    tokens, source = _tokens(args)
    if not tokens:
        args.complain(
            "vocab-size",
            "the size of the tokenizer's vocabulary is not known"
            if args.said("vocab-size")
            else f"the vocabulary of {source} is not known; add -- --vocab-size TOKENS",
        )
        return
    tokens += args["vocab-extra-ids"]
    multiple = max(1, args["make-vocab-size-divisible-by"]) * tp
    size = -(-tokens // multiple) * multiple
    draft.put("model.vocab_size", size, "vocab-size", "make-vocab-size-divisible-by",
              "tokenizer-type", "tokenizer-model", "vocab-extra-ids")  # fmt: skip
    draft.note("model.vocab_size", f"{tokens} tokens of {source}, to a multiple of {multiple}")


def _tokens(args: Arguments) -> tuple[int, str]:
    """Return the tokens of the tokenizer, 0 where they are not known, and its name.

    A NullTokenizer has one more than it is told, for the end of a document.
    """
    kind = args.words.get("tokenizer-type", ("",))[0] if args.said("tokenizer-type") else ""
    named = args.words.get("tokenizer-model", ())
    stated = args["vocab-size"]
    if kind.startswith("Null") and stated:
        return stated + 1, f"--tokenizer-type {kind}, one for the end of a document"
    if stated:
        return stated, f"--vocab-size {stated}"
    for name in (kind, *named):
        for pattern, tokens in TOKENS.items():
            if re.fullmatch(pattern, name, re.IGNORECASE):
                return tokens, name
    if not kind and args.said("merge-file"):
        return TOKENS["GPT2BPETokenizer"], "GPT-2, whose tokenizer has a --merge-file"
    return 0, " ".join(filter(None, (kind, *named))) or "the tokenizer"


def _positions(draft: Draft) -> None:
    args = draft.args
    kind = "rope" if args["use-rotary-position-embeddings"] else args["position-embedding-type"]
    if kind not in POSITIONS:
        draft.refuse("position-embedding-type", f"modelled are {' and '.join(POSITIONS)} positions")
        return
    draft.put("model.position", POSITIONS[kind], "position-embedding-type",
              "use-rotary-position-embeddings")  # fmt: skip
    length = args["seq-length"] or args["encoder-seq-length"] or 1
    flag = "max-position-embeddings"
    draft.put("model.max_position_embeddings", args[flag] or length, flag)


def _norms(draft: Draft) -> None:
    kind = draft.args["normalization"]
    if kind not in NORMS:
        draft.args.complain("normalization", f"{kind!r} is not one of {', '.join(NORMS)}")
        return
    draft.put("model.norm", NORMS[kind], "normalization")
    if not draft.args["multi-latent-attention"]:
        draft.put("model.qk_norm", draft.args["qk-layernorm"], "qk-layernorm")


def _biases(draft: Draft) -> None:
    biased = not draft.args["disable-bias-linear"]
    of_qkv = draft.args["add-qkv-bias"]
    draft.put("model.attention_bias", biased or of_qkv, "disable-bias-linear", "add-qkv-bias")
    if of_qkv and not biased:
        draft.put("model.output_bias", False, "disable-bias-linear", "add-qkv-bias")
    draft.put("model.mlp_bias", biased, "disable-bias-linear")


def _window(draft: Draft, text: str) -> None:
    """Set how far back attention reaches, from ``(back, ahead)``."""
    numbers = re.fullmatch(r"\(?\s*(-?\d{1,15})\s*,\s*(-?\d{1,15})\s*\)?", text)
    if not numbers:
        draft.args.complain("window-size", f"{text!r} is not two numbers (back,ahead)")
    elif int(numbers[1]) > 0:
        draft.put("model.attention_window", int(numbers[1]), "window-size")
    else:
        draft.takes("window-size")


# --- experts and latent attention -----------------------------------------------------------------


def _experts(draft: Draft) -> None:
    args, count = draft.args, draft.args["num-experts"]
    of_experts = [
        "moe-layer-freq", "moe-ffn-hidden-size", "moe-shared-expert-intermediate-size",
        "moe-router-topk", "moe-expert-capacity-factor", "moe-pad-expert-input-to-capacity",
        "moe-router-num-groups", "moe-router-group-topk",
    ]  # fmt: skip
    if not count:
        draft.takes("num-experts")
        for flag in filter(args.said, of_experts):
            draft.leave_out(flag, "it is for --num-experts, of which there are none")
        return
    each = args["moe-ffn-hidden-size"] or width(args)
    draft.put("model.num_experts", count, "num-experts")
    draft.put("model.num_experts_per_tok", args["moe-router-topk"], "moe-router-topk")
    draft.put("model.moe_intermediate_size", each, "moe-ffn-hidden-size")
    shared = args["moe-shared-expert-intermediate-size"]
    if shared and shared % each:
        draft.refuse(
            "moe-shared-expert-intermediate-size",
            f"a shared expert whose width is no multiple of the experts' {each} is not modelled",
        )
    elif shared:
        flag = "moe-shared-expert-intermediate-size"
        draft.put("model.num_shared_experts", shared // each, flag)
    first, every = _sparse_layers(draft)
    if first:
        draft.put("model.first_k_dense_replace", first, "moe-layer-freq")
    if every > 1:
        draft.put("model.moe_layer_freq", every, "moe-layer-freq")
    draft.takes("moe-layer-freq")
    groups, most = args["moe-router-num-groups"], args["moe-router-group-topk"]
    draft.takes("moe-router-num-groups", "moe-router-group-topk")
    if groups and most:
        draft.put("model.n_group", groups, "moe-router-num-groups")
        draft.put("model.topk_group", most, "moe-router-group-topk")


def _sparse_layers(draft: Draft) -> tuple[int, int]:
    """Return how many first layers are dense, and of how many layers one has experts."""
    text, layers = draft.args["moe-layer-freq"] or "1", layers_of(draft.args)
    if re.fullmatch("[1-9][0-9]{0,8}", text):
        return 0, int(text)
    try:
        pattern = _pattern(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        draft.args.complain("moe-layer-freq", f"{text!r} is no number and no list as [0]*3+[1]*58")
        return 0, 1
    first = pattern.index(1) if 1 in pattern else len(pattern)
    if pattern == [0] * first + [1] * (layers - first):
        return first, 1
    for every in range(2, layers + 1):
        if pattern == [int(layer % every == 0) for layer in range(layers)]:
            return 0, every
    if len(pattern) != layers:
        draft.args.complain("moe-layer-freq", f"it is for {len(pattern)} layers, not {layers}")
    else:
        draft.refuse("moe-layer-freq", "modelled are dense layers first, or experts in every nth")
    return 0, 1


def _pattern(node: ast.expr) -> list[int]:
    """Return the value of an expression of lists of 0 and 1, joined by + and repeated by *.

    Raises:
        ValueError: for anything else, and for more layers than any model has.
    """
    value: Any = None
    if isinstance(node, ast.List):
        value = [e.value for e in node.elts if isinstance(e, ast.Constant)]
        if len(value) < len(node.elts) or any(v not in (0, 1) for v in value):
            raise ValueError
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        value = _pattern(node.left) + _pattern(node.right)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        times = node.right.value if isinstance(node.right, ast.Constant) else None
        if not isinstance(times, int) or not 0 <= times <= MOST_LAYERS:
            raise ValueError
        value = _pattern(node.left)
        if len(value) * times > MOST_LAYERS:
            raise ValueError
        value = value * times
    if value is None or len(value) > MOST_LAYERS:
        raise ValueError
    return list(value)


MOST_LAYERS = 10_000
"""Layers that a pattern may have."""

LATENT = {
    "q-lora-rank": "q_lora_rank", "kv-lora-rank": "kv_lora_rank",
    "qk-head-dim": "qk_nope_head_dim", "qk-pos-emb-head-dim": "qk_rope_head_dim",
    "v-head-dim": "v_head_dim",
}  # fmt: skip
"""Flags of latent attention (DeepSeek-V2, arXiv 2405.04434) and Hugging Face's words for them."""


def _latent_attention(draft: Draft) -> None:
    if not draft.args["multi-latent-attention"]:
        for flag in filter(draft.args.said, LATENT):
            draft.leave_out(flag, "it is for --multi-latent-attention, which is not given")
        return
    draft.takes("multi-latent-attention", "qk-layernorm")
    if not draft.args["qk-layernorm"]:
        draft.leave_out("multi-latent-attention", "the latent vectors are normalised, as with "
                        "--qk-layernorm")  # fmt: skip
    for flag, key in LATENT.items():
        if draft.args[flag]:
            draft.put(f"model.{key}", draft.args[flag], flag, "multi-latent-attention")
