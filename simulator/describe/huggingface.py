"""Hugging Face ``config.json`` files, verbatim, as models.

Each family is one function from the file's keys to the fields of `Model` or `ResNet`. Keys that do
not change the arithmetic of training (token ids, initialisers, generation settings) are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from simulator.describe.keys import Keys
from simulator.errors import DescriptionError


def _gpt2(keys: Keys) -> dict[str, Any]:
    hidden, heads = keys.count("n_embd"), keys.count("n_head")
    if hidden % heads and not keys.problems:
        keys.problems.append(f"n_head {heads} does not divide n_embd {hidden}")
    if keys.flag("add_cross_attention", False):
        keys.problems.append("add_cross_attention: an encoder beside the decoder is not modelled")
    return {
        "hidden_size": hidden,
        "intermediate_size": keys.count("n_inner", 4 * hidden),
        "num_hidden_layers": keys.count("n_layer"),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": hidden // heads,
        "vocab_size": keys.count("vocab_size"),
        "max_position_embeddings": keys.count("n_positions"),
        "norm": "layer_norm",
        "activation": keys.activation("activation_function", "gelu_new"),
        "gated_mlp": False,
        "position": "learned",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": keys.flag("tie_word_embeddings", True),
        "embedding_dropout": keys.share("embd_pdrop", 0.1),
        "hidden_dropout": keys.share("resid_pdrop", 0.1),
        "attention_dropout": keys.share("attn_pdrop", 0.1),
    }


def _llama(keys: Keys) -> dict[str, Any]:
    hidden, heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    if hidden % heads and keys.get("head_dim") is None and not keys.problems:
        keys.problems.append(f"num_attention_heads {heads} does not divide hidden_size {hidden}")
    return {
        "hidden_size": hidden,
        "intermediate_size": keys.count("intermediate_size"),
        "num_hidden_layers": keys.count("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.count("num_key_value_heads", heads),
        "head_dim": keys.count("head_dim", max(1, hidden // heads)),
        "vocab_size": keys.count("vocab_size"),
        "max_position_embeddings": keys.count("max_position_embeddings"),
        "norm": "rms_norm",
        "activation": keys.activation("hidden_act", "silu"),
        "gated_mlp": True,
        "position": "rotary",
        "attention_bias": keys.flag("attention_bias", False),
        "mlp_bias": keys.flag("mlp_bias", False),
        "tie_word_embeddings": keys.flag("tie_word_embeddings", False),
        "attention_dropout": keys.share("attention_dropout", 0.0),
    }


def _mistral(keys: Keys) -> dict[str, Any]:
    return _llama(keys) | _window(keys)


def _qwen2(keys: Keys) -> dict[str, Any]:
    window = _window(keys) if keys.flag("use_sliding_window", False) else {}
    return _llama(keys) | {"attention_bias": True, "output_bias": False} | window


def _qwen3(keys: Keys) -> dict[str, Any]:
    window = _window(keys) if keys.flag("use_sliding_window", False) else {}
    return _llama(keys) | {"qk_norm": True} | window


def _window(keys: Keys) -> dict[str, Any]:
    absent = keys.get("sliding_window") is None
    return {} if absent else {"attention_window": keys.count("sliding_window")}


def _mixtral(keys: Keys) -> dict[str, Any]:
    return _mistral(keys) | {
        "num_experts": keys.count("num_local_experts", 8),
        "num_experts_per_tok": keys.count("num_experts_per_tok", 2),
        "moe_intermediate_size": keys.count("intermediate_size"),
    }


def _qwen3_moe(keys: Keys) -> dict[str, Any]:
    if keys.get("mlp_only_layers", []):
        stated = keys.get("mlp_only_layers")
        keys.problems.append(f"mlp_only_layers {stated!r}: layers without experts are not modelled")
    if keys.get("decoder_sparse_step", 1) != 1:
        step = keys.get("decoder_sparse_step")
        keys.problems.append(f"decoder_sparse_step {step!r} is not modelled; 1 is")
    return _qwen3(keys) | {
        "num_experts": keys.count("num_experts", 128),
        "num_experts_per_tok": keys.count("num_experts_per_tok", 8),
        "moe_intermediate_size": keys.count("moe_intermediate_size", 768),
    }


def _latent(keys: Keys, value_dim: int | None = None) -> dict[str, Any]:
    """Return the fields of a decoder with multi-head latent attention."""
    nope, rope = keys.count("qk_nope_head_dim"), keys.count("qk_rope_head_dim")
    own = {} if keys.get("q_lora_rank") is None else {"q_lora_rank": keys.count("q_lora_rank")}
    plain = Keys({**keys.config, "head_dim": nope + rope})  # the file's own is of rotated parts
    fields = _llama(plain)
    keys.problems += plain.problems
    return (
        fields
        | own
        | {
            "kv_lora_rank": keys.count("kv_lora_rank"),
            "qk_nope_head_dim": nope,
            "qk_rope_head_dim": rope,
            "v_head_dim": keys.count("v_head_dim", value_dim),
        }
    )


def _minicpm3(keys: Keys) -> dict[str, Any]:
    hidden, heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    tied = keys.flag("tie_word_embeddings", True)
    return _latent(keys, max(1, hidden // heads)) | {"tie_word_embeddings": tied}


def _deepseek_v3(keys: Keys) -> dict[str, Any]:
    return _latent(keys) | {
        "num_experts": keys.count("n_routed_experts"),
        "num_experts_per_tok": keys.count("num_experts_per_tok"),
        "moe_intermediate_size": keys.count("moe_intermediate_size"),
        "num_shared_experts": keys.natural("n_shared_experts", 0),
        "first_k_dense_replace": keys.natural("first_k_dense_replace", 0),
        "moe_layer_freq": keys.count("moe_layer_freq", 1),
        "n_group": keys.count("n_group", 1),
        "topk_group": keys.count("topk_group", 1),
        "num_nextn_predict_layers": keys.natural("num_nextn_predict_layers", 0),
    }


def _encoder(keys: Keys) -> dict[str, Any]:
    hidden, heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    if hidden % heads and not keys.problems:
        keys.problems.append(f"num_attention_heads {heads} does not divide hidden_size {hidden}")
    dropout = keys.share("hidden_dropout_prob", 0.1)
    return {
        "hidden_size": hidden,
        "intermediate_size": keys.count("intermediate_size"),
        "num_hidden_layers": keys.count("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": max(1, hidden // heads),
        "norm": "layer_norm",
        "activation": keys.activation("hidden_act", "gelu"),
        "gated_mlp": False,
        "position": "learned",
        "attention_bias": True,
        "mlp_bias": True,
        "causal": False,
        "head_bias": True,
        "embedding_dropout": dropout,
        "hidden_dropout": dropout,
        "attention_dropout": keys.share("attention_probs_dropout_prob", 0.1),
    }


def _bert(keys: Keys) -> dict[str, Any]:
    task = keys.task("BertForMaskedLM", "BertForPreTraining")
    if keys.flag("is_decoder", False):
        keys.problems.append("is_decoder: BERT is modelled as an encoder")
    if keys.get("position_embedding_type", "absolute") != "absolute":
        kind = keys.get("position_embedding_type")
        keys.problems.append(f"position_embedding_type {kind!r} is not modelled; 'absolute' is")
    return _encoder(keys) | {
        "vocab_size": keys.count("vocab_size"),
        "max_position_embeddings": keys.count("max_position_embeddings"),
        "token_types": keys.count("type_vocab_size", 2),
        "tie_word_embeddings": keys.flag("tie_word_embeddings", True),
        "head_transform": True,
        "pooler": task == "BertForPreTraining",
    }


def _vit(keys: Keys) -> dict[str, Any]:
    keys.task("ViTForImageClassification")
    image, patch = keys.count("image_size", 224), keys.count("patch_size", 16)
    return _encoder(keys) | {
        "vocab_size": keys.labels(),
        "max_position_embeddings": (image // patch) ** 2 + 1,
        "tie_word_embeddings": False,
        "attention_bias": keys.flag("qkv_bias", True),
        "output_bias": True,
        "patches": {
            "image_size": image,
            "patch_size": patch,
            "num_channels": keys.count("num_channels", 3),
        },
        "embedding_dropout": keys.share("hidden_dropout_prob", 0.0),
        "hidden_dropout": keys.share("hidden_dropout_prob", 0.0),
        "attention_dropout": keys.share("attention_probs_dropout_prob", 0.0),
    }


T5_TASKS = (
    "T5ForConditionalGeneration", "T5WithLMHeadModel", "MT5ForConditionalGeneration",
)  # fmt: skip
"""One class: now, in files of 2020, and for many languages."""


def _t5(keys: Keys) -> dict[str, Any]:
    keys.task(*T5_TASKS)
    heads, encoder = keys.count("num_heads", 8), keys.count("num_layers", 6)
    decoder = keys.count("num_decoder_layers", encoder)
    gate, _, function = str(keys.get("feed_forward_proj", "relu")).rpartition("-")
    if gate not in ("", "gated"):
        stated = keys.get("feed_forward_proj")
        keys.problems.append(f"feed_forward_proj {stated!r} is not modelled; 'gated-gelu' is")
    inner = Keys({"feed_forward_proj": function})
    dropout = keys.share("dropout_rate", 0.1)
    fields = {
        "hidden_size": keys.count("d_model"),
        "intermediate_size": keys.count("d_ff"),
        "num_hidden_layers": encoder + decoder,
        "num_decoder_layers": decoder,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": keys.count("d_kv"),
        "vocab_size": keys.count("vocab_size"),
        "max_position_embeddings": keys.count("n_positions", 512),
        "norm": "rms_norm",
        "activation": inner.activation("feed_forward_proj", "relu"),
        "gated_mlp": gate == "gated",
        "position": "relative",
        "relative_attention_num_buckets": keys.count("relative_attention_num_buckets", 32),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": keys.flag("tie_word_embeddings", True),
        "embedding_dropout": dropout,
        "hidden_dropout": dropout,
        "attention_dropout": dropout,
        "inner_dropout": dropout,
    }
    keys.problems += inner.problems
    return fields


def _resnet(keys: Keys) -> dict[str, Any]:
    keys.task("ResNetForImageClassification")
    if keys.activation("hidden_act", "relu") != "relu":
        keys.problems.append(f"hidden_act {keys.get('hidden_act')!r} is not modelled; 'relu' is")
    return {
        "model_type": "resnet",
        "num_channels": keys.count("num_channels", 3),
        "embedding_size": keys.count("embedding_size", 64),
        "hidden_sizes": keys.get("hidden_sizes", [256, 512, 1024, 2048]),
        "depths": keys.get("depths", [3, 4, 6, 3]),
        "layer_type": keys.get("layer_type", "bottleneck"),
        "num_labels": keys.labels(),
        "downsample_in_first_stage": keys.flag("downsample_in_first_stage", False),
        "downsample_in_bottleneck": keys.flag("downsample_in_bottleneck", False),
    }


def _alibi(
    keys: Keys, *, hidden: int, heads: int, layers: int, vocabulary: int, length: int
) -> dict[str, Any]:
    """Return a decoder of GPT's shape whose scores have ALiBi's bias instead of positions."""
    if hidden % heads and not keys.problems:
        keys.problems.append(f"{heads} heads do not divide a hidden size of {hidden}")
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": max(1, hidden // heads),
        "vocab_size": vocabulary,
        "max_position_embeddings": length,
        "activation": "gelu",
        "gated_mlp": False,
        "position": "alibi",
        "tie_word_embeddings": True,
    }


def _bloom(keys: Keys) -> dict[str, Any]:
    hidden = keys.count("hidden_size", keys.get("n_embed"))
    return _alibi(
        keys,
        hidden=hidden,
        heads=keys.count("n_head", keys.get("num_attention_heads")),
        layers=keys.count("n_layer", keys.get("num_hidden_layers")),
        vocabulary=keys.count("vocab_size"),
        length=keys.count("seq_length", 2048),
    ) | {
        "intermediate_size": 4 * hidden,
        "norm": "layer_norm",
        "embedding_norm": True,
        "attention_bias": True,
        "mlp_bias": True,
        "hidden_dropout": keys.share("hidden_dropout", 0.0),
        "attention_dropout": keys.share("attention_dropout", 0.0),
    }


def _mpt(keys: Keys) -> dict[str, Any]:
    hidden, has_bias = keys.count("d_model"), not keys.flag("no_bias", True)
    inner = Keys(keys.get("attn_config", {}))
    if not inner.flag("alibi", True):
        keys.problems.append("attn_config.alibi false: MPT is modelled with ALiBi")
    dropout = inner.share("attn_pdrop", 0.0)
    keys.problems += [f"attn_config: {problem}" for problem in inner.problems]
    return _alibi(
        keys,
        hidden=hidden,
        heads=keys.count("n_heads"),
        layers=keys.count("n_layers"),
        vocabulary=keys.count("vocab_size"),
        length=keys.count("max_seq_len", 2048),
    ) | {
        "intermediate_size": keys.count("expansion_ratio", 4) * hidden,
        "norm": "layer_norm" if has_bias else "layer_norm_no_bias",
        "attention_bias": has_bias,
        "mlp_bias": has_bias,
        "embedding_dropout": keys.share("emb_pdrop", 0.0),
        "hidden_dropout": keys.share("resid_pdrop", 0.0),
        "attention_dropout": dropout,
    }


FAMILIES: dict[str, Callable[[Keys], dict[str, Any]]] = {
    "gpt2": _gpt2, "llama": _llama, "mistral": _mistral, "qwen2": _qwen2, "qwen3": _qwen3,
    "bert": _bert, "vit": _vit, "resnet": _resnet, "bloom": _bloom, "mpt": _mpt,
    "mixtral": _mixtral, "qwen3_moe": _qwen3_moe, "minicpm3": _minicpm3,
    "deepseek_v3": _deepseek_v3, "t5": _t5, "mt5": _t5,
}  # fmt: skip
"""Reader of each `model_type`."""


def read_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a model, its name apart, from the content of a ``config.json``.

    Raises:
        DescriptionError: for an unknown `model_type`, or missing or wrong keys, all at once.
    """
    if isinstance(config.get("text_config"), dict) and config.get("model_type") not in FAMILIES:
        config = config["text_config"]  # multimodal models keep their decoder in there
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise DescriptionError(
            f"model_type {family!r} is not supported; supported are {', '.join(FAMILIES)}"
        )
    keys = Keys(config)
    fields = FAMILIES[family](keys)
    if keys.problems:
        raise DescriptionError(keys.problems)
    return fields
