"""A scenario as Megatron-LM's flags, and what of it they cannot say."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from simulator.describe.model import Model
from simulator.describe.plan import Plan
from simulator.describe.scenario import Scenario
from simulator.errors import DescriptionError
from simulator.exchange.megatron.model import LATENT, NORMS, POSITIONS
from simulator.exchange.megatron.plan import CP_STYLES, LIGHT, SHARDING
from simulator.exchange.megatron.run import LINEAR, SCALING
from simulator.exchange.megatron.stages import OF_LAYERS, layout_text
from simulator.schedules import schedule_name

_ACTIVATIONS = {
    (True, "silu"): "swiglu", (True, "gelu"): "quick-geglu", (False, "relu2"): "squared-relu",
    (False, "gelu"): None,
}  # fmt: skip
_BIASES = {(True, True, True): (), (False, False, False): ("disable-bias-linear",),
           (True, False, False): ("disable-bias-linear", "add-qkv-bias")}  # fmt: skip
"""Flags of biases of queries, keys and values; of attention's output; of the MLP."""
_OPTIMIZERS = {
    "adamw": "adam",
    "adamw_bf16": "adam",
    "momentum": "sgd",
    "sgd": "sgd",
    "muon": "muon",
}
_SCHEDULES = ("1F1B", "Interleaved1F1B")
_OF_A_DECODER = ("causal", "token_types", "embedding_norm", "head_transform", "head_bias",
                 "pooler", "patches", "inner_dropout")  # fmt: skip
"""Fields of a model whose defaults are a decoder's."""

_SAID = {
    "plan": {
        "dp", "tp", "pp", "cp", "cp_style", "ep", "etp", "schedule", "chunks", "microbatch_size",
        "layers_per_stage", "layout", "stage_cut", "microbatch_group", *OF_LAYERS.values(),
        "order", "bucket_size", "grad_overlap", "zero", "dp_shard", "sharding_library",
        "reshard_after_forward", "offload_optimizer", "offload_activations", "recompute",
        "offload_layers", "recompute_layers", "recompute_modules", "sequence_parallel",
        "p2p_overlap", "tp_overlap", "expert_capacity", "expert_padding", "expert_dispatch",
    },
    "run": {
        "global_batch_size", "sequence_length", "precision", "fp8_scaling", "fp8_weights",
        "optimizer", "clip_grad", "gradient_dtype", "fused_accumulation", "linear_layers",
        "attention", "expert_fusion", "gradient_passes",
        "fused_loss",
    },
}  # fmt: skip
"""Fields that have flags."""

_OURS = {
    "plan": {"placement"},
    "run": {
        "num_steps", "detail", "network", "overlap_slowdown", "allocator_reserve", "warm_up",
    },
}  # fmt: skip
"""Fields of the machine and of the simulation, about which a program is not told."""


def to_megatron(scenario: Scenario) -> list[str]:
    """Return the flags that let Megatron-LM run a scenario, each with its value.

    Raises:
        DescriptionError: when it has no such model, schedule or training.
    """
    problems = list(_refusals(scenario))
    if problems:
        raise DescriptionError(problems)
    model, plan, run = scenario.model, scenario.plan, scenario.run
    assert isinstance(model, Model)
    settings: dict[str, Any] = {
        **_model(model), **_pipeline(scenario), **_data(scenario), **_memory(scenario),
        "micro-batch-size": plan.microbatch_size, "global-batch-size": run.global_batch_size,
        "seq-length": run.sequence_length, **_run(scenario),
    }  # fmt: skip
    return [
        f"--{name}" if value is True else f"--{name} {value}"
        for name, value in settings.items()
        if value is not None and value is not False
    ]


def launcher_flags(scenario: Scenario) -> list[str]:
    """Return torchrun's flags."""
    cluster = scenario.cluster
    return [f"--nproc-per-node {cluster.ranks_per_node}", f"--nnodes {cluster.num_nodes}"]


