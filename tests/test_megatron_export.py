"""Scenarios as Megatron-LM's flags, which become the same scenario again."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import simulator as sim
from simulator.errors import DescriptionError
from simulator.exchange.megatron import import_megatron, launcher_flags, to_megatron, unsaid
from simulator.exchange.megatron.stages import layout_text

MODEL = {
    "num-layers": 16, "hidden-size": 256, "num-attention-heads": 8, "seq-length": 64,
    "max-position-embeddings": 64, "vocab-size": 1000, "global-batch-size": 64,
}  # fmt: skip


def words(flags):
    """The text of flags: True is a switch, None and False are nothing."""
    return " ".join(
        f"--{name}" if value is True else f"--{name} {value}"
        for name, value in flags.items()
        if value not in (None, False)
    )


def imported(flags, nodes=2):
    return import_megatron(words(flags), node="dgx-h100", nodes=nodes).scenario


def again(scenario):
    """The scenario that its own flags describe."""
    text = " ".join((*launcher_flags(scenario), *to_megatron(scenario)))
    return import_megatron(text, name=scenario.name, node="dgx-h100").scenario


@st.composite
def flags(draw):
    """Flags of Megatron-LM, in combinations that it takes."""
    tp, pp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4]))
    chunks = draw(st.sampled_from([None, 2, 4])) if pp > 1 else None
    dp = 16 // (tp * pp)
    sequence = tp > 1 and draw(st.booleans())
    zero = draw(st.sampled_from([0, 1]))
    overlap = draw(st.booleans())
    bf16 = draw(st.booleans())
    recompute = draw(st.sampled_from([None, "selective", "full"]))
    per_stage = 16 // (pp * (chunks or 1))
    block = recompute == "full" and draw(st.booleans())
    fused = draw(st.booleans())
    return MODEL | {
        "tensor-model-parallel-size": tp,
        "pipeline-model-parallel-size": pp,
        "num-virtual-stages-per-pipeline-rank": chunks,
        "no-overlap-p2p-communication": bool(chunks and pp > 2) and draw(st.booleans()),
        "micro-batch-size": draw(st.sampled_from([1, 2])),
        "sequence-parallel": sequence,
        "tp-comm-overlap": sequence and draw(st.booleans()),
        "use-tp-pp-dp-mapping": draw(st.booleans()),
        "use-distributed-optimizer": bool(zero),
        "num-distributed-optimizer-instances": (
            2 if zero and dp > 1 and draw(st.booleans()) else None
        ),
        "overlap-grad-reduce": overlap,
        "ddp-bucket-size": draw(st.sampled_from([None, 1_000_000])) if overlap else None,
        "recompute-granularity": recompute,
        "recompute-method": ("block" if block else "uniform") if recompute == "full" else None,
        "recompute-num-layers": (
            draw(st.integers(1, per_stage)) if block else 1 if recompute == "full" else None
        ),
        "bf16": bf16,
        "fp16": not bf16 and draw(st.booleans()),
        "grad-reduce-in-bf16": bf16 and draw(st.booleans()),
        "fp8-format": draw(st.sampled_from([None, "hybrid"])) if bf16 else None,
        "fp8-recipe": draw(st.sampled_from(["delayed", "tensorwise"])),
        "no-gradient-accumulation-fusion": not fused,
        "transformer-impl": draw(st.sampled_from([None, "local"])) if fused else None,
        "attention-backend": draw(st.sampled_from(["auto", "flash", "unfused"])),
        "optimizer": draw(st.sampled_from(["adam", "sgd"])),
        "clip-grad": draw(st.sampled_from([None, 0.0, 1.0])),
        "swiglu": draw(st.booleans()),
        "normalization": draw(st.sampled_from([None, "RMSNorm"])),
        "position-embedding-type": draw(st.sampled_from([None, "rope"])),
        "disable-bias-linear": draw(st.booleans()),
        "add-qkv-bias": draw(st.booleans()),
        "untie-embeddings-and-output-weights": draw(st.booleans()),
        "group-query-attention": draw(st.booleans()),
        "num-query-groups": 4,
        "qk-layernorm": draw(st.booleans()),
        "hidden-dropout": draw(st.sampled_from([None, 0.0])),
    }


@st.composite
def sparse_flags(draw):
    """Flags of models with experts, latent attention and prediction further ahead."""
    tp, pp = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))
    latent, grouped = draw(st.booleans()), draw(st.booleans())
    capacity = draw(st.sampled_from([None, 1.25]))
    light = draw(st.sampled_from([None, "mla_up_proj", "layernorm moe_act mla_up_proj"]))
    each = draw(st.sampled_from([64, 128]))
    return MODEL | {
        "tensor-model-parallel-size": tp,
        "pipeline-model-parallel-size": pp,
        "sequence-parallel": tp > 1,
        "micro-batch-size": 1,
        "bf16": True,
        "position-embedding-type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "disable-bias-linear": True,
        "untie-embeddings-and-output-weights": True,
        "use-distributed-optimizer": draw(st.booleans()),
        "ffn-hidden-size": 128,
        "num-experts": 8,
        "moe-router-topk": draw(st.sampled_from([1, 2])),
        "moe-ffn-hidden-size": each if each < 128 else None,
        "moe-shared-expert-intermediate-size": draw(st.sampled_from([None, 2 * each])),
        "moe-layer-freq": draw(st.sampled_from([None, "[0]*3+[1]*13"])),
        "moe-router-num-groups": 4 if grouped else None,
        "moe-router-group-topk": 2 if grouped else None,
        "moe-expert-capacity-factor": capacity,
        "moe-pad-expert-input-to-capacity": bool(capacity) and draw(st.booleans()),
        "expert-model-parallel-size": draw(st.sampled_from([1, 2, 4])),
        "expert-tensor-parallel-size": draw(st.sampled_from([None, 1])),
        "moe-token-dispatcher-type": draw(st.sampled_from(["alltoall", "flex"])),
        "multi-latent-attention": latent,
        "qk-layernorm": latent or draw(st.booleans()),
        "q-lora-rank": draw(st.sampled_from([None, 48])) if latent else None,
        "kv-lora-rank": draw(st.sampled_from([None, 64])) if latent else None,
        "mtp-num-layers": draw(st.sampled_from([None, 1])),
        "recompute-granularity": "selective" if light else None,
        "recompute-modules": light,
        "exp-avg-dtype": "bf16",
        "exp-avg-sq-dtype": "bf16",
    }


@settings(max_examples=100, deadline=None)
@given(sparse_flags())
def test_flags_of_experts_and_latent_attention_become_the_same_scenario(chosen):
    scenario = imported(chosen)
    assert again(scenario) == scenario
    assert unsaid(scenario) == []


@pytest.mark.parametrize("style", ["p2p", "a2a", "allgather"])
def test_context_parallelism_survives_the_way_there_and_back(style):
    scenario = imported(
        MODEL | {"context-parallel-size": 2, "micro-batch-size": 1, "cp-comm-type": style,
                 "overlap-grad-reduce": True, "bf16": True}
    )  # fmt: skip
    assert (scenario.plan.cp, scenario.plan.dp) == (2, 8)
    assert again(scenario) == scenario


@settings(max_examples=150, deadline=None)
@given(flags())
def test_flags_of_a_scenario_become_the_same_scenario(chosen):
    scenario = imported(chosen)
    assert again(scenario) == scenario
    assert unsaid(scenario) == []


@pytest.mark.parametrize(
    ("counts", "layout"),
    [
        ((3, 2), "Et*3|t*2L"),
        ((1, 2, 2, 1), "Et|(t*2|)*2tL"),
        ((1, 2, 3, 1), "Et|t*2|t*3|tL"),
        ((5,), "Et*5L"),
    ],
)
def test_layers_of_stages_become_a_layout(counts, layout):
    assert layout_text(counts) == layout


def test_a_layout_with_prediction_further_ahead_has_it_before_the_loss():
    assert layout_text((2, 1), 1) == "Et*2|tmL"


def test_uneven_stages_survive_the_way_there_and_back():
    scenario = imported(
        MODEL
        | {"pipeline-model-parallel-size": 4, "micro-batch-size": 1,
           "decoder-first-pipeline-num-layers": 2, "decoder-last-pipeline-num-layers": 4}
    )  # fmt: skip
    assert scenario.layers_per_stage == (2, 5, 5, 4)
    assert again(scenario) == scenario


@pytest.mark.parametrize(
    ("plan", "flag"),
    [
        ({"plan.layers_per_stage": [9, 7, 8, 8]},
         "--pipeline-model-parallel-layout 'Et*9|t*7|t*8|t*8L'"),
        ({"plan.layout": "E|t*11|t*11|t*10L"},
         "--pipeline-model-parallel-layout 'E|t*11|t*11|t*10L'"),
        ({"plan.first_stage_layers": 0, "plan.last_stage_layers": 8},
         "--decoder-first-pipeline-num-layers 0"),
    ],
)  # fmt: skip
def test_a_division_has_its_flag_and_survives(plan, flag):
    scenario = sim.load("llama-3-8b-3d", plan)
    assert flag in to_megatron(scenario)
    assert again(scenario).layers_per_stage == scenario.layers_per_stage


@pytest.mark.parametrize("name", ["gpt3-175b-1024gpu", "llama-3-8b-3d", "llama-3-405b-16384gpu"])
def test_what_has_no_flag_is_said_and_all_else_survives(name):
    scenario = sim.load(name)
    back = again(scenario)
    said = " ".join(unsaid(scenario))
    assert back.layers_per_stage == scenario.layers_per_stage  # as a layout, where it is a list
    elsewhere = ("num_steps", "layers_per_stage", "layout")
    for part in ("plan", "run"):
        ours, theirs = getattr(scenario, part), getattr(back, part)
        for field in dataclasses.fields(ours):
            if getattr(ours, field.name) != getattr(theirs, field.name):
                assert field.name in said or field.name in elsewhere, field.name


@pytest.mark.parametrize(
    ("name", "overrides", "sentence"),
    [
        ("gpt2-xl-gpipe", {}, "plan.schedule 'GPipe': Megatron-LM has 1F1B, Interleaved1F1B"),
        ("resnet50-ddp", {}, "resnet-50: Megatron-LM's flags describe transformers"),
        ("bert-large-ddp", {}, "model.causal False: its GPT is a decoder without it"),
        ("gpt2-xl-1gpu", {"run.optimizer": "adafactor"},
         "run.optimizer 'adafactor': Megatron-LM has adamw, adamw_bf16, momentum, sgd, muon"),
        ("gpt2-xl-1gpu", {"run.lora_rank": 8},
         "run: Megatron-LM's flags train every parameter, without adapters or rounding"),
    ],
)  # fmt: skip
def test_what_megatron_does_not_have_is_refused(name, overrides, sentence):
    with pytest.raises(DescriptionError) as caught:
        to_megatron(sim.load(name, overrides))
    assert sentence in caught.value.problems


@pytest.mark.parametrize(
    ("name", "overrides", "sentence"),
    [
        ("gpt2-xl-1f1b", {}, "plan.p2p_overlap = true: messages of 1F1B block in Megatron-LM"),
        ("gpt2-xl-ddp", {"plan.first_bucket_size": "1 MB"}, "plan.first_bucket_size = 1000000.0"),
        ("gpt2-xl-1gpu", {"run.compiled": True}, "run.compiled = True"),
        (
            "gpt2-xl-ddp",
            {"plan.zero": 3, "plan.sharding_library": "deepspeed"},
            "plan.sharding_library = 'deepspeed': its own FSDP shards weights",
        ),
    ],
)
def test_what_no_flag_says_is_said_in_words(name, overrides, sentence):
    assert sentence in unsaid(sim.load(name, overrides))
