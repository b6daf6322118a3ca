"""Published measurements: each builder on one row, and the account of every row."""

import csv
import json
import re
from dataclasses import replace

import pytest

from simulator.describe import catalog
from simulator.describe.layout import read_layout
from simulator.errors import DescriptionError
from simulator.lower.layers import num_parameters
from simulator.validate import (
    convolution,
    encoder_decoder,
    megatron,
    nemo,
    scenarios,
    schedules,
    sharded,
)
from simulator.validate.jobs import rerun_all
from simulator.validate.nemo_recipes import RECIPES, key_of
from simulator.validate.published import Outcome, Report, document, rerun
from simulator.validate.sources import SOURCES, named
from simulator.validate.text import published_text, summary

FOLDER = catalog.root() / "workloads/measured"


def rows(file):
    with (FOLDER / file).open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def row(file, **wanted):
    return next(r for r in rows(file) if all(r[k] == v for k, v in wanted.items()))


class Captured(Exception):
    """Carries the tables of a scenario out of a builder."""


@pytest.fixture
def tables(monkeypatch):
    """Return the model, cluster, plan and run that a builder describes, whatever is built yet."""

    def capture(parts, _):
        raise Captured(parts)

    monkeypatch.setattr(scenarios, "scenario", capture)

    def of(build, *arguments):
        with pytest.raises(Captured) as caught:
            build(*arguments)
        parts = caught.value.args[0]
        return parts["model"], parts["cluster"], parts["plan"], parts["run"]

    return of


@pytest.fixture(scope="module")
def reports():
    return rerun_all(SOURCES)


# --- the account ------------------------------------------------------------------------------


def test_every_row_of_every_file_is_an_outcome_or_is_listed_with_a_reason(reports):
    for report in reports:
        assert len(report.outcomes) + len(report.unexpressed) == len(report.source.rows())
        assert all(reason for _, reason in report.unexpressed)


def test_every_file_is_read_whole():
    for path in FOLDER.iterdir():
        sources = [s for s in SOURCES if s.file == path.name]
        assert sources, f"no source reads {path.name}"
        assert all(any(s.holds(r) for s in sources) for r in rows(path.name))


def test_every_prediction_is_a_positive_number(reports):
    values = [o.predicted for r in reports for o in r.outcomes]
    assert len(values) > 1500
    assert all(0 < value < float("inf") for value in values)


def test_names_of_sources_are_unique():
    assert len({s.name for s in SOURCES}) == len(SOURCES)


def test_the_profiled_times_of_a_pipeline_give_its_step_within_a_tenth(reports):
    replay = next(r for r in reports if r.source.kind == "replayed")
    assert len(replay.outcomes) == 48
    assert replay.accuracy.mean < 0.08


def test_what_a_layer_keeps_is_the_paper_s_share_in_every_mode(reports):
    saving = next(r for r in reports if r.source.name == "korthikanti-saving")
    assert len(saving.outcomes) == 20
    assert saving.accuracy.mean < 0.005


def test_the_text_names_every_case_and_every_source(reports):
    text = published_text(reports)
    assert all(o.label in text for r in reports for o in r.outcomes)
    assert all(r.source.name in summary(reports) for r in reports)


def test_cases_stand_with_the_worst_first(reports):
    report = next(r for r in reports if r.source.name == "zero-bubble-step")
    text = published_text([report])
    worst = max(report.outcomes, key=lambda o: abs(o.error))
    best = min(report.outcomes, key=lambda o: abs(o.error))
    assert text.index(worst.label) < text.index(best.label)


def test_the_document_is_json_with_every_row(reports):
    read = json.loads(json.dumps(document(reports)))
    assert read["schema_version"] == 1
    for report, plain in zip(reports, read["sources"], strict=True):
        assert plain["rows"] == len(plain["cases"]) + len(plain["unexpressed"])
        assert plain["expressed"] == len(plain["cases"])
        assert plain["name"] == report.source.name
        assert (plain["mape"] is None) == (not plain["cases"])


