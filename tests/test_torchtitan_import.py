"""torchtitan's files of settings become scenarios, and every key is accounted for."""

import re
import subprocess
import sys

import pytest

import simulator as sim
from simulator.errors import DescriptionError
from simulator.exchange.titan_keys import KEYS
from simulator.exchange.torchtitan import import_torchtitan

# settings of torchtitan/models/llama3/train_configs/llama3_405b.toml, pytorch/torchtitan 01424cb
LLAMA3_405B = """
[job]
description = "Llama 3 405B training"
[model]
name = "llama3"
flavor = "405B"
tokenizer_path = "./assets/tokenizer/original/tokenizer.model"
converters = "float8"
[optimizer]
name = "AdamW"
lr = 8e-5
[training]
batch_size = 2
seq_len = 8192
max_norm = 1.0
steps = 3000
compile = true
dataset = "c4"
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 8
enable_async_tensor_parallel = true
pipeline_parallel_degree = 1
context_parallel_degree = 1
[checkpoint]
enable_checkpoint = false
[activation_checkpoint]
mode = 'full'
[float8]
enable_fsdp_float8_all_gather = true
filter_fqns = "output"
"""


def read(*settings, nodes=16, text=LLAMA3_405B):
    return import_torchtitan(text, node="dgx-h100", nodes=nodes, settings=settings)


def plan_of(*settings, **options):
    return read(*settings, **options).scenario.plan


def test_the_405b_example_is_planned_as_its_settings_say():
    s = read().scenario
    assert s.model.name == "llama-3-405b"
    assert (s.plan.dp, s.plan.tp, s.plan.zero) == (16, 8, 3)  # 128 devices over tp 8
    assert (s.plan.tp_overlap, s.plan.recompute, s.plan.microbatch_size) == ("all", "full", 2)
    assert (s.run.precision, s.run.fp8_scaling, s.run.compiled) == ("fp8", "current", True)
    assert s.run.global_batch_size == 2 * 16
    assert s.run.gradient_dtype == "fp32"


def test_every_key_of_the_example_is_known():
    imported = read()
    assert imported.unknown == ()
    assert imported.not_modelled == (
        "float8.enable_fsdp_float8_all_gather = True: weights are gathered in bf16",
    )


def test_replicas_of_shards_are_hsdp():
    plan = plan_of("--parallelism.data_parallel_replicate_degree=4")
    assert (plan.dp, plan.dp_shard) == (16, 4)


def test_one_shard_is_plain_data_parallelism():
    settings = (
        "--parallelism.data_parallel_replicate_degree=16",
        "--parallelism.data_parallel_shard_degree", "1",
    )  # fmt: skip
    assert plan_of(*settings).zero == 0


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("1F1B", 1), ("GPipe", 1), ("Interleaved1F1B", 2)]
)
def test_schedules_of_several_stages_have_two_a_rank(schedule, chunks):
    plan = plan_of(
        "--parallelism.pipeline_parallel_degree", "4",
        f"--parallelism.pipeline_parallel_schedule={schedule}",
    )  # fmt: skip
    assert (plan.schedule, plan.chunks, plan.reshard_after_forward) == (schedule, chunks, False)


def test_embedding_and_head_count_as_a_layer_each():
    # 126 + 2 over 4 stages are 32, one less at each end
    s = read("--parallelism.pipeline_parallel_degree=4").scenario
    assert s.layers_per_stage == (31, 32, 32, 31)


def test_split_points_say_where_stages_begin():
    s = read(
        "--parallelism.pipeline_parallel_degree=4",
        '--parallelism.pipeline_parallel_split_points=["layers.30", "layers.62", "layers.94"]',
    ).scenario
    assert s.layers_per_stage == (30, 32, 32, 32)


def test_layers_a_stage_say_how_many_stages_there_are():
    # 128 in stages of 16 are 8, two for each of 4 ranks
    plan = plan_of(
        "--parallelism.pipeline_parallel_degree=4",
        "--parallelism.pipeline_parallel_schedule=Interleaved1F1B",
        "--parallelism.pipeline_parallel_layers_per_stage=16",
    )
    assert plan.chunks == 2


@pytest.mark.parametrize(
    ("settings", "recompute", "layers"),
    [
        (["mode=none"], "none", None),
        (["mode=full"], "full", None),
        (["mode=selective", "selective_ac_option=op"], "selective-op", None),
        (["mode=selective", "selective_ac_option='2'"], "full", 63),  # every second of 126
    ],
)
def test_activation_checkpointing_is_full_by_operator_or_of_some_layers(
    settings, recompute, layers
):
    plan = plan_of(*(f"--activation_checkpoint.{setting}" for setting in settings))
    assert (plan.recompute, plan.recompute_layers) == (recompute, layers)


def test_degrees_that_are_all_numbers_say_how_many_devices_there_are():
    imported = read("--parallelism.data_parallel_shard_degree=4", nodes=None)
    assert imported.scenario.cluster.num_nodes == 4  # 4 x 8 devices


def test_context_parallelism_gathers_keys_and_values_by_default():
    plan = plan_of("--parallelism.context_parallel_degree=2")
    assert (plan.cp, plan.cp_style, plan.dp) == (2, "all_gather", 8)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["--model.flavor=1B"], "model.flavor: llama3 1B is not known; known are llama3 8B"),
        (["--parallelism.tensor_parallel_degree=x"],
         "parallelism.tensor_parallel_degree: 'x' is no count"),
        (["--parallelism.tensor_parallel_degree=3"],
         "the degrees of [parallelism] need a multiple of 3 devices, the cluster has 128"),
        (["--parallelism.pipeline_parallel_degree=2",
          "--parallelism.pipeline_parallel_schedule=2F2B"],
         "parallelism.pipeline_parallel_schedule: schedule '2F2B' is not one of"),
        (["--training.enable_cpu_offload"],
         "training.enable_cpu_offload: weights on the host are not modelled"),
        (["--activation_checkpoint.mode=most"],
         "activation_checkpoint.mode: 'most' is not one of none, selective, full"),
        (["--fault_tolerance.enable=true"],
         "fault_tolerance.enable: True: replicas that come and go are not modelled"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_in_a_sentence(settings, sentence):
    with pytest.raises(DescriptionError, match=re.escape(sentence)):
        read(*settings)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("", "there is neither [parallelism] nor [training]"), ("[x", "it is not valid TOML")],
)
def test_other_texts_are_refused(text, sentence):
    with pytest.raises(DescriptionError, match=re.escape(sentence)):
        read(text=text)


def test_nodes_must_be_said_where_shards_fill_what_is_left():
    with pytest.raises(DescriptionError, match="say --nodes N"):
        read(nodes=None)


def test_an_unknown_key_is_listed_with_the_one_that_is_near():
    assert read("--parallelism.tensor_paralel_degree=4").unknown == (
        "parallelism.tensor_paralel_degree, did you mean 'parallelism.tensor_parallel_degree'?",
    )


def test_what_a_key_becomes_are_fields_that_there_are():
    s = sim.load("gpt2-xl-1gpu")
    for name, key in KEYS.items():
        for target in key.becomes.split(", "):
            section, _, field = target.partition(".")
            assert not field or hasattr(getattr(s, section), field), f"{name}: {target}"


def test_the_command_writes_a_scenario_that_loads(tmp_path):
    (tmp_path / "405b.toml").write_text(LLAMA3_405B, encoding="utf-8")
    command = [sys.executable, "-m", "simulator", "import", "torchtitan", "405b.toml", "--nodes",
               "16", "--out", "out.toml", "--strict"]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert sim.load(tmp_path / "out.toml").plan.dp == 16
