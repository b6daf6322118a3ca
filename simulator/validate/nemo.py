"""Runs of NeMo's performance summaries: the builder from row to case."""

from __future__ import annotations

from simulator.errors import DescriptionError
from simulator.validate.nemo_recipes import recipe_of
from simulator.validate.published import Case, Row
from simulator.validate.scenarios import (
    RANK_ORDER,
    VOCAB,
    Table,
    blocking,
    case,
    context,
    interleaved,
    nodes_of,
    padded,
)

DENSE = {
    "LLAMA3_8B": "llama-3-8b", "LLAMA3-8B": "llama-3-8b", "LLAMA3_70B": "llama-3-70b",
    "Llama3 70B": "llama-3-70b", "LLAMA3.1_405B": "llama-3-405b", "GPT3-175B": "gpt3-175b",
    "GPT3-5B": "gpt3-5b", "GPT3-20B": "gpt3-20b", "LLAMA2-7B": "llama-2-7b",
    "LLAMA2-13B": "llama-2-13b", "Nemotron-340B": "nemotron-4-340b",
}  # fmt: skip
"""Dense models of the catalogue by the summaries' names."""

NO_MTP: Table = {"from": "deepseek-v3", "num_nextn_predict_layers": 0}
EXPERTS: dict[str, Table] = {
    "Qwen3_30B_a3B": {"from": "qwen3-30b-a3b"},
    "Qwen3_235B_a22B": {"from": "qwen3-235b-a22b"},
    "DeepSeekV3": {"from": "deepseek-v3"},
    "DeepSeekV3 (w/o MTP)": NO_MTP,
    "DeepSeekV3 (w/ MTP)": {"from": "deepseek-v3"},
    "DeepSeek V3 671B": {"from": "deepseek-v3"},
}
"""Likewise those with experts. Recipes have DeepSeek-V3's further layer (MTP); the summary of 25.11
has it only where it says so, as the row of the same numbers that says not."""

NODES = {
    "DGX-H100": ("dgx-h100", 8), "DGX-B200": ("dgx-b200", 8), "DGX-GB200": ("gb200-nvl72", 64),
    "DGX-GB300": ("gb300-nvl72", 64),
}  # fmt: skip
"""Node and the devices of each that a run uses: a power of two of an NVL72 rack."""

ENDS_COUNT = ("llama-3-405b", "qwen3-235b-a22b")
"""Models of which recipes count embedding and head as a layer each when stages are cut."""

LAYOUTS = {8: "Et*8|(t*8|)*6t*5{mtp}L", 16: "Et*4|(t*4|)*14t{mtp}L"}
"""Of DeepSeek-V3 in Megatron-Bridge, by stages (recipes/deepseek/deepseek_v3.py, `layout_map`)."""


def nemo(row: Row) -> Case:
    """Pre-training; seconds follow from tokens/s a GPU."""
    _refuse(row)
    ranks, sequence, batch = int(row["n_gpus"]), int(row["seq_len"]), int(row["gbs"])
    model = model_of(row)
    name = str(model["from"])
    recipe = recipe_of(row, name)
    plan = _plan(row, name)
    if name.startswith("gpt3"):
        model["vocab_size"] = padded(VOCAB, plan["tp"])
    if recipe.bucket and plan["zero"] == 1 and ranks > plan["tp"] * plan["pp"]:
        plan["bucket_size"] = recipe.bucket
    run: Table = {
        "global_batch_size": batch, "sequence_length": sequence, "clip_grad": True,
        **_precision(row), **recipe.run,
    }  # fmt: skip
    if row["product"] == "Megatron-Bridge" and plan["zero"] == 1:
        run["gradient_passes"] = _buffers(run)
    if row["product"] == "Megatron-Bridge":
        run["fused_loss"] = True  # cross_entropy_fusion_impl of scripts/performance
    system, size = NODES[row["system"]]
    node: Table = {"from": system}
    if recipe.is_graph:
        node["host_launch"] = "0 s"
    if not recipe.in_switch_reduction:
        node["link"] = {"in_switch_reduction": False}
    return case(
        batch * sequence / (float(row["tokens_per_s_per_gpu"]) * ranks), model,
        nodes_of(ranks, node, size),
        plan | recipe.plan, {key: value for key, value in run.items() if value is not None},
    )  # fmt: skip


