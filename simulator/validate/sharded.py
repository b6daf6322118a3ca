"""Runs of FSDP, torchtitan, NeMo and Llama 3: builders from row to case."""

from __future__ import annotations

from simulator.describe.scenario import Scenario
from simulator.errors import DescriptionError
from simulator.lower.layers import model_flops_per_token
from simulator.validate.published import Case, Row
from simulator.validate.scenarios import (
    RANK_ORDER,
    VOCAB,
    Table,
    blocking,
    case,
    described,
    gpt,
    interleaved,
    nodes_of,
    padded,
    reserved_gib,
    step_seconds,
)


def context(cp: int, style: str) -> Table:
    """Return what a plan says of ranks that divide each sequence."""
    return {"cp": cp, "cp_style": style} if cp > 1 else {}


# --- MosaicML llm-foundry ---------------------------------------------------------------------

MPT = {
    "125m": (768, 12, 12), "350m": (1024, 16, 24), "760m": (1536, 12, 24), "1b": (2048, 16, 24),
    "3b": (2560, 20, 32), "7b": (4096, 32, 32), "13b": (5120, 40, 40), "30b": (7168, 56, 48),
    "70b": (8192, 64, 80),
}  # fmt: skip
"""Hidden size, heads and layers of llm-foundry's mpt-*.yaml. With 50,368 tokens, learned positions,
biases and a tied head they give the parameters that its table prints, exactly, in every row."""

MOSAIC_NODES = {
    "h100_80gb": "dgx-h100",
    "a100_80gb": "dgx-a100",
    "a100_40gb": {"from": "dgx-a100", "device": "a100-sxm4-40gb"},
}
"""1600 Gb/s between nodes of 8 A100 is 8 adapters of 200 Gb/s, as a DGX A100 has."""


def mosaic(row: Row) -> Case:
    """MPT under FSDP FULL_SHARD."""
    hidden, heads, layers = MPT[row["model"]]
    sequence, ranks = int(row["seq_len"]), int(row["n_gpus"])
    shape = {"hidden": str(hidden), "heads": str(heads), "layers": str(layers)}
    no_dropout = {f"{place}_dropout": 0.0 for place in ("embedding", "hidden", "attention")}
    tokens = int(row["global_batch_seqs"]) * sequence
    plan = {
        "dp": ranks, "zero": 3, "microbatch_size": int(row["micro_batch"]),
        "recompute": "full" if row["act_ckpt"] == "True" else "none",
    }  # fmt: skip
    run = {
        "global_batch_size": int(row["global_batch_seqs"]), "sequence_length": sequence,
        "precision": row["precision"].removeprefix("amp_"), "gradient_dtype": "fp32",
        "attention": "flash1", "clip_grad": True, "fused_optimizer": False,
    }  # fmt: skip
    return case(
        tokens / float(row["throughput_tok_per_s"]),
        gpt(shape, 50368, sequence) | no_dropout,
        nodes_of(ranks, MOSAIC_NODES[row["gpu"]]), plan, run,
    )  # fmt: skip


# --- torchtitan -------------------------------------------------------------------------------

POWER_LIMIT = (500 / 700) ** (1 / 3)
"""Clock that a limit of 500 W leaves of that at 700 W: 0.894. Dynamic power goes with f V^2, and V
with f: the clock goes with the cube root."""

H100_CLOCK = 0.95
"""`sustained_clock` of the H100 in the catalogue, at 700 W."""

GRAND_TETON = {
    "from": "dgx-h100",
    "device": {
        "from": "h100-sxm5-80gb", "memory": "96 GB", "memory_bandwidth": "2400 GB/s",
        "sustained_clock": H100_CLOCK * POWER_LIMIT,
    },
}  # fmt: skip
"""H100 of 500 W with 96 GB of HBM2e at 2.4 TB/s, 400 Gb/s of RDMA each."""

TITAN_MODELS = {"8B": "llama-3-8b", "70B": "llama-3-70b", "405B": "llama-3-405b"}
TITAN_RECOMPUTE = {"full": "full", "selective": "selective-op", "per-op SAC": "selective-op"}
TITAN_CHUNKS = {"1F1B": 1, "Interleaved1F1B": 2}
"""Stages of a pipeline rank by schedule; a stage each is what torchtitan splits off by default."""


def torchtitan_step(row: Row) -> Case:
    """Tokens/s a GPU, as seconds of a step."""
    s = _torchtitan(row)
    measured = s.tokens_per_step / (float(row["tokens_per_s_per_gpu"]) * s.cluster.world_size)
    return Case(measured, s, lambda: step_seconds(s))


def torchtitan_memory(row: Row) -> Case:
    """Most memory reserved on the fullest GPU (max_reserved_gib of its metrics.py)."""
    s = _torchtitan(row)
    return Case(float(row["memory_GiB"]), s, lambda: reserved_gib(s))