def test_error_is_above_zero_where_the_prediction_is_too_slow(reports):
    report = next(r for r in reports if r.source.name == "textbook")
    outcome = report.outcomes[0]
    assert outcome.error == pytest.approx((outcome.predicted - outcome.measured) / outcome.measured)


def test_a_source_without_outcomes_has_no_accuracy():
    report = rerun(named(("gpipe",))[0])
    assert report.accuracy is None
    assert report.outcomes == ()
    assert len(report.reasons()) == 1
    assert "no row can be expressed" in published_text([report])


def test_rows_that_the_loader_refuses_are_listed_with_its_sentence():
    source = replace(
        named(("vtrain-multi",))[0], build=lambda found: megatron.vtrain(found | {"tp": "3"})
    )
    report = rerun(source)
    assert report.outcomes == ()
    assert "plan.tp 3" in report.unexpressed[0].reason


# --- builders, one row each -------------------------------------------------------------------


# Weights, gradients, states, activations, transients, buffers: all from shapes, nothing fitted.
def test_memory_of_megatron_on_b200_is_within_half_a_percent(reports):
    memory = next(r for r in reports if r.source.name == "simumax-memory")
    whole = [o for o in memory.outcomes if o.label.startswith("llama") and "_cp" not in o.label]
    assert len(whole) == 12
    assert max(abs(o.error) for o in whole) < 0.005


# DeepSeek-V2 and V3 of four layers: latent attention, experts divided over 4 and 8 ranks.
def test_memory_of_megatron_with_experts_is_within_two_percent(reports):
    memory = next(r for r in reports if r.source.name == "simumax-memory")
    experts = [o for o in memory.outcomes if o.label.startswith("deepseek")]
    assert len(experts) == 5
    assert max(abs(o.error) for o in experts) < 0.02


# bf16 on GB200 and GB300, as their authors' recipes say: all of them too long.
def test_bf16_runs_with_experts_are_within_two_fifths(reports):
    report = next(r for r in reports if r.source.name == "nemo")
    found = [o for o in report.outcomes if "BF16 DeepSeek" in o.label or "BF16 Qwen3_" in o.label]
    assert len(found) == 5
    assert max(abs(o.error) for o in found) < 2 / 5


# A ring of 4 and of 8 ranks, 32,768 tokens: the same shapes and Transformer Engine's buffers.
def test_memory_of_megatron_with_context_parallelism_is_within_a_percent(reports):
    memory = next(r for r in reports if r.source.name == "simumax-memory")
    divided = [o for o in memory.outcomes if "_cp" in o.label]
    assert len(divided) == 2
    assert max(abs(o.error) for o in divided) < 0.01


# The row prints dp 4, but 16,384 / (8 x 16 x 16) = 8, and 8 x 16 x 131,072 tokens are its 16M.
def test_llama_3_at_131072_tokens_divides_sequences_over_16_ranks(tables):
    found = row("llama3_405b_table4.csv", cp="16")
    _, cluster, plan, run = tables(sharded.llama3, found)
    assert (plan["dp"], plan["cp"], plan["cp_style"]) == (8, 16, "all_gather")
    assert run["global_batch_size"] * run["sequence_length"] == 2**24
    assert cluster["num_nodes"] == 2048