def unsaid(scenario: Scenario) -> list[str]:
    """Return sentences: what of a scenario has no flag, so that Megatron-LM would do otherwise."""
    plan, run, model = scenario.plan, scenario.run, scenario.model
    out = [
        f"{section}.{field.name} = {getattr(part, field.name)!r}"
        for section, part in (("plan", plan), ("run", run))
        for field in dataclasses.fields(part)
        if field.name not in _SAID[section] | _OURS[section]
        and getattr(part, field.name) != field.default
    ]
    choices = (
        ("plan.p2p_overlap = true", plan.pp > 1 and plan.chunks == 1 and plan.p2p_overlap,
         "messages of 1F1B block in Megatron-LM"),
        (f"plan.tp_overlap = '{plan.tp_overlap}'", plan.tp > 1 and plan.tp_overlap == "none",
         "its backward hides collectives behind products"),
        (f"plan.sharding_library = '{plan.sharding_library}'",
         plan.zero == 3 and not _is_torch_fsdp(plan) and plan.sharding_library != "megatron_fsdp",
         "its own FSDP shards weights"),
        (f"plan.order = {list(plan.order)}", plan.order[-1] != "tp", "tp is innermost"),
        (f"run.attention = '{run.attention}'", run.attention in ("flash1", "flash2"),
         "it takes the library's best kernels"),
        ("run.gradient_passes", plan.zero < 2 and "clear" not in run.gradient_passes,
         "it clears, checks and scales its gradient buffers once a step"),
        ("run.precision = 'tf32'", run.precision == "tf32", "fp32 is"),
        ("run.linear_layers = 'torch'", run.linear_layers == "torch" and run.fused_accumulation,
         "layers are Transformer Engine's or its own"),
        ("run.fused_accumulation = false leaves run.linear_layers", not run.fused_accumulation
         and run.linear_layers != "torch", "they hold nothing more"),
    )  # fmt: skip
    out += [f"{what}: {why}" for what, holds, why in choices if holds]
    if isinstance(model, Model) and model.vocab_size % plan.tp:
        out.append(
            f"model.vocab_size = {model.vocab_size}: plan.tp {plan.tp} must divide it; "
            f"{-(-model.vocab_size // plan.tp) * plan.tp} is next"
        )
    if isinstance(model, Model) and model.embedding_dropout != model.hidden_dropout:
        out.append(f"model.embedding_dropout = {model.embedding_dropout}: it is --hidden-dropout")
    return out


def _refusals(s: Scenario) -> Iterator[str]:
    """Say what Megatron-LM does not have."""
    model, plan, run = s.model, s.plan, s.run
    if not isinstance(model, Model):
        yield f"{model.name}: Megatron-LM's flags describe transformers"
        return
    if model.num_decoder_layers:
        yield f"{model.name} has an encoder; flags are written for pretrain_gpt.py, a decoder's"
        return
    defaults = {field.name: field.default for field in dataclasses.fields(Model)}
    for name in _OF_A_DECODER:
        if getattr(model, name) != defaults[name]:
            yield f"model.{name} {getattr(model, name)!r}: its GPT is a decoder without it"
    tables: tuple[tuple[str, object, object], ...] = (
        ("model.norm", model.norm, list(NORMS.values())),
        ("model.position", model.position, list(POSITIONS.values())),
        ("plan.schedule", _schedule(plan.schedule), _SCHEDULES),
        ("plan.recompute", plan.recompute, ("none", "light", "selective", "full")),
        ("plan.gradient_exchange", plan.gradient_exchange, ("all_reduce",)),
        ("run.optimizer", run.optimizer, list(_OPTIMIZERS)),
    )
    for key, value, known in tables:
        if value not in known:  # type: ignore[operator]
            yield f"{key} {value!r}: Megatron-LM has {', '.join(map(str, known))}"  # type: ignore[call-overload]
    if (model.gated_mlp, model.activation) not in _ACTIVATIONS:
        gate = "gated " if model.gated_mlp else ""
        yield f"model.activation {gate}{model.activation!r}: Megatron-LM has no flag for it"
    if _biases(model) not in _BIASES:
        yield "model.attention_bias, output_bias, mlp_bias: Megatron-LM has all, none, or of qkv"
    if not run.trains_all or run.fake_quantization:
        yield "run: Megatron-LM's flags train every parameter, without adapters or rounding"


def _schedule(name: str) -> str:
    """Return the usual spelling of a schedule's name; a file's name stays."""
    try:
        return schedule_name(name)
    except DescriptionError:
        return name


def _biases(model: Model) -> tuple[bool, bool, bool]:
    output = model.attention_bias if model.output_bias is None else model.output_bias
    return model.attention_bias, output, model.mlp_bias