def _torchtitan(row: Row) -> Scenario:
    if row["float8"] == "fp8 rowwise":
        raise DescriptionError("fp8 with a scale for each row is not built")
    ranks, tp, pp = int(row["n_gpus"]), int(row["tp"]), int(row["pp"])
    chunks = TITAN_CHUNKS[row["pp_schedule"] or "1F1B"]
    model = TITAN_MODELS[row["model"].rpartition("-")[2]]
    plan: Table = {
        "dp": int(row["fsdp"]), "tp": tp, "pp": pp, "zero": 3,
        "microbatch_size": int(row["local_batch"]) // (pp * chunks), "sequence_parallel": tp > 1,
        "tp_overlap": "all" if row["async_tp"] == "1" else "none",
        "recompute": TITAN_RECOMPUTE[row["act_ckpt"]], "reshard_after_forward": pp == 1,
        **interleaved(chunks), **context(int(row["cp"] or 1), "all_gather"),
    }  # fmt: skip
    if chunks > 1:
        plan["layers_per_stage"] = _spread(126, pp * chunks)  # of the 405B
    run: Table = {
        "global_batch_size": int(row["global_batch"]),
        "sequence_length": int(row["seq_len(8192 default where not printed)"]),
        "precision": "bf16", "gradient_dtype": "fp32", "attention": "flash2",
        "compiled": row["compile"] == "1", "clip_grad": True, "loss_in_place": False,
    }  # fmt: skip
    if row["float8"] not in ("", "0", "bf16"):
        run |= {"precision": "fp8", "fp8_scaling": "current"}
    return described(model, nodes_of(ranks, GRAND_TETON), plan, run)


def _spread(layers: int, stages: int) -> list[int]:
    """Return the layers of each stage, the first ones a layer more where they are uneven."""
    count, rest = divmod(layers, stages)
    return [count + (stage < rest) for stage in range(stages)]


# --- NeMo's performance summaries -------------------------------------------------------------

NEMO_MODELS = {
    "LLAMA3_8B": "llama-3-8b", "LLAMA3-8B": "llama-3-8b", "LLAMA3_70B": "llama-3-70b",
    "Llama3 70B": "llama-3-70b", "LLAMA3.1_405B": "llama-3-405b", "GPT3-175B": "gpt3-175b",
    "GPT3-5B": "gpt3-5b", "GPT3-20B": "gpt3-20b", "LLAMA2-7B": "llama-2-7b",
    "LLAMA2-13B": "llama-2-13b", "Nemotron-340B": "nemotron-4-340b",
}  # fmt: skip
"""Dense models of the catalogue by the summaries' names."""

NEMO_EXPERTS: dict[str, Table] = {
    "Qwen3_30B_a3B": {"from": "qwen3-30b-a3b"},
    "Qwen3_235B_a22B": {"from": "qwen3-235b-a22b"},
    "DeepSeekV3": {"from": "deepseek-v3", "num_nextn_predict_layers": 0},
    "DeepSeekV3 (w/o MTP)": {"from": "deepseek-v3", "num_nextn_predict_layers": 0},
    "DeepSeekV3 (w/ MTP)": {"from": "deepseek-v3"},
    "DeepSeek V3 671B": {"from": "deepseek-v3"},
}
"""Likewise those with experts; where nothing is said DeepSeek-V3 is taken without its further
layer, as the row of the same numbers that says so."""

NEMO_NODES = {
    "DGX-H100": ("dgx-h100", 8), "DGX-B200": ("dgx-b200", 8), "DGX-GB200": ("gb200-nvl72", 64),
    "DGX-GB300": ("gb300-nvl72", 64), "DGX-B300": ("dgx-b300", 8),
}  # fmt: skip
"""Node and the devices of each that a run uses: a power of two of an NVL72 rack."""