# The first of 64 stages holds 2 of 128 layers. Beside products: embedding 51,200 / 8 x h, learned
# positions 2048 x h on each rank, and a layer's biases and norms, (3/8 + 1 + 4/8 + 1 + 4) h.
def test_the_paper_s_states_of_a_trillion_leave_out_the_embedding_and_small_parameters():
    case = megatron.korthikanti_states(row("korthikanti_memory.csv", model="1T", mode="none"))
    h, layers = 25600, 2
    products = 12 * layers * h**2 / 8
    others = (51200 // 8 + 2048) * h + layers * 6.875 * h
    assert case.measured == pytest.approx(18 * products / 2**30)
    assert case.predict() == pytest.approx(18 * (products + others) / 2**30)


def test_korthikanti_s_row_of_22_billion():
    case = megatron.korthikanti_step(
        row("korthikanti_seqpar_iteration.csv", model="22B",
            variant="selective recompute + sequence parallel")
    )  # fmt: skip
    s = case.scenario
    assert case.measured == 1.1
    assert (s.plan.tp, s.plan.pp, s.plan.dp, s.num_microbatches) == (8, 1, 1, 1)
    assert (s.plan.recompute, s.plan.sequence_parallel) == ("selective", True)
    assert s.precision.gradient == 4
    assert s.model.hidden_size == 6144


def test_korthikanti_s_interleaved_row_has_three_chunks(tables):
    found = row("korthikanti_seqpar_iteration.csv", model="175B")
    _, _, plan, _ = tables(megatron.korthikanti_step, found)
    assert (plan["schedule"], plan["chunks"]) == ("Interleaved1F1B", 3)


def test_korthikanti_s_states_are_18_bytes_for_each_parameter():
    case = megatron.korthikanti_states(row("korthikanti_memory.csv", model="22B", mode="none"))
    # 12 x 48 x 6144^2 weights of products / 8 ranks x 18 B = 45.5625 GiB, the paper's figure;
    # embeddings, biases and norms come on top: under 2 %.
    assert case.measured == 12 * 48 * 6144**2 / 8 * 18 / 2**30
    assert 1 < case.predict() / case.measured < 1.02


def test_sc21_s_row_of_39_billion():
    case = megatron.sc21_table1(row("megatron_sc21_table1.csv", params_B="39.1"))
    s = case.scenario
    # 1536 sequences / (32 replicas x 4 a microbatch) = 12; 512 GPUs = 64 nodes of 8.
    assert (s.num_microbatches, s.cluster.num_nodes, s.plan.pp) == (12, 64, 2)
    assert s.precision.gradient == 2
    assert not s.plan.grad_overlap


@pytest.mark.parametrize(
    ("size", "chunks", "layers"), [("76.1", 3, 15), ("145.6", 2, 10), ("310.1", 2, 6)]
)
def test_chunks_of_sc21_are_the_layers_of_a_rank_over_those_of_a_virtual_stage(
    tables, size, chunks, layers
):
    # run_table_1.sh: 5, 5 and 3 layers of a virtual stage of 15, 10 and 6 layers of a rank.
    found = row("megatron_sc21_table1.csv", params_B=size)
    model, _, plan, _ = tables(megatron.sc21_table1, found)
    assert plan["chunks"] == chunks
    assert model["num_hidden_layers"] == plan["pp"] * layers


def test_seconds_of_sc21_s_table_2_agree_with_the_days_that_it_prints():
    found = row("megatron_sc21_table2_zero3.csv", scheme="PTD-P", params_B="174.6", n_gpus="384")
    case = megatron.sc21_table2(found)
    # 300e9 tokens / (1536 x 2048) a step = 95,367 steps; the paper prints whole days.
    assert case.measured * 95367 / 86400 == pytest.approx(84, abs=1)
    assert (case.scenario.plan.tp, case.scenario.plan.pp, case.scenario.plan.dp) == (8, 12, 4)


def test_zero_3_of_sc21_divides_the_states_and_nothing_else(tables):
    found = row("megatron_sc21_table2_zero3.csv", scheme="ZeRO-3", n_gpus="640")
    _, _, plan, run = tables(megatron.sc21_table2, found)
    assert plan == {
        "dp": 640, "microbatch_size": 4, "recompute": "full", "zero": 3,
        "sharding_library": "deepspeed",
    }  # fmt: skip
    assert run["gradient_passes"] == []
    assert run["global_batch_size"] == 2560


def test_mpt_has_the_parameters_that_mosaic_prints():
    for found in rows("mosaic_llmfoundry_mpt.csv"):
        hidden, _, layers = sharded.MPT[found["model"]]
        # products and biases 12 h^2 + 9 h, two norms 4 h a layer; tokens, positions, last norm
        a_layer = 12 * hidden**2 + 13 * hidden
        ends = (50368 + int(found["seq_len"]) + 2) * hidden
        assert layers * a_layer + ends == int(found["n_params"])


def test_a_row_of_mosaic_on_40_gb_devices(tables):
    found = row("mosaic_llmfoundry_mpt.csv", gpu="a100_40gb", model="70b")
    model, cluster, plan, run = tables(sharded.mosaic, found)
    assert (model["hidden_size"], model["hidden_dropout"]) == (8192, 0.0)
    assert cluster["node"]["device"] == "a100-sxm4-40gb"
    assert (plan["zero"], plan["dp"], plan["recompute"]) == (3, 64, "full")
    assert run["precision"] == "bf16"


# PURE sums gradients as it computes, DEFAULT in fp32; SHARD_GRAD_OP keeps gathered weights.
@pytest.mark.parametrize(
    ("wanted", "summed", "reshards"),
    [
        ({"mp_mode": "PURE"}, None, True),
        ({"mp_mode": "DEFAULT", "sharding_strategy": "FULL_SHARD"}, "fp32", True),
        ({"sharding_strategy": "SHARD_GRAD_OP"}, "fp32", False),
    ],
)
def test_rows_of_mosaic_shard_and_sum_as_they_print(tables, wanted, summed, reshards):
    _, _, plan, run = tables(sharded.mosaic, row("mosaic_llmfoundry_mpt.csv", **wanted))
    assert (run.get("gradient_dtype"), plan["reshard_after_forward"]) == (summed, reshards)


def test_a_row_of_torchtitan_in_bf16(tables):
    found = row("torchtitan_h100.csv", table="asyncTP", float8="bf16", async_tp="0")
    model, cluster, plan, run = tables(sharded.torchtitan_step, found)
    assert (model, cluster["num_nodes"]) == ("llama-3-70b", 32)
    assert (plan["dp"], plan["tp"], plan["sequence_parallel"]) == (32, 8, True)
    assert run["precision"] == "bf16"


def test_float8_rows_of_torchtitan_ask_for_fp8(tables):
    _, _, _, run = tables(sharded.torchtitan_step, row("torchtitan_h100.csv", table="T4"))
    assert run["precision"] == "fp8"


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ({"model": "Qwen3_Next_80B"}, "not in the catalogue"),
        ({"model": "DeepSeekV3 (tokendrop)"}, "without the word counts"),
        ({"kind": "LoRA"}, "LoRA"),
        ({"precision": "NVFP4", "model": "LLAMA3_70B"}, "fp4"),
        ({"system": "DGX-B300", "model": "DeepSeekV3"}, "system is not in the catalogue"),
        ({"product": "NeMo Automodel", "model": "DeepSeek V3 671B"}, "full sharding of models wi"),
        ({"tokens_per_s_per_gpu": ""}, "no throughput"),
    ],
)
def test_rows_of_nemo_that_no_scenario_says_give_the_reason(wanted, reason):
    with pytest.raises(DescriptionError, match=reason):
        nemo.nemo(row("nemo_performance_summary.csv", **wanted))