def _model(model: Model) -> dict[str, Any]:
    activation = _ACTIVATIONS[model.gated_mlp, model.activation]
    grouped = model.num_key_value_heads != model.num_attention_heads
    window, latent = model.attention_window, model.is_latent
    return {
        "num-layers": model.num_hidden_layers,
        "hidden-size": model.hidden_size,
        "ffn-hidden-size": model.intermediate_size,
        "num-attention-heads": model.num_attention_heads,
        "kv-channels": None if latent else model.head_dim,
        "group-query-attention": grouped,
        "num-query-groups": model.num_key_value_heads if grouped else None,
        "padded-vocab-size": model.vocab_size,
        "max-position-embeddings": model.max_position_embeddings,
        "normalization": _inverse(NORMS)[model.norm],
        "position-embedding-type": _inverse(POSITIONS)[model.position],
        **({activation: True} if activation else {}),
        **dict.fromkeys(_BIASES[_biases(model)], True),
        "untie-embeddings-and-output-weights": not model.tie_word_embeddings,
        "qk-layernorm": model.qk_norm or latent,
        "window-size": None if window is None else f"{window},0",
        "hidden-dropout": str(model.hidden_dropout),
        "attention-dropout": str(model.attention_dropout),
        **_experts(model),
    }


def _experts(model: Model) -> dict[str, Any]:
    """Return the flags of experts, latent attention and multi-token prediction."""
    out: dict[str, Any] = {}
    if model.num_experts:
        shared = model.num_shared_experts
        each = model.moe_intermediate_size or model.intermediate_size
        first, every = model.first_k_dense_replace, model.moe_layer_freq
        dense = f"[0]*{first}+[1]*{model.num_hidden_layers - first}" if first else every
        out |= {
            "num-experts": model.num_experts,
            "moe-router-topk": model.num_experts_per_tok,
            "moe-ffn-hidden-size": each,
            "moe-shared-expert-intermediate-size": shared * each or None,
            "moe-layer-freq": None if dense == 1 else dense,
            "moe-router-num-groups": model.n_group if model.n_group > 1 else None,
            "moe-router-group-topk": model.topk_group if model.n_group > 1 else None,
            "moe-grouped-gemm": True,
        }
    if model.is_latent:
        out["multi-latent-attention"] = True
        out |= {flag: getattr(model, key) for flag, key in LATENT.items()}
    out["mtp-num-layers"] = model.num_nextn_predict_layers or None
    return out


def _pipeline(s: Scenario) -> dict[str, Any]:
    plan: Any = s.plan
    looped, listed = plan.chunks > 1, _listed(plan)
    cp, tp, dispatch = plan.cp, plan.tp, plan.expert_dispatch
    kind = {"all_to_all": "alltoall", "all_gather": "allgather"}.get(dispatch, "flex")
    return {
        "tensor-model-parallel-size": tp,
        "pipeline-model-parallel-size": plan.pp,
        "context-parallel-size": cp if cp > 1 else None,
        "cp-comm-type": _inverse(CP_STYLES)[plan.cp_style] if cp > 1 else None,
        "expert-model-parallel-size": plan.ep if _sparse(s) else None,
        "expert-tensor-parallel-size": plan.etp if _sparse(s) else None,
        "moe-token-dispatcher-type": kind if _sparse(s) else None,
        "moe-enable-deepep": kind == "flex",
        "moe-expert-capacity-factor": plan.expert_capacity,
        "moe-pad-expert-input-to-capacity": plan.expert_padding,
        "moe-permute-fusion": s.run.expert_fusion != "none",
        "moe-router-fusion": s.run.expert_fusion == "all",
        "num-virtual-stages-per-pipeline-rank": plan.chunks if looped and not listed else None,
        "pipeline-model-parallel-layout": _quoted_layout(s) if listed else None,
        **({} if listed else {flag: getattr(plan, key) for flag, key in OF_LAYERS.items()}),
        "microbatch-group-size-per-virtual-pipeline-stage": plan.microbatch_group,
        "no-overlap-p2p-communication": looped and not plan.p2p_overlap,
        "sequence-parallel": plan.sequence_parallel,
        "tp-comm-overlap": plan.tp_overlap == "all",
        "use-tp-pp-dp-mapping": plan.order.index("dp") < plan.order.index("pp"),
    }


def _sparse(s: Scenario) -> bool:
    return isinstance(s.model, Model) and s.model.num_experts is not None


def _quoted_layout(s: Scenario) -> str:
    mtp = getattr(s.model, "num_nextn_predict_layers", 0) or 0
    return f"'{s.plan.layout or layout_text(s.layers_per_stage, mtp)}'"


def _listed(plan: Any) -> bool:
    """Return whether stages are said one by one, or balanced, for which there is no flag."""
    named = plan.layers_per_stage is not None or plan.layout is not None
    return plan.pp > 1 and (named or plan.stage_cut != "uniform")


