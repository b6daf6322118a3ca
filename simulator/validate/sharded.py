"""Runs of FSDP, torchtitan and Llama 3: builders from row to case."""

from __future__ import annotations

from simulator.describe.scenario import Scenario
from simulator.errors import DescriptionError
from simulator.lower.layers import model_flops_per_token
from simulator.validate.published import Case, Row
from simulator.validate.scenarios import (
    Table,
    case,
    context,
    described,
    gpt,
    interleaved,
    nodes_of,
    reserved_gib,
    step_seconds,
)

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

REDUCED_IN: dict[str, Table] = {"DEFAULT": {"gradient_dtype": "fp32"}, "PURE": {}}
"""In what gradients are summed by Composer's `mixed_precision`: PURE in that of the computation
(composer/distributed/mosaic_fsdp_utils.py, `get_mixed_precision`)."""


def mosaic(row: Row) -> Case:
    """MPT under FSDP, of Composer's `mixed_precision` PURE or DEFAULT."""
    hidden, heads, layers = MPT[row["model"]]
    sequence, ranks = int(row["seq_len"]), int(row["n_gpus"])
    shape = {"hidden": str(hidden), "heads": str(heads), "layers": str(layers)}
    no_dropout = {f"{place}_dropout": 0.0 for place in ("embedding", "hidden", "attention")}
    tokens = int(row["global_batch_seqs"]) * sequence
    plan = {
        "dp": ranks, "zero": 3, "sharding_library": "fsdp1",
        "microbatch_size": int(row["micro_batch"]),
        "reshard_after_forward": row["sharding_strategy"] == "FULL_SHARD",
        "recompute": "full" if row["act_ckpt"] == "True" else "none",
    }  # fmt: skip
    run = {
        "global_batch_size": int(row["global_batch_seqs"]), "sequence_length": sequence,
        "precision": row["precision"].removeprefix("amp_"), **REDUCED_IN[row["mp_mode"]],
        "attention": "flash1", "clip_grad": True, "fused_optimizer": False,
    }  # fmt: skip
    return case(
        tokens / float(row["throughput_tok_per_s"]),
        gpt(shape, 50368, sequence) | no_dropout,
        nodes_of(ranks, MOSAIC_NODES[row["gpu"]]), plan, run,
    )  # fmt: skip


# --- torchtitan -------------------------------------------------------------------------------

GRAND_TETON = {
    "from": "dgx-h100",
    "device": {
        "from": "h100-sxm5-80gb", "memory": "96 GB", "memory_bandwidth": "2400 GB/s",
        "power_limit": "500 W",
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
    of_2024 = row["table"] != "asyncTP"
    plan: Table = {
        "dp": int(row["fsdp"]), "tp": tp, "pp": pp, "zero": 3, "root_holds_ends": of_2024,
        "no_sync": pp > 1,
        "microbatch_size": int(row["local_batch"]) // (pp * chunks), "sequence_parallel": tp > 1,
        "tp_overlap": "all" if row["async_tp"] == "1" else "none",
        "recompute": TITAN_RECOMPUTE[row["act_ckpt"]], "reshard_after_forward": pp == 1,
        **interleaved(chunks), **context(int(row["cp"] or 1), "all_gather"),
    }  # fmt: skip
    if pp > 1:
        plan["layers_per_stage"] = _titan_stages(126, pp * chunks)  # of the 405B
    run: Table = {
        "global_batch_size": int(row["global_batch"]),
        "sequence_length": int(row["seq_len(8192 default where not printed)"]),
        "precision": "bf16", "gradient_dtype": "fp32", "attention": "flash2",
        "layer_code": "torchtitan", "compiled": row["compile"] == "1", "clip_grad": True,
        "loss_in_place": False, "compiled_loss": not of_2024, "fused_optimizer": not of_2024,
    }  # fmt: skip
    if row["float8"] not in ("", "0", "bf16"):
        run |= {"precision": "fp8", "fp8_scaling": "current"}
    return described(model, nodes_of(ranks, GRAND_TETON), plan, run)


def _titan_stages(layers: int, stages: int) -> list[int]:
    """Return the layers of each stage as torchtitan of 2024 cuts them: what is left over goes to
    the stages after the first one, a layer each (generate_split_points of pipelining_utils.py).
    """
    count, rest = divmod(layers, stages)
    return [count + (0 < stage <= rest) for stage in range(stages)]


def _spread(layers: int, stages: int) -> list[int]:
    """Return the layers of each stage, the first ones a layer more where they are uneven."""
    count, rest = divmod(layers, stages)
    return [count + (stage < rest) for stage in range(stages)]


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