def test_ranks_of_nemo_that_divide_sequences_are_no_replicas(tables):
    found = row("nemo_performance_summary.csv", model="LLAMA3-8B")  # 8 GPUs, cp 2
    _, _, plan, _ = tables(nemo.nemo, found)
    assert (plan["dp"], plan["cp"], plan["cp_style"]) == (4, 2, "ring")


def test_a_dense_row_of_nemo_on_racks(tables):
    found = row("nemo_performance_summary.csv", model="LLAMA3.1_405B", system="DGX-GB200", pp="1")
    model, cluster, plan, run = tables(nemo.nemo, found)
    assert (model["from"], plan["zero"], plan["dp"], plan["tp"]) == ("llama-3-405b", 3, 64, 2)
    node = {"from": "gb200-nvl72"}
    assert cluster == {"node": node, "num_nodes": 2, "devices_per_node": 64}
    assert run["precision"] == "fp8"


# Its launcher sets NVTE_FUSED_ATTN=0 and NCCL_NVLS_ENABLE=0 for every job.
def test_rows_of_2024_run_flash_attention_2_and_reduce_in_no_switch():
    s = nemo.nemo(row("nemo_performance_summary.csv", container="24.03.01.framework")).scenario
    assert s.run.attention == "flash2"
    assert not s.cluster.node.link.in_switch_reduction