def _is_torch_fsdp(plan: Plan) -> bool:
    """Return whether torch's FSDP2 shards weights; Megatron-LM has it without pipelines only."""
    return plan.zero == 3 and plan.sharding_library == "fsdp2" and plan.pp == 1


def _data(s: Scenario) -> dict[str, Any]:
    """Return the flags of the data-parallel ranks: what they divide, and when they reduce it."""
    plan = s.plan
    torch_fsdp = _is_torch_fsdp(plan)
    fsdp = plan.zero > 1 and not torch_fsdp
    buckets = plan.replicas > 1 and plan.grad_overlap and plan.zero < 3
    gradient = s.precision.gradient
    instances = plan.dp // plan.shards if plan.zero and plan.dp_shard else 1
    return {
        "use-distributed-optimizer": plan.zero == 1,
        "use-megatron-fsdp": fsdp,
        "data-parallel-sharding-strategy": _inverse(SHARDING)[plan.zero] if fsdp else None,
        "ckpt-format": "fsdp_dtensor" if fsdp else None,
        "use-torch-fsdp2": torch_fsdp,
        "torch-fsdp2-no-reshard-after-forward": torch_fsdp and not plan.reshard_after_forward,
        "num-distributed-optimizer-instances": instances if instances > 1 else None,
        "overlap-grad-reduce": buckets,
        "ddp-bucket-size": max(1, round(plan.bucket_size / gradient)) if buckets else None,
    }


def _memory(s: Scenario) -> dict[str, Any]:
    plan, full, light = s.plan, s.plan.recompute == "full", s.plan.recompute == "light"
    latent = isinstance(s.model, Model) and s.model.is_latent
    count, short = plan.recompute_layers, s.run.optimizer == "adamw_bf16"
    copies = not s.run.gradient_passes or "copy" in s.run.gradient_passes
    return {
        "recompute-granularity": {"none": None, "light": "selective"}.get(
            plan.recompute, plan.recompute
        ),
        "recompute-modules": " ".join(plan.recompute_modules or LIGHT[: 3 if latent else 2])
        if light
        else None,
        "recompute-method": ("block" if count else "uniform") if full else None,
        "recompute-num-layers": (count or 1) if full else None,
        "optimizer-cpu-offload": plan.offload_optimizer,
        "use-precision-aware-optimizer": plan.offload_optimizer or short or not copies,
        "exp-avg-dtype": "bf16" if short else None,
        "exp-avg-sq-dtype": "bf16" if short else None,
        "cpu-offloading-num-layers": (
            plan.offload_layers or max(s.layers_per_stage) if plan.offload_activations else None
        ),
    }


def _run(s: Scenario) -> dict[str, Any]:
    run = s.run
    fp8, fp32 = run.precision == "fp8", run.gradient_dtype == "fp32"
    bf16, passes = run.precision in ("bf16", "fp8"), {*run.gradient_passes}
    return {
        "bf16": bf16,
        "fp16": run.precision == "fp16",
        "fp8-format": "hybrid" if fp8 else None,
        "fp8-recipe": _inverse(SCALING)[run.fp8_scaling] if fp8 else None,
        "fp8-param-gather": run.fp8_weights,
        "accumulate-allreduce-grads-in-fp32": run.precision == "fp16" and fp32,
        "grad-reduce-in-bf16": bf16 and not fp32,
        "no-gradient-accumulation-fusion": not run.fused_accumulation,
        "transformer-impl": _inverse(LINEAR).get(run.linear_layers),
        "attention-backend": "unfused" if run.attention == "unfused" else "auto",
        "cross-entropy-loss-fusion": run.fused_loss,
        "cross-entropy-fusion-impl": "te" if run.fused_loss else None,
        "no-check-for-nan-in-loss-and-grad": bool(passes) and "check" not in passes,
        "ddp-average-in-collective": bool(passes) and not {"scale", "divide"} & passes,
        "calculate-per-token-loss": "divide" in passes,
        "optimizer": _OPTIMIZERS[run.optimizer],
        "sgd-momentum": "0.0" if run.optimizer == "sgd" else None,
        "clip-grad": "1.0" if run.clip_grad else "0.0",
    }


def _inverse(table: Mapping[str, Any]) -> dict[Any, str]:
    """Return a table read backwards; the first of several wins."""
    return {value: key for key, value in reversed(list(table.items()))}
