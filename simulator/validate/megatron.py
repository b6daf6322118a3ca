"""Runs of Megatron-LM and of what is built like it: builders from row to case."""

from __future__ import annotations

from functools import partial

from simulator.api import simulate
from simulator.describe.scenario import Scenario
from simulator.lower.memory import rank_memory
from simulator.program import ACTION_CODE
from simulator.validate.published import Case, Row
from simulator.validate.scenarios import (
    BUFFERS,
    BUFFERS_2022,
    GIB,
    RANK_ORDER,
    VOCAB,
    Table,
    allocated_gib,
    at_the_end,
    blocking,
    case,
    degrees,
    described,
    gpt,
    interleaved,
    nodes_of,
    overlapped,
    padded,
)

SC21_VOCAB = 51200
"""Narayanan et al. (2021) and Korthikanti et al. (2022) state it, padded."""

# --- Korthikanti et al., 2022 -----------------------------------------------------------------

RECOMPUTE: dict[str, Table] = {
    "none": {},
    "seq": {"sequence_parallel": True},
    "selective": {"recompute": "selective"},
    "seq+selective": {"sequence_parallel": True, "recompute": "selective"},
    "full": {"recompute": "full"},
}
"""Plans of the modes of Korthikanti et al."""

KORTHIKANTI = {
    "22B": {"heads": 64, "hidden": 6144, "layers": 48, "pp": 1, "chunks": 1, "batch": 4,
            "micro": 4},
    "175B": {"heads": 96, "hidden": 12288, "layers": 96, "pp": 8, "chunks": 3, "batch": 64,
             "micro": 1},
    "530B": {"heads": 128, "hidden": 20480, "layers": 105, "pp": 35, "chunks": 3, "batch": 280,
             "micro": 1},
    "1T": {"heads": 160, "hidden": 25600, "layers": 128, "pp": 64, "chunks": 1, "batch": 512,
           "micro": 1},
}  # fmt: skip
"""Table 3 of Korthikanti et al.: tp 8, dp 1, sequences of 2048."""

MIXED = {
    "precision": "fp16", "gradient_dtype": "fp32", "attention": "unfused",
    "fused_accumulation": True, "clip_grad": True, "gradient_passes": BUFFERS_2022,
}  # fmt: skip
"""18 bytes a parameter, as the paper's 45.5625 GiB of the 22B model shows: 2 + 4 + 12. Gradients
are added by the products that make them, Megatron-LM's default since late 2021."""


def korthikanti_step(row: Row) -> Case:
    """Table 5, and the run of 2,240 GPUs in section 6.3."""
    mode = "seq+selective" if row["variant"].startswith("selective") else "full"
    plan = {
        **degrees(row), **interleaved(int(row["interleave_m"])), **RECOMPUTE[mode],
        "microbatch_size": int(row["micro_batch"]), **at_the_end(int(row["dp"])),
        **overlapped(row), **blocking(int(row["pp"]), 8, sequence=mode != "full"),
    }  # fmt: skip
    run = {**MIXED, "global_batch_size": int(row["global_batch"]), "sequence_length": 2048}
    return case(
        float(row["iter_time_s"]), gpt(row, SC21_VOCAB),
        nodes_of(int(row["n_gpus"]), "dgx-a100"), plan, run,
    )  # fmt: skip


def korthikanti_states(row: Row) -> Case:
    """Weights, gradients and optimizer states of the first stage."""
    s = _korthikanti(row)
    return Case(float(row["param_opt_GiB"]), s, partial(_states_gib, s))


def korthikanti_activations(row: Row) -> Case:
    """Activations of the first stage at their peak."""
    s = _korthikanti(row)
    return Case(float(row["activation_GiB"]), s, partial(_activations_gib, s))


def korthikanti_share(row: Row) -> Case:
    """Activations that a layer keeps, as a share of those without any saving."""
    few = {"pp": 1, "chunks": 1, "batch": KORTHIKANTI[row["model"]]["micro"]}
    depths = [{**few, "layers": layers} for layers in (1, 2)]
    ours = [_korthikanti(row, depth) for depth in depths]
    base = [_korthikanti({**row, "mode": "none"}, depth) for depth in depths]
    measured = float(row["activation_pct_of_baseline"])
    return Case(measured, ours[1], lambda: 100 * _a_layer_more(*ours) / _a_layer_more(*base))


def _korthikanti(row: Row, changed: dict[str, int] | None = None) -> Scenario:
    facts = {**KORTHIKANTI[row["model"]], **(changed or {})}
    plan = {
        "tp": 8, "pp": facts["pp"], "dp": 1, "microbatch_size": facts["micro"],
        **interleaved(facts["chunks"]), **RECOMPUTE[row["mode"]],
    }  # fmt: skip
    run = {**MIXED, "global_batch_size": facts["batch"], "sequence_length": 2048, "num_steps": 1}
    shape = {name: str(facts[name]) for name in ("heads", "hidden", "layers")}
    return described(gpt(shape, SC21_VOCAB), nodes_of(8 * facts["pp"], "dgx-a100"), plan, run)