# 126 layers on 4 chunks of each of 16 ranks: two a stage, one beside the embedding and the head.
def test_a_pipelined_row_of_nemo_counts_embedding_and_head_as_layers():
    found = row("nemo_performance_summary.csv", model="LLAMA3.1_405B", system="DGX-GB200", pp="16",
                precision="FP8")  # fmt: skip
    s = nemo.nemo(found).scenario
    assert s.layers_per_stage == (1, *[2] * 62, 1)
    assert (s.plan.tp_overlap, s.run.fp8_scaling) == ("all", "current")


# What the recipe of a row adds to what it prints, by hand from the files that it names.
NEMO_RECIPES = {
    "llama3/workload_base_configs.py": (
        {"model": "LLAMA3_70B", "system": "DGX-GB200", "container": "25.11"},
        {"offload_activations": True, "offload_layers": 40, "sharding_library": "megatron_fsdp"},
        {"fused_accumulation": False},
    ),
    "llama/llama3_workload_base_configs.py": (
        {"model": "LLAMA3_70B", "system": "DGX-GB300", "container": "26.04.01", "precision": "FP8"},
        {"offload_layers": 20, "microbatch_size": 2},
        {"fused_accumulation": False},
    ),
    "llama31/llama31_405b_llm_pretrain.py": (
        {"model": "LLAMA3.1_405B", "system": "DGX-GB200", "container": "25.09"},
        {"offload_layers": 95, "zero": 3},
        {"fused_accumulation": True},
    ),
    "deepseek/workload_base_configs.py": (
        {"model": "DeepSeekV3", "system": "DGX-GB200", "precision": "BF16", "container": "25.11"},
        {"recompute": "light", "recompute_modules": ["mla_up_proj"], "layout": "Et*4|(t*4|)*14tL",
         "bucket_size": "268.435456 MB"},
        {"optimizer": "adamw_bf16"},
    ),
    "gpt3/175b_fp8_performance.yaml": (
        {"model": "GPT3-175B", "container": "24.07"}, {"bucket_size": "100 MB"}, {},
    ),
    "llama/llama2_7b.yaml": (
        {"model": "LLAMA2-7B", "container": "24.07"}, {"bucket_size": "125 MB"},
        {"gradient_dtype": "fp32"},
    ),
    "llama3_1_70b_pretrain_benchmark_8nodes_tp1cp2pp1_0410.yaml": (
        {"model": "Llama3 70B", "product": "NeMo Automodel"}, {"recompute": "full"},
        {"attention": "flash2", "loss_in_place": False, "gradient_dtype": "fp32"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("path", NEMO_RECIPES)
def test_a_row_of_nemo_runs_as_its_authors_recipe_says(tables, path):
    wanted, plan, run = NEMO_RECIPES[path]
    found = row("nemo_performance_summary.csv", kind="pretrain", **wanted)
    model, _, planned, ran = tables(nemo.nemo, found)
    assert RECIPES[key_of(found, model["from"])].source.endswith(path)
    assert planned.items() >= plan.items()
    assert ran.items() >= run.items()
    assert ("gradient_dtype" in ran) == ("gradient_dtype" in run)  # else bf16


def test_a_graph_of_the_whole_iteration_leaves_the_host_nothing_to_issue(tables):
    for release, node in (("25.09", {"from": "gb200-nvl72", "host_launch": "0 s"}),
                          ("25.11", {"from": "gb200-nvl72"})):  # fmt: skip
        found = row("nemo_performance_summary.csv", model="LLAMA3_8B", system="DGX-GB200",
                    container=release)  # fmt: skip
        assert tables(nemo.nemo, found)[1]["node"] == node


def test_each_recipe_is_that_of_a_row_that_runs_and_has_a_commit():
    used = set()
    for found in rows("nemo_performance_summary.csv"):
        try:
            nemo.nemo(found)
        except DescriptionError:
            continue
        used.add(key_of(found, nemo.model_of(found)["from"]))
    assert used <= RECIPES.keys()
    said = {key: recipe for key, recipe in RECIPES.items() if not recipe.is_overlapped}
    assert {RECIPES[key].source for key in used} == {r.source for r in said.values()}
    assert all(re.fullmatch(r"[\w./-]+@[0-9a-f]{12}:[\w./-]+", r.source) for r in RECIPES.values())


# 61 layers in 8 and in 16 stages, with and without the one that predicts further.
@pytest.mark.parametrize(("stages", "mtp"), [(8, ""), (8, "m"), (16, ""), (16, "m")])
def test_layouts_of_deepseek_hold_all_of_its_layers(stages, mtp):
    held = read_layout(nemo.LAYOUTS[stages].format(mtp=mtp))
    assert len(held) == stages
    assert "".join(held).count("t") == 61
    assert held[-1].endswith(f"{mtp}L")


# 50,257 tokens, padded to 393 x 128; NeMo's own fp8 scales by earlier steps.
def test_a_row_of_nemos_gpt_pads_the_vocabulary(tables):
    model, _, plan, run = tables(
        nemo.nemo, row("nemo_performance_summary.csv", model="GPT3-5B", system="DGX-H100")
    )
    assert (model["from"], model["vocab_size"]) == ("gpt3-5b", 50304)
    assert plan["tp_overlap"] == "none"
    assert "fp8_scaling" not in run


# 20 nodes of 8, tp 2: 80 replicas of a microbatch of 27.
def test_a_row_of_nemos_t5(tables):
    found = row("nemo_t5.csv", model="3B", gbs="2160")
    model, cluster, plan, run = tables(encoder_decoder.nemo_t5, found)
    assert (model["num_hidden_layers"], model["num_decoder_layers"]) == (48, 24)
    assert (plan["dp"], plan["tp"], plan["microbatch_size"]) == (80, 2, 27)
    assert (cluster["num_nodes"], run["decoder_sequence_length"]) == (20, 128)


# 2,160 samples of 512 tokens, 1,395,131 a second.
def test_a_step_of_nemos_t5_follows_from_the_encoders_tokens():
    found = row("nemo_t5.csv", model="3B", gbs="2160")
    assert encoder_decoder.nemo_t5(found).measured == pytest.approx(0.79269, abs=1e-5)


# Not stated of the table of scaling: the batch of the same model's training.
def test_rows_of_nemos_t5_without_a_batch_have_that_of_its_training(tables):
    _, _, plan, run = tables(encoder_decoder.nemo_t5, row("nemo_t5.csv", n_nodes="1"))
    assert (run["global_batch_size"], plan["dp"]) == (2160, 4)


# Shapes of t5/3b.yaml: 24 layers of 4 h^2 + 3 h f and 24 of 8 h^2 + 3 h f, h 2048, f 5120, and
# 29,184 h; biases and norms left out: 2.78 billion.
def test_nemos_t5_3b_has_the_parameters_of_its_name():
    s = encoder_decoder.nemo_t5(row("nemo_t5.csv", n_nodes="1")).scenario
    weights = 24 * 12 * 2048**2 + 48 * 3 * 2048 * 5120 + 29_184 * 2048
    assert num_parameters(s.model) == pytest.approx(weights, rel=1e-3)


# H100 of 500 W.
def test_torchtitans_devices_run_at_a_lower_clock(tables):
    found = row("torchtitan_h100.csv", table="T3", compile="0")
    _, cluster, plan, run = tables(sharded.torchtitan_step, found)
    assert cluster["node"]["device"]["power_limit"] == "500 W"
    assert (plan["recompute"], run["compiled"]) == ("selective-op", False)


# 32 sequences of a replica: 16 microbatches of 2 for 16 stages, which hold 126 layers.
def test_an_interleaved_row_of_torchtitan(tables):
    found = row("torchtitan_h100.csv", pp_schedule="Interleaved1F1B")
    _, _, plan, run = tables(sharded.torchtitan_step, found)
    assert (plan["chunks"], plan["microbatch_size"]) == (2, 2)
    assert sum(plan["layers_per_stage"]) == 126
    assert (plan["tp_overlap"], plan["reshard_after_forward"]) == ("all", False)
    assert run["fp8_scaling"] == "current"


def test_torchtitans_scales_of_rows_are_left_out(tables):
    with pytest.raises(DescriptionError, match="a scale for each row"):
        sharded.torchtitan_step(row("torchtitan_h100.csv", float8="fp8 rowwise"))


@pytest.mark.parametrize(
    ("name", "billions"),
    # 12 h^2 a layer and the vocabulary: 24 x 12 x 4096^2 + 50257 x 4096 = 5.04; 44 x 12 x 6144^2 +
    # 50257 x 6144 = 20.24; Llama 2's table 1 says 6.7 and 13.0 before rounding.
    [("gpt3-5b", 5.04), ("gpt3-20b", 20.24), ("llama-2-7b", 6.738), ("llama-2-13b", 13.016),
     ("nemotron-4-340b", 341)],
)  # fmt: skip
def test_models_of_nemo_have_their_parameters(name, billions):
    s = scenarios.described(name, {"node": "dgx-h100", "num_nodes": 1, "devices_per_node": 1}, {},
                  {"global_batch_size": 1, "sequence_length": 128})  # fmt: skip
    assert num_parameters(s.model) / 1e9 == pytest.approx(billions, rel=2e-3)


def test_the_stages_of_llama_3_hold_its_126_layers(tables):
    found = row("llama3_405b_table4.csv", n_gpus="8192")
    _, _, plan, run = tables(sharded.llama3, found)
    assert sum(plan["layers_per_stage"]) == 126
    assert len(plan["layers_per_stage"]) == plan["pp"] * plan["chunks"]
    # 32 sequences of 8,192 tokens for each of 64 replicas: 16 Mi tokens
    assert run["global_batch_size"] * run["sequence_length"] == 2**24


def test_a_row_of_simumax_cuts_the_model(tables):
    found = row("simumax_b200_real_vs_pred.csv", case="llama3_405b_l4_tp8_pp1_dp1_mbc4_cef")
    model, cluster, plan, run = tables(megatron.simumax_step, found)
    # 128256 / (128 x 8) = 125.25, padded to 126 x 1024
    assert (model["num_hidden_layers"], model["vocab_size"]) == (4, 129024)
    assert model["num_key_value_heads"] == 16
    assert (plan["zero"], run["global_batch_size"]) == (1, 4)
    assert cluster["node"] == "dgx-b200"


# run_pretrain_deepseekv2.sh: --moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity,
# --moe-layer-freq "([0]*1+[1]*3)*1".
def test_a_row_of_simumax_with_experts_divides_them(tables):
    found = row("simumax_b200_real_vs_pred.csv", model="deepseekv2", ep="4")
    model, _, plan, _ = tables(megatron.simumax_step, found)
    assert (plan["ep"], plan["expert_capacity"], plan["expert_padding"]) == (4, 1.0, True)
    assert (model["num_hidden_layers"], model["first_k_dense_replace"]) == (4, 1)
    assert model["num_experts"] == 160


def test_adam_in_fp32_takes_16_bytes_a_parameter_of_gpt_2():
    found = row("mlsysbook_training_claims.csv", section="GPT-2 Adam Optimizer Memory",
                item="total")  # fmt: skip
    # 1,557,611,200 parameters x 16 B = 24.92 GB; the book rounds to 1.5 billion: 24 GB.
    assert schedules.claim(found).predict() == pytest.approx(1_557_611_200 * 16 / 1e9)


# 8 GPUs with 112 images each and two accumulated, 1,792 images at 2,855 a second.
def test_a_row_of_resnet_accumulates_to_its_batch(tables):
    found = row("nvidia_resnet50.csv", system="DGX-1 V100 16GB", n_gpus="8", precision="FP32")
    model, cluster, plan, run = tables(convolution.resnet50, found)
    assert (model, cluster["node"]["device"]) == ("resnet-50", "v100-sxm2-16gb")
    assert (plan["dp"], plan["microbatch_size"], run["global_batch_size"]) == (8, 112, 1792)


def test_mixed_precision_of_resnet_is_within_an_eighth(reports):
    (report,) = [r for r in reports if r.source.name == "nvidia-resnet50"]
    errors = [o.predicted / o.measured - 1 for o in report.outcomes if o.label.endswith("AMP")]
    assert len(errors) == 6
    assert max(map(abs, errors)) < 1 / 8


# --- the command ------------------------------------------------------------------------------


def test_the_command_prints_cases_assumptions_and_the_summary(trainsim):
    code, out, err = trainsim("validate", "published", "--source", "zero-bubble-replay")
    assert (code, err) == (0, "")
    for word in ("measured s", "predicted s", "assumed:", "not expressed", "MAPE", "replayed"):
        assert word in out


def test_json_of_published_goes_to_stdout_alone(trainsim):
    code, out, _ = trainsim("validate", "published", "--source", "textbook", "--json", "-")
    assert code == 0
    assert [s["name"] for s in json.loads(out)["sources"]] == ["textbook"]


@pytest.mark.parametrize(("tolerance", "code"), [("50", 0), ("0.1", 3)])
def test_a_source_beyond_the_tolerance_exits_with_3(trainsim, tolerance, code):
    arguments = ("--source", "textbook", "--max-error", tolerance)
    found, out, _ = trainsim("validate", "published", *arguments)
    assert found == code
    assert "MAPE" in out


def test_an_unknown_source_is_an_input_error_with_a_suggestion(trainsim):
    code, _, err = trainsim("validate", "published", "--source", "mosiac")
    assert code == 2
    assert "did you mean 'mosaic'?" in err


def test_a_figure_of_published_is_drawn(trainsim, tmp_path):
    arguments = ("--source", "zero-bubble-replay", "--source", "korthikanti-states")
    code, _, _ = trainsim("validate", "published", *arguments, "--figure", "scatter.svg")
    assert code == 0
    drawn = (tmp_path / "scatter.svg").read_text(encoding="utf-8")
    assert "zero-bubble-replay" in drawn
    assert "korthikanti-states" in drawn


def test_a_figure_with_another_suffix_is_refused_before_the_work(trainsim):
    code, _, err = trainsim("validate", "published", "--figure", "scatter.gif")
    assert code == 2
    assert ".png" in err


def test_a_figure_without_rows_is_refused(trainsim):
    code, _, err = trainsim("validate", "published", "--source", "gpipe", "--figure", "a.png")
    assert code == 2
    assert "no row" in err


# Measured ranks 1 2 3 4, predicted 1 2 4 3: 1 - 6 x (0 + 0 + 1 + 1) / (4 x 15) = 0.8.
@pytest.mark.parametrize(
    ("pairs", "ranking"),
    [
        ([(1, 5), (2, 6), (3, 9), (4, 8)], 0.8),
        ([(1, 1), (2, 3), (3, 4)], 1.0),
        ([(1, 3), (2, 2), (3, 1)], -1.0),
        ([(1, 2), (2, 2), (3, 2)], None),
        ([(1, 2), (2, 3)], None),
    ],
)
def test_the_ranking_is_spearmans(pairs, ranking):
    outcomes = tuple(
        Outcome("", float(measured), float(predicted)) for measured, predicted in pairs
    )
    found = Report(SOURCES[0], outcomes, ()).ranking
    assert found == ranking or found == pytest.approx(ranking)


def test_rows_dealt_out_to_processes_come_back_in_their_order():
    (source,) = sources = named(("korthikanti-saving",))
    assert rerun_all(sources, jobs=2) == rerun_all(sources, jobs=1) == [rerun(source)]
