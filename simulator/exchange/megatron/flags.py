"""Megatron-LM's flags, one row each: what becomes part of a scenario, and Megatron-LM's defaults.

Names, kinds and defaults are those of megatron/training/arguments.py of NVIDIA/Megatron-LM (2025);
``default`` is None where Megatron-LM derives the value or demands one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal["switch", "count", "number", "text", "texts"]


class Flag(NamedTuple):
    """A flag that is mapped."""

    kind: Kind
    """What stands behind it: nothing, a whole number, a number, a word, words."""
    default: Any
    becomes: str
    """What it decides, as keys of a scenario or in words."""


def _switch(becomes: str) -> Flag:
    return Flag("switch", False, becomes)


def _count(becomes: str, default: int | None = None) -> Flag:
    return Flag("count", default, becomes)


FLAGS: Mapping[str, Flag] = {
    # --- the launcher's: torchrun and its like ---
    "nnodes": Flag("text", None, "cluster.num_nodes"),
    "nproc-per-node": Flag("text", None, "cluster.devices_per_node"),
    # --- the model ---
    "num-layers": _count("model.num_hidden_layers"),
    "encoder-num-layers": _count("model.num_hidden_layers"),
    "hidden-size": _count("model.hidden_size"),
    "ffn-hidden-size": _count("model.intermediate_size"),
    "num-attention-heads": _count("model.num_attention_heads"),
    "kv-channels": _count("model.head_dim"),
    "group-query-attention": _switch("model.num_key_value_heads"),
    "num-query-groups": _count("model.num_key_value_heads", 1),
    "max-position-embeddings": _count("model.max_position_embeddings"),
    "normalization": Flag("text", "LayerNorm", "model.norm"),
    "swiglu": _switch("model.activation, model.gated_mlp"),
    "quick-geglu": _switch("model.activation, model.gated_mlp"),
    "squared-relu": _switch("model.activation"),
    "position-embedding-type": Flag("text", "learned_absolute", "model.position"),
    "use-rotary-position-embeddings": _switch("model.position"),
    "disable-bias-linear": _switch("model.attention_bias, model.mlp_bias"),
    "add-qkv-bias": _switch("model.attention_bias, model.output_bias"),
    "untie-embeddings-and-output-weights": _switch("model.tie_word_embeddings"),
    "qk-layernorm": _switch("model.qk_norm"),
    "window-size": Flag("text", None, "model.attention_window"),
    "attention-dropout": Flag("number", 0.1, "model.attention_dropout"),
    "hidden-dropout": Flag("number", 0.1, "model.hidden_dropout, model.embedding_dropout"),
    "vocab-size": _count("model.vocab_size"),
    "padded-vocab-size": _count("model.vocab_size"),
    "vocab-extra-ids": _count("model.vocab_size", 0),
    "make-vocab-size-divisible-by": _count("model.vocab_size", 128),
    "tokenizer-type": Flag("text", None, "model.vocab_size"),
    "tokenizer-model": Flag("text", None, "model.vocab_size"),
    # --- experts, latent attention, multi-token prediction ---
    "num-experts": _count("model.num_experts"),
    "moe-layer-freq": Flag("text", "1", "model.first_k_dense_replace, model.moe_layer_freq"),
    "moe-ffn-hidden-size": _count("model.moe_intermediate_size"),
    "moe-shared-expert-intermediate-size": _count("model.num_shared_experts"),
    "moe-router-topk": _count("model.num_experts_per_tok", 2),
    "moe-router-num-groups": _count("model.n_group"),
    "moe-router-group-topk": _count("model.topk_group"),
    "moe-expert-capacity-factor": Flag("number", None, "plan.expert_capacity"),
    "moe-pad-expert-input-to-capacity": _switch("plan.expert_padding"),
    "moe-token-dispatcher-type": Flag("text", "allgather", "plan.expert_dispatch"),
    "moe-enable-deepep": _switch("plan.expert_dispatch"),
    "moe-flex-dispatcher-backend": Flag("text", "deepep", "plan.expert_dispatch"),
    "moe-permute-fusion": _switch("run.expert_fusion"),
    "moe-router-fusion": _switch("run.expert_fusion"),
    "multi-latent-attention": _switch("model.kv_lora_rank and its like"),
    "q-lora-rank": _count("model.q_lora_rank"),
    "kv-lora-rank": _count("model.kv_lora_rank", 32),
    "qk-head-dim": _count("model.qk_nope_head_dim", 128),
    "qk-pos-emb-head-dim": _count("model.qk_rope_head_dim", 64),
    "v-head-dim": _count("model.v_head_dim", 128),
    "mtp-num-layers": _count("model.num_nextn_predict_layers"),
    # --- degrees of parallelism ---
    "tensor-model-parallel-size": _count("plan.tp", 1),
    "pipeline-model-parallel-size": _count("plan.pp", 1),
    "context-parallel-size": _count("plan.cp", 1),
    "cp-comm-type": Flag("texts", ("p2p",), "plan.cp_style"),
    "expert-model-parallel-size": _count("plan.ep", 1),
    "expert-tensor-parallel-size": _count("plan.etp"),
    "use-tp-pp-dp-mapping": _switch("plan.order"),
    "sequence-parallel": _switch("plan.sequence_parallel"),
    "tp-comm-overlap": _switch("plan.tp_overlap"),
    # --- the pipeline ---
    "num-layers-per-virtual-pipeline-stage": _count("plan.chunks, plan.schedule"),
    "num-virtual-stages-per-pipeline-rank": _count("plan.chunks, plan.schedule"),
    "microbatch-group-size-per-virtual-pipeline-stage": _count("plan.microbatch_group"),
    "decoder-first-pipeline-num-layers": _count("plan.first_stage_layers"),
    "decoder-last-pipeline-num-layers": _count("plan.last_stage_layers"),
    "account-for-embedding-in-pipeline-split": _switch(
        "plan.account_for_embedding_in_pipeline_split"
    ),
    "account-for-loss-in-pipeline-split": _switch("plan.account_for_loss_in_pipeline_split"),
    "pipeline-model-parallel-layout": Flag("text", None, "plan.layout, plan.chunks"),
    "no-overlap-p2p-communication": _switch("plan.p2p_overlap"),
    # --- data parallelism ---
    "use-distributed-optimizer": _switch("plan.zero"),
    "num-distributed-optimizer-instances": _count("plan.dp_shard", 1),
    "use-torch-fsdp2": _switch("plan.zero"),
    "torch-fsdp2-no-reshard-after-forward": _switch("plan.reshard_after_forward"),
    "use-megatron-fsdp": _switch("plan.zero"),
    "use-custom-fsdp": _switch("plan.zero"),
    "data-parallel-sharding-strategy": Flag("text", "no_shard", "plan.zero"),
    "overlap-grad-reduce": _switch("plan.grad_overlap"),
    "ddp-bucket-size": _count("plan.bucket_size"),
    "ddp-impl": Flag("text", "local", "plan.grad_overlap"),
    # --- memory ---
    "recompute-activations": _switch("plan.recompute"),
    "recompute-granularity": Flag("text", None, "plan.recompute"),
    "recompute-method": Flag("text", None, "plan.recompute_layers"),
    "recompute-num-layers": _count("plan.recompute_layers"),
    "recompute-modules": Flag("texts", ("core_attn",), "plan.recompute"),
    "checkpoint-activations": _switch("plan.recompute"),
    "activations-checkpoint-method": Flag("text", None, "plan.recompute"),
    "activations-checkpoint-num-layers": _count("plan.recompute_layers"),
    "optimizer-cpu-offload": _switch("plan.offload_optimizer"),
    "optimizer-offload-fraction": Flag("number", 1.0, "plan.offload_optimizer"),
    "cpu-offloading-num-layers": _count("plan.offload_activations", 0),
    # --- batch and arithmetic ---
    "micro-batch-size": _count("plan.microbatch_size"),
    "global-batch-size": _count("run.global_batch_size"),
    "seq-length": _count("run.sequence_length"),
    "encoder-seq-length": _count("run.sequence_length"),
    "bf16": _switch("run.precision"),
    "fp16": _switch("run.precision"),
    "fp8-format": Flag("text", None, "run.precision"),
    "fp8-recipe": Flag("text", "delayed", "run.fp8_scaling"),
    "fp8-param-gather": _switch("run.fp8_weights"),
    "grad-reduce-in-bf16": _switch("run.gradient_dtype"),
    "accumulate-allreduce-grads-in-fp32": _switch("run.gradient_dtype"),
    "no-gradient-accumulation-fusion": _switch("run.fused_accumulation"),
    "transformer-impl": Flag("text", "transformer_engine", "run.linear_layers, run.attention"),
    "attention-backend": Flag("text", "auto", "run.attention"),
    "use-flash-attn": _switch("run.attention"),
    "no-check-for-nan-in-loss-and-grad": _switch("run.gradient_passes"),
    "ddp-average-in-collective": _switch("run.gradient_passes"),
    "calculate-per-token-loss": _switch("run.gradient_passes"),
    "use-precision-aware-optimizer": _switch("run.gradient_passes"),
    "cross-entropy-loss-fusion": _switch("run.fused_loss"),
    "cross-entropy-fusion-impl": Flag("text", "native", "run.fused_loss"),
    "optimizer": Flag("text", "adam", "run.optimizer"),
    "sgd-momentum": Flag("number", 0.9, "run.optimizer"),
    "exp-avg-dtype": Flag("text", "fp32", "run.optimizer"),
    "exp-avg-sq-dtype": Flag("text", "fp32", "run.optimizer"),
    "main-grads-dtype": Flag("text", "fp32", "run.gradient_dtype"),
    "clip-grad": Flag("number", 1.0, "run.clip_grad"),
    "cuda-graph-impl": Flag("text", "none", "cluster.node.host_launch"),
    "enable-cuda-graph": _switch("cluster.node.host_launch"),
    "external-cuda-graph": _switch("cluster.node.host_launch"),
}

ALIASES: Mapping[str, str] = {
    "persistent-save-interval": "save-interval",
    "nproc": "nproc-per-node",
    "nodes": "nnodes",
    "ntasks-per-node": "nproc-per-node",
    "gpus-per-node": "nproc-per-node",
    "num-moe-experts": "num-experts",
    "fp8": "fp8-format",
    "moe-token-dispatcher": "moe-token-dispatcher-type",
    "microbatch-group-size-per-vp-stage": "microbatch-group-size-per-virtual-pipeline-stage",
    "num-layers-in-first-pipeline-stage": "decoder-first-pipeline-num-layers",
    "num-layers-in-last-pipeline-stage": "decoder-last-pipeline-num-layers",
}
"""Other names of flags, as files of settings and srun spell them."""

OPPOSITES: Mapping[str, str] = {
    "add-bias-linear": "disable-bias-linear",
    "overlap-p2p-comm": "no-overlap-p2p-communication",
    "gradient-accumulation-fusion": "no-gradient-accumulation-fusion",
    "masked-softmax-fusion": "no-masked-softmax-fusion",
    "bias-gelu-fusion": "no-bias-gelu-fusion",
    "bias-swiglu-fusion": "no-bias-swiglu-fusion",
    "bias-dropout-fusion": "no-bias-dropout-fusion",
    "apply-rope-fusion": "no-rope-fusion",
    "torch-fsdp2-reshard-after-forward": "torch-fsdp2-no-reshard-after-forward",
    "scatter-gather-tensors-in-pipeline": "no-scatter-gather-tensors-in-pipeline",
    "check-for-nan-in-loss-and-grad": "no-check-for-nan-in-loss-and-grad",
    "align-grad-reduce": "no-align-grad-reduce",
    "align-param-gather": "no-align-param-gather",
}
"""Settings of a file that a flag turns off: true is the flag's absence."""