def _states_gib(s: Scenario) -> float:
    return rank_memory(s)[0].states / GIB


def _activations_gib(s: Scenario) -> float:
    result = simulate(s)
    return float(result.activations.peak[result.stage_ranks[0]]) / GIB


def _a_layer_more(one: Scenario, two: Scenario) -> float:
    """Return the bytes that a second layer adds to what is kept when the forward has ended."""
    return _kept(two) - _kept(one)


def _kept(s: Scenario) -> float:
    result = simulate(s)
    alloc, free = result.activations.moved
    forward = (result.tiled.action == ACTION_CODE["F"]) & (result.tiled.rank == 0)
    return float((alloc - free)[forward].sum())


# --- Narayanan et al., 2021 (SC'21) -----------------------------------------------------------

TABLE_1 = {
    "1.7": (16, 1, True), "3.6": (16, 1, True), "7.5": (16, 1, True),
    "18.4": (8, 1, True), "39.1": (4, 1, False), "76.1": (2, 3, False),
    "145.6": (2, 2, False), "310.1": (1, 2, False), "529.6": (1, 3, False),
    "1008.0": (1, 1, False),
}  # fmt: skip
"""Microbatch size, chunks a rank (layers a stage over ``--num-layers-per-virtual-pipeline-stage``)
and buckets (``DDP=torch`` overlaps buckets of 25 MB, ``DDP=local`` reduces at the end) by billions
of parameters: NVIDIA/Megatron-LM, examples/sc21/run_table_1.sh."""


SC21_PASSES = {True: ["copy"], False: ["divide", "copy"]}
"""What is done to gradients, by whether torch's DDP overlaps them: Megatron-LM's own divides what
it has flattened (megatron/model/distributed.py; the copies there and back are left out)."""


def sc21_table1(row: Row) -> Case:
    """Weak scaling from 1.7 billion to a trillion parameters."""
    micro, chunks, overlaps = TABLE_1[row["params_B"]]
    plan = {
        "dp": int(row["dp_derived"]), "tp": int(row["tp"]), "pp": int(row["pp"]),
        "microbatch_size": micro, "grad_overlap": overlaps, "recompute": "full",
        **interleaved(chunks), **RANK_ORDER, **blocking(int(row["pp"]), int(row["tp"])),
    }  # fmt: skip
    return case(
        float(row["iter_time_s_derived_from_eq3"]), gpt(row, SC21_VOCAB),
        nodes_of(int(row["n_gpus"]), "dgx-a100"), plan,
        _sc21_run(int(row["global_batch"])) | {"gradient_passes": SC21_PASSES[overlaps]},
    )  # fmt: skip


TABLE_2 = {
    "174.6": {"hidden": "12288", "heads": "96", "layers": "96"},
    "529.6": {"hidden": "20480", "heads": "128", "layers": "105"},
}
"""Shapes of the two models by billions of parameters (table 1, and GPT-3's own)."""


def sc21_table2(row: Row) -> Case:
    """ZeRO-3 against pipeline and tensor parallelism; seconds of a step follow from equation 3."""
    shape, ranks, batch = TABLE_2[row["params_B"]], int(row["n_gpus"]), int(row["global_batch"])
    layers, hidden = int(shape["layers"]), int(shape["hidden"])
    more = 1 + 2048 / (6 * hidden) + SC21_VOCAB / (16 * layers * hidden)
    flops = 96 * batch * 2048 * layers * hidden**2 * more
    measured = flops / (ranks * float(row["tflops_per_gpu"]) * 1e12)
    model_parallel = int(row["model_parallel_size"])
    plan: Table = {
        "dp": ranks // model_parallel, "microbatch_size": int(row["micro_batch"]),
        "recompute": "full",
    }  # fmt: skip
    if row["scheme"] == "ZeRO-3":
        plan, passes = plan | {"zero": 3, "sharding_library": "deepspeed"}, []
    else:
        pp, passes = model_parallel // 8, SC21_PASSES[False]
        plan |= {"tp": 8, "pp": pp, "grad_overlap": False, **RANK_ORDER, **blocking(pp, 8)}
    run = _sc21_run(batch) | {"gradient_passes": passes}
    return case(measured, gpt(shape, SC21_VOCAB), nodes_of(ranks, "dgx-a100"), plan, run)


def _sc21_run(batch: int) -> Table:
    return {
        "global_batch_size": batch, "sequence_length": 2048, "precision": "fp16",
        "attention": "unfused", "clip_grad": True,
    }  # fmt: skip


# --- vTrain -----------------------------------------------------------------------------------

