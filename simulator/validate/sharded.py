"""Runs of FSDP, torchtitan, NeMo and Llama 3: builders from row to case."""

from __future__ import annotations

from simulator.describe.scenario import Scenario
from simulator.errors import DescriptionError
from simulator.lower.layers import model_flops_per_token
from simulator.validate.published import Case, Row
from simulator.validate.scenarios import (
    RANK_ORDER,
    Table,
    case,
    described,
    gpt,
    interleaved,
    nodes_of,
    reserved_gib,
    step_seconds,
)

NO_CONTEXT_PARALLEL = "context parallelism is not built"

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
        "attention": "flash2",
    }  # fmt: skip
    return case(
        tokens / float(row["throughput_tok_per_s"]),
        gpt(shape, 50368, sequence) | no_dropout,
        nodes_of(ranks, MOSAIC_NODES[row["gpu"]]), plan, run,
    )  # fmt: skip


# --- torchtitan -------------------------------------------------------------------------------

GRAND_TETON = {
    "from": "dgx-h100",
    "device": {"from": "h100-sxm5-80gb", "memory": "96 GB", "memory_bandwidth": "2400 GB/s"},
}
"""H100 with 96 GB of HBM2e at 2.4 TB/s, 400 Gb/s of RDMA each."""

TITAN_MODELS = {"8B": "llama-3-8b", "70B": "llama-3-70b", "405B": "llama-3-405b"}
TITAN_RECOMPUTE = {"full": "full", "selective": "selective", "per-op SAC": "selective"}


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
    if row["cp"] not in ("", "1"):
        raise DescriptionError(NO_CONTEXT_PARALLEL)
    if row["async_tp"] == "1":
        raise DescriptionError("asynchronous tensor parallelism is not built")
    float8 = row["float8"] not in ("", "0", "bf16")
    ranks, tp = int(row["n_gpus"]), int(row["tp"])
    plan: Table = {
        "dp": int(row["fsdp"]), "tp": tp, "pp": int(row["pp"]), "zero": 3,
        "microbatch_size": int(row["local_batch"]), "sequence_parallel": tp > 1,
        "recompute": TITAN_RECOMPUTE[row["act_ckpt"]],
    }  # fmt: skip
    run = {
        "global_batch_size": int(row["global_batch"]),
        "sequence_length": int(row["seq_len(8192 default where not printed)"]),
        "precision": "fp8" if float8 else "bf16", "gradient_dtype": "fp32", "attention": "flash2",
    }  # fmt: skip
    model = TITAN_MODELS[row["model"].rpartition("-")[2]]
    return described(model, nodes_of(ranks, GRAND_TETON), plan, run)


# --- NeMo's performance summaries -------------------------------------------------------------

NEMO_MODELS = {
    "LLAMA3_8B": "llama-3-8b", "LLAMA3-8B": "llama-3-8b", "LLAMA3_70B": "llama-3-70b",
    "Llama3 70B": "llama-3-70b", "LLAMA3.1_405B": "llama-3-405b", "GPT3-175B": "gpt3-175b",
}  # fmt: skip
"""Dense models of the catalogue by the summaries' names."""

DENSE_MISSING = ("LLAMA2-7B", "LLAMA2-13B", "GPT3-5B", "GPT3-20B", "Nemotron-340B")
"""Dense models that the catalogue lacks."""

NEMO_NODES = {
    "DGX-H100": ("dgx-h100", 8), "DGX-B200": ("dgx-b200", 8), "DGX-GB200": ("gb200-nvl72", 64),
    "DGX-GB300": ("gb300-nvl72", 64), "DGX-B300": ("dgx-b300", 8),
}  # fmt: skip
"""Node and the devices of each that a run uses: a power of two of an NVL72 rack."""


def nemo(row: Row) -> Case:
    """Pre-training of dense models; seconds follow from tokens/s a GPU."""
    _refuse_nemo(row)
    ranks, sequence, batch = int(row["n_gpus"]), int(row["seq_len"]), int(row["gbs"])
    chunks = int(row["vp"]) if row["vp"].isdigit() else 1
    tp, pp = int(row["tp"]), int(row["pp"])
    plan: Table = {
        "dp": ranks // (tp * pp), "tp": tp, "pp": pp, "microbatch_size": int(row["mbs"]),
        "sequence_parallel": tp > 1, "zero": 3 if row["fsdp"] not in ("", "0", "1") else 1,
        **interleaved(chunks), **RANK_ORDER,
    }  # fmt: skip
    run = {
        "global_batch_size": batch, "sequence_length": sequence, "gradient_dtype": "fp32",
        "precision": row["precision"][:4].strip("- ").lower(), "fused_accumulation": True,
    }  # fmt: skip
    node, size = NEMO_NODES[row["system"]]
    return case(
        batch * sequence / (float(row["tokens_per_s_per_gpu"]) * ranks),
        NEMO_MODELS[row["model"]], nodes_of(ranks, node, size), plan, run,
    )  # fmt: skip


def _refuse_nemo(row: Row) -> None:
    """Say what of a row no scenario can say; the first reason that applies.

    Raises:
        DescriptionError: with the reason.
    """
    model, fine = row["model"], row["precision"].partition(" ")[0]
    reasons = {
        "the source prints no throughput": not row["tokens_per_s_per_gpu"],
        "LoRA and fine-tuning are not built": row["kind"] != "pretrain",
        "mixture of experts and hybrid state-space models are not built":
            model not in NEMO_MODELS and model not in DENSE_MISSING,
        NO_CONTEXT_PARALLEL: row["cp"] not in ("", "1"),
        "block-scaled fp8 and fp4 (MXFP8, NVFP4) are not built":
            fine in ("MXFP8", "NVFP4", "FP8-MX"),
        f"{model} is not in the catalogue": model in DENSE_MISSING,
    }  # fmt: skip
    for reason, applies in reasons.items():
        if applies:
            raise DescriptionError(reason)


# --- Llama 3, table 4 -------------------------------------------------------------------------

LLAMA3_STAGES = (1, *[2] * 62, 1)
"""126 layers on 16 ranks of 4 chunks: 2 a stage, 1 in the first and the last, as the paper says."""


def llama3(row: Row) -> Case:
    """TFLOP/s a GPU of Llama 3 405B, as seconds of a step by the report's convention of FLOPs."""
    if row["cp"] != "1":
        raise DescriptionError(NO_CONTEXT_PARALLEL)
    ranks, dp = int(row["n_gpus"]), int(row["dp"])
    plan: Table = {
        "dp": dp, "tp": int(row["tp"]), "pp": int(row["pp"]), "sequence_parallel": True,
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