def _buffers(run: Table) -> list[str]:
    """Return the passes over Megatron-LM's gradient buffers in Megatron-Bridge.

    Collectives average (`average_in_collective`) and nothing is checked (NeMo's
    `set_perf_optimizations`, scripts/performance); moments in bf16 need no copies. That experts'
    gradients are scaled all the same is left out.
    """
    return ["clear"] if run.get("optimizer") == "adamw_bf16" else ["clear", "copy"]


def model_of(row: Row) -> Table:
    """Return the model of a row."""
    if row["model"] == "DeepSeekV3" and row["container"] == "25.11":
        return dict(NO_MTP)
    return dict(EXPERTS.get(row["model"]) or {"from": DENSE[row["model"]]})


BLOCKS = ("MXFP8", "FP8-MX")
"""What the summaries call fp8 with a scale for each 32 elements."""


def _precision(row: Row) -> Table:
    """Return what a run says of its precision, by Megatron-Bridge's training/mixed_precision.py."""
    if "FP8" not in row["precision"]:
        return {"precision": "bf16"}
    if row["product"] != "Megatron-Bridge":
        return {"precision": "fp8"}
    scaling = "mxfp8" if row["precision"].startswith(BLOCKS) else "current"
    return {"precision": "fp8", "fp8_scaling": scaling, "fp8_weights": True}


def _plan(row: Row, name: str) -> Table:
    """Return the plan that a row prints, of a model of the catalogue."""
    tp, pp, cp = int(row["tp"]), int(row["pp"]), int(row["cp"] or 1)
    chunks = int(row["vp"]) if row["vp"].isdigit() else 1
    is_automodel = row["product"] == "NeMo Automodel"
    plan: Table = {
        "dp": int(row["n_gpus"]) // (tp * pp * cp), "tp": tp, "pp": pp,
        "microbatch_size": int(row["mbs"]),
        "sequence_parallel": tp > 1, "tp_overlap": "all" if tp > 1 else "none",
        "zero": 1 if row["fsdp"] in ("", "0") else 3, **interleaved(chunks), **RANK_ORDER,
        **context(cp, "all_gather" if is_automodel else "ring"),
        **(blocking(pp, tp, sequence=tp > 1) if chunks == 1 else {}),
    }  # fmt: skip
    if row["model"] in EXPERTS:
        plan["ep"] = int(row["ep"])
    if pp > 1 and name in ENDS_COUNT:
        plan["account_for_embedding_in_pipeline_split"] = True
        plan["account_for_loss_in_pipeline_split"] = True
    if name == "deepseek-v3":
        mtp = "" if model_of(row) == NO_MTP else "m"
        plan["layout"] = LAYOUTS[pp * chunks].format(mtp=mtp)
    return plan


def _refuse(row: Row) -> None:
    """Say what of a row no scenario can say; the first reason that applies.

    Raises:
        DescriptionError: with the reason.
    """
    model, fine = row["model"], row["precision"].partition(" ")[0]
    reasons = {
        "the source prints no throughput": not row["tokens_per_s_per_gpu"],
        "LoRA and fine-tuning are not built": row["kind"] != "pretrain",
        "the row of the same numbers without the word counts": model.endswith("(tokendrop)"),
        "this model is not in the catalogue": model not in (DENSE | EXPERTS),
        "fp4 (NVFP4) is not built": fine == "NVFP4",
        "the summary prints this quantisation in parentheses and does not name it":
            "parenthesised" in row["precision"] and fine not in BLOCKS,
        "its system is not in the catalogue": row["system"] not in NODES,
        "full sharding of models with experts is not modelled":
            model in EXPERTS and row["fsdp"] not in ("", "0"),
    }  # fmt: skip
    for reason, applies in reasons.items():
        if applies:
            raise DescriptionError(reason)
