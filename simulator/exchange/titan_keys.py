"""torchtitan's settings: the keys that are mapped, with torchtitan's defaults, and all others.

Names and defaults are those of torchtitan/config/job_config.py (pytorch/torchtitan, 2025); sections
of 2024 (`training` and `experimental` for degrees) are read too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal["text", "count", "number", "flag", "texts"]


class Key(NamedTuple):
    """A setting that is mapped."""

    kind: Kind
    default: Any
    becomes: str
    """What it decides, as keys of a scenario."""


KEYS: Mapping[str, Key] = {
    "model.name": Key("text", "llama3", "model, run.layer_code"),
    "model.flavor": Key("text", "debugmodel", "model"),
    "model.converters": Key("texts", (), "run.precision"),
    "optimizer.name": Key("text", "AdamW", "run.optimizer"),
    "optimizer.implementation": Key("text", "fused", "run.fused_optimizer"),
    "training.local_batch_size": Key("count", 8, "plan.microbatch_size"),
    "training.global_batch_size": Key("count", -1, "run.global_batch_size"),
    "training.seq_len": Key("count", 2048, "run.sequence_length"),
    "training.max_norm": Key("number", 1.0, "run.clip_grad"),
    "training.mixed_precision_param": Key("text", "bfloat16", "run.precision"),
    "training.enable_cpu_offload": Key("flag", False, "plan.offload_optimizer"),
    "compile.enable": Key("flag", False, "run.compiled"),
    "compile.components": Key("texts", ("model", "loss"), "run.compiled, run.compiled_loss"),
    "parallelism.data_parallel_replicate_degree": Key("count", 1, "plan.dp, plan.dp_shard"),
    "parallelism.data_parallel_shard_degree": Key("count", -1, "plan.zero, plan.dp_shard"),
    "parallelism.fsdp_reshard_after_forward": Key("text", "default", "plan.reshard_after_forward"),
    "parallelism.tensor_parallel_degree": Key("count", 1, "plan.tp, plan.sequence_parallel"),
    "parallelism.enable_async_tensor_parallel": Key("flag", False, "plan.tp_overlap"),
    "parallelism.pipeline_parallel_degree": Key("count", 1, "plan.pp, plan.no_sync"),
    "parallelism.pipeline_parallel_schedule": Key("text", "1F1B", "plan.schedule"),
    "parallelism.pipeline_parallel_schedule_csv": Key("text", "", "plan.schedule"),
    "parallelism.pipeline_parallel_microbatch_size": Key("count", 1, "plan.microbatch_size"),
    "parallelism.pipeline_parallel_layers_per_stage": Key("count", None, "plan.chunks"),
    "parallelism.pipeline_parallel_first_stage_less_layers": Key(
        "count", 1, "plan.account_for_embedding_in_pipeline_split"
    ),
    "parallelism.pipeline_parallel_last_stage_less_layers": Key(
        "count", 1, "plan.account_for_loss_in_pipeline_split"
    ),
    "parallelism.pipeline_parallel_split_points": Key("texts", (), "plan.layers_per_stage"),
    "parallelism.context_parallel_degree": Key("count", 1, "plan.cp"),
    "parallelism.context_parallel_rotate_method": Key("text", "allgather", "plan.cp_style"),
    "parallelism.expert_parallel_degree": Key("count", 1, "plan.ep"),
    "parallelism.expert_tensor_parallel_degree": Key("count", 1, "plan.etp"),
    "activation_checkpoint.mode": Key("text", "selective", "plan.recompute"),
    "activation_checkpoint.selective_ac_option": Key("text", "2", "plan.recompute_layers"),
}

ALIASES: Mapping[str, str] = {
    "training.batch_size": "training.local_batch_size",
    "training.compile": "compile.enable",
    "training.enable_fp8_linear": "model.converters",
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
    "training.data_parallel_replicate_degree": "parallelism.data_parallel_replicate_degree",
    "training.data_parallel_shard_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "experimental.context_parallel_degree": "parallelism.context_parallel_degree",
    "experimental.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "experimental.pipeline_parallel_schedule": "parallelism.pipeline_parallel_schedule",
    "experimental.pipeline_parallel_split_points": "parallelism.pipeline_parallel_split_points",
    "experimental.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
}
"""Keys of older versions."""

NOT_MODELLED: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "optimizer.early_step_in_backward": ("the update follows the last gradient", (False,)),
    "parallelism.disable_loss_parallel": ("the head and its loss are divided over tp", (False,)),
    "parallelism.enable_compiled_autograd": ("backward runs as autograd has it", (False,)),
    "float8.enable_fsdp_float8_all_gather": ("weights are gathered in bf16", (False,)),
    "float8.force_recompute_fp8_weight_in_bwd": ("casts are made once a gather", (False,)),
    "float8.recipe_name": ("a tensor has one scale", (None, "tensorwise")),
    "training.mixed_precision_reduce": ("gradients are reduced in fp32", ("float32",)),
    "training.dtype": ("states are in fp32", ("float32",)),
    "training.deterministic": ("kernels are the fastest", (False,)),
}
"""What moves times or bytes in torchtitan, what is taken instead, and what asks for nothing."""

REFUSED: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "fault_tolerance.enable": ("replicas that come and go are not modelled", (False,)),
    "parallelism.module_fqns_per_model_part": ("stages of listed modules are not read", (None,)),
}

WITHOUT_EFFECT: Mapping[str, tuple[str, ...]] = {
    "logging and files": ("job", "profiling", "metrics", "checkpoint", "comm", "debug"),
    "training's course": ("lr_scheduler", "validation", "experimental", "memory_estimation",
                          "fault_tolerance"),
}  # fmt: skip
"""Sections that move nothing that is simulated, by group."""

_OF_NO_WEIGHT = """
    model.tokenizer_path model.hf_assets_path model.print_after_conversion model.norm_type
    optimizer.lr optimizer.beta1 optimizer.beta2 optimizer.eps optimizer.weight_decay
    optimizer.fused training.dataset training.dataset_path training.steps training.gc_freq
    training.gc_debug training.seed training.warmup_steps compile.backend
    activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns
    activation_checkpoint.early_stop activation_checkpoint.preserve_rng_state
    float8.precompute_float8_dynamic_scale_for_fsdp float8.filter_fqns float8.emulate
    float8.moe_fqns_prototype float8.enable_float8_linear
"""

KEYS_WITHOUT_EFFECT = frozenset(_OF_NO_WEIGHT.split())
"""Keys of other sections that move nothing that is simulated."""

MODELS: Mapping[tuple[str, str], str] = {
    ("llama3", "8B"): "llama-3-8b",
    ("llama3", "70B"): "llama-3-70b",
    ("llama3", "405B"): "llama-3-405b",
    ("llama2", "7B"): "llama-2-7b",
    ("llama2", "13B"): "llama-2-13b",
    ("qwen3", "8B"): "qwen3-8b",
    ("deepseek_v3", "671B"): "deepseek-v3",
}
"""Models of the catalogue by torchtitan's name and flavor."""