def nemo(row: Row) -> Case:
    """Pre-training; seconds follow from tokens/s a GPU."""
    _refuse_nemo(row)
    ranks, sequence, batch = int(row["n_gpus"]), int(row["seq_len"]), int(row["gbs"])
    chunks = int(row["vp"]) if row["vp"].isdigit() else 1
    tp, pp, cp = int(row["tp"]), int(row["pp"]), int(row["cp"] or 1)
    style = "all_gather" if row["product"] == "NeMo Automodel" else "ring"
    has_experts = row["model"] in NEMO_EXPERTS
    model: Table = dict(
        NEMO_EXPERTS[row["model"]] if has_experts else {"from": NEMO_MODELS[row["model"]]}
    )
    name = str(model["from"])
    if name.startswith("gpt3"):
        model["vocab_size"] = padded(VOCAB, tp)
    plan: Table = {
        "dp": ranks // (tp * pp * cp), "tp": tp, "pp": pp, "microbatch_size": int(row["mbs"]),
        "sequence_parallel": tp > 1, "tp_overlap": "all" if tp > 1 else "none",
        "zero": 1 if row["fsdp"] in ("", "0") else 3, **interleaved(chunks), **RANK_ORDER,
        **context(cp, style),
        **(blocking(pp, tp, sequence=tp > 1) if chunks == 1 else {}),
    }  # fmt: skip
    if has_experts:
        plan |= {"ep": int(row["ep"]), **_experts_plan(row)}
        plan |= {"layers_per_stage": _spread(EXPERT_LAYERS[name], pp * chunks)} if pp > 1 else {}
    if name == "llama-3-405b" and pp > 1:  # 126 layers; embedding and head count as one each
        plan["layers_per_stage"] = [
            128 // (pp * chunks) - (stage in (0, pp * chunks - 1)) for stage in range(pp * chunks)
        ]
    run: Table = {
        "global_batch_size": batch, "sequence_length": sequence,
        "precision": row["precision"][:4].strip("- ").lower(), "fused_accumulation": True,
        "clip_grad": True,
        **({"expert_fusion": "all"} if has_experts else {"gradient_dtype": "fp32"}),
    }  # fmt: skip
    if run["precision"] == "fp8" and row["product"] == "Megatron-Bridge":
        run["fp8_scaling"] = "current"
    node, size = NEMO_NODES[row["system"]]
    graphs = has_experts and row["container"] == "25.09" and row["system"] != "DGX-H100"
    return case(
        batch * sequence / (float(row["tokens_per_s_per_gpu"]) * ranks),
        model, nodes_of(ranks, {"from": node, "host_launch": "0 us"} if graphs else node, size),
        plan, run,
    )  # fmt: skip


def _experts_plan(row: Row) -> Table:
    """Return what Megatron-Bridge's scripts/performance/configs say of a plan with experts.

    In all releases routing is fused (moe_router_fusion, and moe_permute_fusion of the models'
    recipes) and gradients are in bf16 (grad_reduce_in_fp32 off).
    DeepSeek-V3 computes up projections of latent attention again, Qwen3 nothing. In 25.09 copies
    are dropped above a capacity of 1 and padded to it, on GB200 and B200 in one CUDA graph.
    """
    again = "light" if NEMO_EXPERTS[row["model"]]["from"] == "deepseek-v3" else "none"
    drops = {"expert_capacity": 1.0, "expert_padding": True} if row["container"] == "25.09" else {}
    return {"recompute": again, **drops}


EXPERT_LAYERS = {"qwen3-30b-a3b": 48, "qwen3-235b-a22b": 94, "deepseek-v3": 61}


def _refuse_nemo(row: Row) -> None:
    """Say what of a row no scenario can say; the first reason that applies.

    Raises:
        DescriptionError: with the reason.
    """
    model, fine = row["model"], row["precision"].partition(" ")[0]
    reasons = {
        "the source prints no throughput": not row["tokens_per_s_per_gpu"],
        "LoRA and fine-tuning are not built": row["kind"] != "pretrain",
        "the row of the same numbers without the word counts": model.endswith("(tokendrop)"),
        "this model is not in the catalogue": model not in (NEMO_MODELS | NEMO_EXPERTS),
        "block-scaled fp8 and fp4 (MXFP8, NVFP4) are not built":
            fine in ("MXFP8", "NVFP4", "FP8-MX"),
        "the summary prints this quantisation in parentheses and does not name it":
            "parenthesised" in row["precision"],
    }  # fmt: skip
    for reason, applies in reasons.items():
        if applies:
            raise DescriptionError(reason)


# --- Llama 3, table 4 -------------------------------------------------------------------------

LLAMA3_STAGES = (1, *[2] * 62, 1)
"""126 layers on 16 ranks of 4 chunks: 2 a stage, 1 in the first and the last, as the paper says."""


def llama3(row: Row) -> Case:
    """TFLOP/s a GPU of Llama 3 405B, as seconds of a step by the report's convention of FLOPs."""
    ranks, tp, pp, cp = (int(row[name]) for name in ("n_gpus", "tp", "pp", "cp"))
    dp = ranks // (tp * pp * cp)
    plan: Table = {
        "dp": dp, "tp": tp, "pp": pp, **context(cp, "all_gather"), "sequence_parallel": True,
        "zero": 3, "reshard_after_forward": False, "microbatch_size": 1,
        "layers_per_stage": list(LLAMA3_STAGES), **interleaved(4),
    }  # fmt: skip
    run = {
        "global_batch_size": int(row["batch_per_dp_seqs"]) * dp,
        "sequence_length": int(row["seq_len"]), "precision": "bf16", "gradient_dtype": "fp32",
    }  # fmt: skip
    s = described("llama-3-405b", nodes_of(ranks, "dgx-h100"), plan, run)
    flops = model_flops_per_token(s) * s.tokens_per_step
    measured = flops / (ranks * float(row["tflops_per_gpu"]) * 1e12)
    return Case(measured, s, lambda: step_seconds(s))