VTRAIN_NODE: Table = {"from": "dgx-a100", "nic": {"count": 4}}
"""vTrain's validation configs state 800 Gb/s between nodes of 8 A100: 4 adapters of 200 Gb/s."""

VTRAIN_PROFILE = VTRAIN_NODE | {"host_launch": "82 us"}
"""Where vTrain profiled its layers, fitted to `vtrain-single`: its profiler has CUPTI trace every
call of the runtime and the driver, and flushes the records at both ends of each layer. No host of a
training run is so slow."""


def vtrain_single(row: Row) -> Case:
    """Iterations on one node that vTrain's own program has summed from layers it had profiled.

    As that program composes them (src/predictor.py): collectives of tensor parallelism stand in
    line with kernels, 50,257 tokens are not padded, gradients are neither added up nor unscaled
    nor clipped, and nothing is recomputed, though the configs say so: with recomputation the
    largest products would run above the device's peak.
    """
    pp, tp = int(row["pp"]), int(row["tp"])
    run = {"fused_accumulation": True, "loss_scaling": False}
    return _vtrain(row, VOCAB // tp * tp, VTRAIN_PROFILE, blocking(pp), run)


def vtrain(row: Row) -> Case:
    """Measured iterations of Megatron's GPT on many nodes."""
    pp, tp = int(row["pp"]), int(row["tp"])
    plan = {"recompute": "full", **overlapped(row), **blocking(pp, tp)}
    run = {"clip_grad": True, "gradient_passes": BUFFERS_2022}
    return _vtrain(row, padded(VOCAB, tp), VTRAIN_NODE, plan, run)


def _vtrain(row: Row, vocab: int, node: Table, plan: Table, run: Table) -> Case:
    sequence = int(row["seq_len"])
    plan = {
        **degrees(row), "microbatch_size": int(row["micro_batch"]),
        **at_the_end(int(row["dp"])), **plan,
    }  # fmt: skip
    run = {
        "global_batch_size": int(row["global_batch"]), "sequence_length": sequence,
        "precision": "fp16", "attention": "unfused", **run,
    }  # fmt: skip
    return case(
        float(row["iter_time_ms"]) / 1e3, gpt(row, vocab, sequence),
        nodes_of(int(row["n_gpus"]), node), plan, run,
    )  # fmt: skip


# --- SimuMax on B200 --------------------------------------------------------------------------

SIMUMAX: dict[str, Table] = {
    "llama3-70b": {"from": "llama-3-70b"},
    "llama3-405b": {"from": "llama-3-405b", "num_key_value_heads": 16},
    "deepseekv3": {
        "from": "deepseek-v3",
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
    },
    "deepseekv2": {
        "from": "deepseek-v3",
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "num_experts": 160,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1536,
        "num_shared_experts": 2,
        "first_k_dense_replace": 1,
        "vocab_size": 102400,
        "num_nextn_predict_layers": 0,
        "n_group": 1,
        "topk_group": 1,
    },
}
"""Models of run_pretrain_llama3.sh, which gives the 405B 16 key-value heads, and of
run_pretrain_deepseekv2.sh, whose first layer alone is dense; cut in layers."""


def simumax_step(row: Row) -> Case:
    """Measured iterations on a node of 8 B200."""
    model, cluster, plan, run = _simumax(row)
    return case(float(row["real_ms"]) / 1e3, model, cluster, plan, run)


def simumax_memory(row: Row) -> Case:
    """Most bytes that torch's allocator gave out on any rank."""
    model, cluster, plan, run = _simumax(row)
    return case(float(row["real_alloc_GiB"]), model, cluster, plan, run, allocated_gib)


def _simumax(row: Row) -> tuple[Table, Table, Table, Table]:
    tp, experts = int(row["tp"]), int(row["ep"] or 0)
    model = {**SIMUMAX[row["model"]], "num_hidden_layers": int(row["layers"])}
    if not experts:
        model["vocab_size"] = padded(128256, tp)
    plan = {
        **({"ep": experts, "expert_capacity": 1.0, "expert_padding": True} if experts else {}),
        **degrees(row), "cp": int(row["cp"] or 1), "microbatch_size": int(row["mbs"]), "zero": 1,
        "sequence_parallel": tp > 1, **at_the_end(int(row["dp"])), **overlapped(row),
        **blocking(int(row["pp"]), tp, sequence=tp > 1),
    }  # fmt: skip
    batch = int(row["mbs"]) * int(row["microbatches"]) * int(row["dp"])
    run = {
        "global_batch_size": batch, "sequence_length": int(row["seq_len"]), "precision": "bf16",
        "gradient_dtype": "fp32", "fused_accumulation": True,
        "linear_layers": "transformer_engine", "clip_grad": True, "gradient_passes": BUFFERS,
        "fused_loss": True,
        **({"expert_fusion": "permutation"} if experts else {}),
    }  # fmt: skip
    return model, nodes_of(int(row["n_gpus"]), "dgx-b200"), plan, run
