"""Megatron-LM's launch scripts become scenarios, and every flag is accounted for."""

import dataclasses
import re

import pytest

from simulator.describe.loader import load_model
from simulator.describe.plan import Plan
from simulator.describe.run import Run
from simulator.errors import DescriptionError
from simulator.exchange.megatron import import_megatron
from simulator.exchange.megatron.flags import FLAGS
from simulator.exchange.megatron.unmodelled import NOT_MODELLED, REFUSED, WITHOUT_EFFECT
from simulator.lower.layers import num_parameters

GPT = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --vocab-size 1000 --micro-batch-size 1 --global-batch-size 64 "
)
"""A small model, on a node of 8."""


def read(more="", **options):
    """The import of the small model with more flags."""
    return import_megatron(f"{GPT} {more}", **{"node": "dgx-h100", "nodes": 1} | options)


def scenario(more="", **options):
    return read(more, **options).scenario


def problems(more="", **options):
    with pytest.raises(DescriptionError) as caught:
        read(more, **options)
    return caught.value.problems


# --- scripts in the manner of Megatron-LM's examples ----------------------------------------------

GPT3_175B = r"""
#!/bin/bash
# flags and values of examples/gpt3/train_gpt3_175b_distributed.sh, NVIDIA/Megatron-LM 157006d
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NUM_NODES=1
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
CHECKPOINT_PATH=$1 #<path>
VOCAB_FILE=$3      #<gpt2-vocab.json>
MERGE_FILE=$4
LAUNCH=(--nproc_per_node $GPUS_PER_NODE --nnodes $NUM_NODES --master_addr localhost)
MODEL=(
    --num-layers 96 --hidden-size 12288 --num-attention-heads 96
    --seq-length 2048 --max-position-embeddings 2048
    --attention-backend auto # (flash/fused/unfused/local)
)
TRAIN=(--micro-batch-size 1 --global-batch-size 1536 --rampup-batch-size 16 16 5859375
    --train-iters 500000 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95
    --init-method-std 0.006 --clip-grad 1.0 --fp16 --lr 6.0e-5 --lr-decay-style cosine
    --min-lr 6.0e-6 --lr-warmup-fraction .001 --lr-decay-iters 430000)
PARALLEL=(
	--tensor-model-parallel-size 8
	--pipeline-model-parallel-size 16
)
DATA=(--data-path $5 --vocab-file $VOCAB_FILE --merge-file $MERGE_FILE --split 949,50,1)
LOG=(--log-interval 100 --save-interval 10000 --eval-interval 1000 --save $CHECKPOINT_PATH
    --load $CHECKPOINT_PATH --eval-iters 10 --tensorboard-dir $2)
torchrun ${LAUNCH[@]} pretrain_gpt.py \
    ${MODEL[@]} \
    ${TRAIN[@]} ${PARALLEL[@]} \
    ${DATA[@]} ${LOG[@]}
"""

LLAMA3_8B = r"""
# flags and values of examples/llama/train_llama3_8b_h100_fp8.sh, NVIDIA/Megatron-LM 157006d
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
TOKENIZER_ARG=${3:-"MOCK"}
DATA_ARG=${4:-"MOCK"}
GPUS_PER_NODE=8; NUM_NODES=1
TP_SIZE=1
CP_SIZE=1
DTYPE="fp8"
LAUNCH=(--nproc_per_node $GPUS_PER_NODE --nnodes $NUM_NODES --node_rank ${NODE_RANK:-0})
MODEL=(--use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
    --num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128
    --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope
    --rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0
    --swiglu --init-method-std 0.0134 --attention-backend fused --apply-layernorm-1p
    --untie-embeddings-and-output-weights --disable-bias-linear)
TRAIN=(--micro-batch-size 1 --global-batch-size 128 --train-samples 1953125000 --lr 0.00015
    --decoupled-lr 5.0e-4   # of embedding and head
    --clip-grad 1.0 --bf16 --grad-reduce-in-bf16 --cross-entropy-loss-fusion
    --calculate-per-token-loss --manual-gc --empty-unused-memory-level 1)
KIND=()
if [[ "$DTYPE" == "fp8" ]]; then
    KIND+=("--fp8-format hybrid" "--fp8-amax-history-len 1024" "--fp8-param-gather")
fi
PARALLEL=(
    --tensor-model-parallel-size $TP_SIZE
    --context-parallel-size $CP_SIZE
    # --pipeline-model-parallel-size $PP_SIZE
    --sequence-parallel
)
TRAIN+=("${DDP[@]}" --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather)
if [[ "$TOKENIZER_ARG" == "MOCK" ]] || [[ "$DATA_ARG" == "MOCK" ]]; then
    DATA+=("--mock-data" "--tokenizer-type NullTokenizer" "--vocab-size 128256" "--split '99,1,0'")
else
    DATA+=("--data-path $DATA_ARG" "--tokenizer-type HuggingFaceTokenizer")
fi
torchrun ${LAUNCH[@]} pretrain_gpt.py ${MODEL[@]} ${TRAIN[@]} ${KIND[@]} ${PARALLEL[@]} ${DATA[@]}
"""


MIXTRAL = r"""
# flags and values of examples/mixtral/train_mixtral_8x7b_distributed.sh, NVIDIA/Megatron-LM 9b8acfd
GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-"1"}
TOKENIZER_MODEL=$2
LAUNCH=(--nproc_per_node $GPUS_PER_NODE --nnodes $NNODES --node_rank ${RANK:-"0"})
MODEL=(--use-mcore-models --disable-bias-linear --seq-length 4096 --max-position-embeddings 32768
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --init-method-std 0.01 --attention-dropout 0.0 --hidden-dropout 0.0 --normalization RMSNorm
    --position-embedding-type rope --swiglu --untie-embeddings-and-output-weights
    --group-query-attention --num-query-groups 8 --no-masked-softmax-fusion
    --no-position-embedding --rotary-base 1000000)
MOE=(--num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall
    --overlap-param-gather --overlap-grad-reduce)
DATA=(--tokenizer-type Llama2Tokenizer --tokenizer-model ${TOKENIZER_MODEL} --data-path $3
    --split 99990,8,2)
TRAIN=(--micro-batch-size 1 --global-batch-size 256 --lr 1e-4 --train-iters 500000
    --lr-decay-iters 320000 --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 0.1
    --lr-warmup-iters 500 --clip-grad 1.0 --bf16)
PARALLEL=(--tensor-model-parallel-size 1 --pipeline-model-parallel-size 4
    --expert-model-parallel-size 8 --use-distributed-optimizer --sequence-parallel)
LOG=(
    --log-interval 1 \
    --save $1 \
    --tensorboard-dir "${1}/tensorboard" \
    --no-load-optim \
    --no-load-rng
)
if [ -n "${WANDB_API_KEY}" ]; then
    LOG+=(--wandb-project ${WANDB_PROJECT:-"Mixtral"})
fi
torchrun ${LAUNCH[@]} pretrain_gpt.py \
    ${MODEL[@]} ${MOE[@]} ${DATA[@]} ${TRAIN[@]} ${PARALLEL[@]} ${LOG[@]}
"""

DEEPSEEK_V3 = """
# flags and values of docs/discussions/megatron-fsdp-user-guide/example-scripts/
# sbatch_mfsdp_deepseek_v3.sh, NVIDIA/Megatron-LM 157006d, without Megatron FSDP and recomputation
TP=${TP:-1}
EP=${EP:-8}
ARGS=(
    --tensor-model-parallel-size ${TP} --expert-model-parallel-size ${EP}
    --expert-tensor-parallel-size 1 --context-parallel-size 1 --use-distributed-optimizer
    --overlap-grad-reduce --overlap-param-gather --use-mcore-models --sequence-parallel
    --use-flash-attn --disable-bias-linear --micro-batch-size ${MBS:-2}
    --global-batch-size ${GBS:-2048} --no-check-for-nan-in-loss-and-grad --manual-gc
    --transformer-impl transformer_engine --seq-length 4096
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model deepseek-ai/DeepSeek-V3
    --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128
    --kv-channels 128 --max-position-embeddings 4096 --position-embedding-type rope
    --rotary-base 10000 --make-vocab-size-divisible-by 3232 --normalization RMSNorm
    --norm-epsilon 1e-6 --swiglu --untie-embeddings-and-output-weights --multi-latent-attention
    --attention-dropout 0.0 --hidden-dropout 0.0 --clip-grad 1.0 --qk-layernorm
    --num-experts 256 --moe-layer-freq [0]*3+[1]*58 --moe-ffn-hidden-size 2048
    --moe-shared-expert-intermediate-size 2048 --moe-router-load-balancing-type seq_aux_loss
    --moe-router-topk 8 --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep
    --moe-router-pre-softmax --moe-grouped-gemm --moe-aux-loss-coeff 1e-4
    --moe-router-group-topk 4 --moe-router-num-groups 8 --moe-router-topk-scaling-factor 2.5
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias
    --moe-router-bias-update-rate 1e-3 --moe-router-dtype fp32 --moe-permute-fusion
    --moe-router-force-load-balancing --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128
    --qk-pos-emb-head-dim 64 --v-head-dim 128 --rotary-scaling-factor 40 --mscale 1.0
    --mscale-all-dim 1.0 --mtp-num-layers 1 --mtp-loss-scaling-factor 0.1 --bf16
    --enable-experimental
)
CMD="
cd ${MEGATRON_PATH};
python ${MEGATRON_PATH}/pretrain_gpt.py ${ARGS[@]}"
sbatch <<EOF
#!/bin/bash
#SBATCH --nodes=your_own_num_nodes
srun --mpi=pmix -l bash -x -c "${CMD}" 2>&1 | tee log
EOF
"""


def test_the_example_of_gpt3_has_174_6_billion_parameters():
    # 96 (12 h^2 + 13 h) + (51200 + 2048) h + 2 h with h = 12288; 50257 tokens to 128 x 8
    h = 12288
    expected = 96 * (12 * h * h + 13 * h) + (51200 + 2048) * h + 2 * h
    imported = import_megatron(GPT3_175B, node="dgx-a100", nodes=128)
    assert num_parameters(imported.scenario.model) == expected == 174_615_846_912
    assert imported.unknown == ()


def test_the_example_of_gpt3_is_planned_as_its_flags_say():
    plan = import_megatron(GPT3_175B, node="dgx-a100", nodes=32).scenario.plan
    assert (plan.tp, plan.pp, plan.dp, plan.schedule) == (8, 16, 2, "1F1B")
    assert not plan.grad_overlap  # no --overlap-grad-reduce
    assert not plan.p2p_overlap  # messages of 1F1B block
    assert plan.order[:2] == ("pp", "dp")


def test_a_script_for_too_few_devices_says_how_many_nodes_it_needs():
    # 8 x 16 = 128 devices hold one model, NUM_NODES=1 gives 8
    with pytest.raises(DescriptionError, match=r"= 128 devices hold one model.*say --nodes 16"):
        import_megatron(GPT3_175B, node="dgx-a100")


def test_a_variable_of_the_script_is_set_from_outside():
    imported = import_megatron(GPT3_175B, node="dgx-a100", variables={"NUM_NODES": "16"})
    assert imported.scenario.cluster.num_nodes == 16


def test_the_example_of_llama_3_has_its_parameters():
    # a layer: q and o 2 x 4096^2, k and v 2 x 4096 x 1024, MLP 3 x 4096 x 14336, and two layer
    # norms with biases (no --normalization); 128256 + 1 tokens of a NullTokenizer to 128384
    layer = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 2 * 4096
    expected = 32 * layer + 2 * 128384 * 4096 + 2 * 4096
    imported = import_megatron(LLAMA3_8B, node="dgx-h100")
    assert num_parameters(imported.scenario.model) == expected == 8_031_576_064
    assert imported.unknown == ()


def test_the_example_of_llama_3_runs_as_its_flags_say():
    s = import_megatron(LLAMA3_8B, node="dgx-h100").scenario
    assert (s.plan.dp, s.plan.tp, s.plan.zero, s.plan.grad_overlap) == (8, 1, 1, True)
    assert (s.run.precision, s.run.fp8_scaling, s.run.gradient_dtype) == ("fp8", "delayed", None)
    assert not s.plan.sequence_parallel  # Megatron-LM turns it off without tensor parallelism
    assert s.plan.bucket_size == 40e6 * 2  # 40 million parameters of 2 bytes


def test_the_example_of_mixtral_has_46_7_billion_parameters():
    imported = import_megatron(MIXTRAL, node="dgx-h100", nodes=4)
    assert num_parameters(imported.scenario.model) == 46_702_792_704  # as Hugging Face counts
    plan = imported.scenario.plan
    assert (plan.pp, plan.ep, plan.etp, plan.dp, plan.zero) == (4, 8, 1, 8, 1)
    assert imported.unknown == ()


def test_the_example_of_mixtral_is_the_model_of_the_catalogue():
    ours, theirs = import_megatron(MIXTRAL, nodes=4).scenario.model, load_model("mixtral-8x7b")
    assert dataclasses.asdict(ours) == dataclasses.asdict(theirs) | {"name": ours.name}


def test_the_example_of_deepseek_v3_is_the_model_of_the_catalogue():
    # through a here-document and bash -c; 128815 tokens to 40 x 3232 = 129280
    imported = import_megatron(DEEPSEEK_V3, node="dgx-h100", nodes=128)
    assert imported.unknown == ()
    ours, theirs = imported.scenario.model, load_model("deepseek-v3")
    shown = dataclasses.asdict(theirs) | {"name": ours.name, "max_position_embeddings": 4096}
    assert dataclasses.asdict(ours) == shown


@pytest.mark.parametrize(("ep", "dispatch"), [(8, "deduplicated"), (64, "node_limited")])
def test_the_example_of_deepseek_v3_sends_tokens_to_four_nodes_where_there_are_more(ep, dispatch):
    given = {"EP": str(ep)}
    s = import_megatron(DEEPSEEK_V3, node="dgx-h100", nodes=128, variables=given).scenario
    assert (s.plan.ep, s.plan.etp, s.plan.expert_dispatch) == (ep, 1, dispatch)


@pytest.mark.parametrize(
    ("flags", "fusion"),
    [
        ("", "none"),
        ("--moe-permute-fusion", "permutation"),
        ("--moe-permute-fusion --moe-router-fusion", "all"),
        ("--moe-router-fusion", "none"),
    ],
)
def test_fused_routing_is_read(flags, fusion):
    s = import_megatron(MIXTRAL, node="dgx-h100", nodes=4, flags=flags.split()).scenario
    assert s.run.expert_fusion == fusion


def test_what_moves_times_and_is_not_modelled_is_listed_with_what_is_taken():
    listed = import_megatron(LLAMA3_8B, node="dgx-h100").not_modelled
    assert [sentence.partition(":")[0] for sentence in listed] == [
        "--cross-entropy-loss-fusion", "--overlap-param-gather", "--empty-unused-memory-level 1",
    ]  # fmt: skip


def test_the_branch_of_other_data_is_taken_when_its_variable_says_so():
    options = {"variables": {"TOKENIZER_ARG": "llama-3", "DATA_ARG": "x"}, "node": "dgx-h100"}
    with pytest.raises(DescriptionError, match="vocabulary of HuggingFaceTokenizer is not known"):
        import_megatron(LLAMA3_8B, **options)
    more = ("--vocab-size", "128256")
    assert import_megatron(LLAMA3_8B, flags=more, **options).scenario.model.vocab_size == 128256


# --- forms of text --------------------------------------------------------------------------------


def test_a_part_of_a_script_without_a_launch_is_read():
    imported = import_megatron(f'GPT_ARGS="{GPT}"\nMORE=(--bf16)', nodes=1)
    assert imported.scenario.run.precision == "bf16"


def test_flags_behind_a_missing_backslash_are_read_with_a_note():
    imported = import_megatron(f"torchrun pretrain_gpt.py {GPT}\n  --bf16 --swiglu", nodes=1)
    assert imported.scenario.model.gated_mlp
    assert any("--bf16 begins a command of its own" in note for note in imported.notes)


def test_settings_of_a_file_are_read_as_flags():
    text = """
        ENV_VARS:
          CUDA_DEVICE_MAX_CONNECTIONS: 1
        MODEL_ARGS:
          # sizes
          --num-layers: 4
          --hidden-size: 64
          --num-attention-heads: 4
          --seq-length: 32
          --max-position-embeddings: 32
          --vocab-size: 1000  # tokens
          --micro-batch-size: 1
          --swiglu: true
          --disable-bias-linear: false
          --recompute-granularity: null
        METRICS:
          - "lm loss"
        """
    model = import_megatron(text, nodes=1).scenario.model
    assert (model.num_hidden_layers, model.gated_mlp, model.mlp_bias) == (4, True, True)


def test_settings_may_be_spelt_as_megatrons_own_attributes():
    keys = GPT.replace("--", "\n").replace("-", "_").strip().splitlines()
    text = "\n".join(re.sub(r" ", ": ", key.strip(), count=1) for key in keys)
    text += "\nadd_bias_linear: False\noverlap_p2p_comm: True\nfp8: null\nlr: 1.e-4\n"
    assert not import_megatron(text, nodes=1).scenario.model.mlp_bias


def test_slurm_says_how_many_nodes_where_the_launcher_does_not():
    text = f"#SBATCH --nodes=4\n#SBATCH --gpus-per-node=8\nsrun python pretrain_gpt.py {GPT}"
    assert import_megatron(text, node="dgx-h100").scenario.cluster.num_nodes == 4


def test_slurm_says_it_where_the_launcher_asks_its_environment():
    text = (
        "#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=1\n#SBATCH --gres=gpu:a100:4\n"
        f"srun torchrun --nnodes $SLURM_NNODES --nproc_per_node $(count) pretrain_gpt.py {GPT}"
    )
    cluster = import_megatron(text, node="dgx-h100").scenario.cluster
    assert (cluster.num_nodes, cluster.devices_per_node) == (4, 4)


def test_the_file_says_where_the_number_of_nodes_is_from():
    text = f"torchrun --nnodes 2 pretrain_gpt.py {GPT}"
    assert "num_nodes = 2                             # --nnodes 2" in import_megatron(text).toml()
    assert "num_nodes = 4\n" in import_megatron(text, nodes=4).toml()


def test_sruns_own_flags_are_a_launchers():
    text = f"srun --nodes=2 --ntasks-per-node=8 python pretrain_gpt.py {GPT}"
    assert import_megatron(text, node="dgx-h100").scenario.cluster.world_size == 16


@pytest.mark.parametrize(
    "launch", ["python -m pretrain_gpt", "torchrun --nnodes 1 -m train.gpt", "megatron pretrain"]
)
def test_a_program_may_be_a_module_or_a_command(launch):
    imported = import_megatron(f"{launch} {GPT} --bf16", nodes=1)
    assert imported.scenario.run.precision == "bf16"


def test_of_several_programs_the_one_with_most_flags_is_read():
    text = f"python tools/prepare.py --input x\ntorchrun pretrain_gpt.py {GPT} --bf16"
    imported = import_megatron(text, nodes=1)
    assert imported.scenario.run.precision == "bf16"
    assert any("of 2 programs" in note for note in imported.notes)


@pytest.mark.parametrize("text", ["", "hello", "key: value", "torchrun x.py --lr 1", "\x00"])
def test_a_text_without_a_model_is_refused(text):
    with pytest.raises(DescriptionError, match="there is no --num-layers in it"):
        import_megatron(text)


def test_other_models_than_decoders_are_refused():
    with pytest.raises(DescriptionError, match=r"pretrain_bert\.py: what is read are decoders"):
        import_megatron(f"torchrun pretrain_bert.py {GPT}", nodes=1)


# --- the model ------------------------------------------------------------------------------------


def test_defaults_are_megatrons():
    model = scenario().model
    assert (model.intermediate_size, model.head_dim, model.num_key_value_heads) == (256, 16, 4)
    assert (model.norm, model.position, model.activation) == ("layer_norm", "learned", "gelu")
    assert (model.tie_word_embeddings, model.attention_bias, model.mlp_bias) == (True,) * 3
    assert (model.hidden_dropout, model.attention_dropout) == (0.1, 0.1)
    assert scenario().run.precision == "fp32"
    assert scenario().run.clip_grad


@pytest.mark.parametrize(("hidden", "width"), [(4096, 10880), (8192, 21824), (64, 128)])
def test_a_gated_mlp_of_no_stated_width_is_two_thirds_in_steps_of_64(hidden, width):
    # int(4 x 4096 x 2/3) = 10922, to 170 x 64
    got = scenario(f"--swiglu --hidden-size {hidden}").model
    assert (got.intermediate_size, got.activation, got.gated_mlp) == (width, "silu", True)


@pytest.mark.parametrize(
    ("flags", "vocabulary"),
    [
        ("", 1024),  # 1000 to 128
        ("--tensor-model-parallel-size 4", 1024),  # to 512
        ("--tensor-model-parallel-size 4 --make-vocab-size-divisible-by 100", 1200),
        ("--vocab-extra-ids 25", 1152),  # 1025 to 128
        ("--padded-vocab-size 1001", 1001),
        ("--tokenizer-type NullTokenizer --vocab-size 1024", 1152),  # one more token
    ],
)
def test_the_vocabulary_is_padded(flags, vocabulary):
    assert scenario(flags).model.vocab_size == vocabulary


@pytest.mark.parametrize(
    ("flags", "biases"),
    [
        ("", (True, None, True)),
        ("--disable-bias-linear", (False, None, False)),
        ("--disable-bias-linear --add-qkv-bias", (True, False, False)),
    ],
)
def test_biases_follow_their_flags(flags, biases):
    model = scenario(flags).model
    assert (model.attention_bias, model.output_bias, model.mlp_bias) == biases


def test_groups_of_queries_need_their_own_switch():
    imported = read("--num-query-groups 2")
    assert imported.scenario.model.num_key_value_heads == 4
    assert any("--group-query-attention" in sentence for sentence in imported.not_modelled)
    grouped = scenario("--group-query-attention --num-query-groups 2")
    assert grouped.model.num_key_value_heads == 2


# --- the plan -------------------------------------------------------------------------------------


def plan_of(flags, **options):
    return scenario(flags, **options).plan


def test_layers_of_a_virtual_stage_make_chunks():
    # 8 layers over 2 ranks are 4 each; 2 a stage make 2 chunks
    plan = plan_of(
        "--num-layers 8 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2"
    )
    assert (plan.schedule, plan.chunks, plan.p2p_overlap) == ("Interleaved1F1B", 2, True)


def test_virtual_stages_without_overlap_block():
    flags = (
        "--num-layers 8 --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2"
    )
    assert not plan_of(f"{flags} --no-overlap-p2p-communication").p2p_overlap


def test_sequence_parallelism_needs_tensor_parallelism():
    assert plan_of("--sequence-parallel").sequence_parallel is False
    assert plan_of("--sequence-parallel --tensor-model-parallel-size 2").sequence_parallel


@pytest.mark.parametrize(
    ("flags", "overlap"),
    [("", "grads"), ("--sequence-parallel", "grads"),
     ("--sequence-parallel --tp-comm-overlap", "all")],
)  # fmt: skip
def test_backward_hides_collectives_and_userbuffers_all(flags, overlap):
    assert plan_of(f"{flags} --tensor-model-parallel-size 2").tp_overlap == overlap


SHARDS = "--use-megatron-fsdp --data-parallel-sharding-strategy "


@pytest.mark.parametrize(
    ("flags", "zero"),
    [
        ("", 0),
        ("--use-distributed-optimizer", 1),
        ("--use-torch-fsdp2 --no-gradient-accumulation-fusion", 3),
        (f"{SHARDS}optim_grads_params", 3),
        (f"{SHARDS}optim_grads", 2),
        ("--use-megatron-fsdp", 0),
    ],
)
def test_the_stage_of_zero_follows_the_optimizer_and_fsdp(flags, zero):
    assert plan_of(flags).zero == zero


@pytest.mark.parametrize(
    ("flags", "library"),
    [
        ("--use-torch-fsdp2 --no-gradient-accumulation-fusion", "fsdp2"),
        (f"{SHARDS}optim_grads_params", "megatron_fsdp"),
        (f"{SHARDS}optim_grads", "fsdp2"),
    ],
)
def test_who_shards_weights_follows_the_flag_of_fsdp(flags, library):
    assert plan_of(flags).sharding_library == library


def test_instances_of_the_optimizer_divide_the_ranks():
    flags = "--use-distributed-optimizer --num-distributed-optimizer-instances 2"
    assert plan_of(flags).dp_shard == 4


@pytest.mark.parametrize(
    ("flags", "size"),
    [
        ("--bf16", 40e6 * 4),  # fp32 gradients, as bf16 has them
        ("--bf16 --grad-reduce-in-bf16", 40e6 * 2),
        ("--bf16 --ddp-bucket-size 1000000", 4e6),
    ],
)
def test_buckets_are_counted_in_parameters(flags, size):
    assert plan_of(f"--overlap-grad-reduce {flags}").bucket_size == size


def test_buckets_grow_with_many_ranks():
    # max(40 million, 1 million x 64 ranks) x 4 bytes
    plan = plan_of("--overlap-grad-reduce --bf16", nodes=8)
    assert plan.bucket_size == 64e6 * 4


@pytest.mark.parametrize(
    ("flags", "recompute", "layers"),
    [
        ("", "none", None),
        ("--recompute-activations", "selective", None),
        ("--recompute-granularity selective", "selective", None),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
         "full", None),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 3",
         "full", 3),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 4",
         "full", None),
        ("--activations-checkpoint-method uniform", "full", None),
    ],
)  # fmt: skip
def test_recomputation_is_of_as_many_layers_as_are_asked_for(flags, recompute, layers):
    plan = plan_of(flags)
    assert (plan.recompute, plan.recompute_layers) == (recompute, layers)


def test_ranks_are_in_megatrons_order_or_with_data_parallelism_outermost():
    assert plan_of("").order[:2] == ("pp", "dp")
    assert plan_of("--use-tp-pp-dp-mapping").order[:2] == ("dp", "pp")
    assert plan_of("").order[-1] == "tp"


EXPERTS = (
    "--num-experts 8 --sequence-parallel --moe-token-dispatcher-type alltoall --swiglu "
    "--untie-embeddings-and-output-weights "
)


def test_experts_are_divided_as_the_rest_of_a_layer_where_nothing_is_said():
    # --expert-tensor-parallel-size is --tensor-model-parallel-size by default
    assert plan_of(f"{EXPERTS} --tensor-model-parallel-size 2").etp == 2
    flags = f"{EXPERTS} --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1"
    assert plan_of(flags).etp == 1


def test_the_default_dispatcher_gathers():
    flags = EXPERTS.replace("--moe-token-dispatcher-type alltoall", "")
    plan = read(f"{flags} --expert-model-parallel-size 2").scenario.plan
    assert plan.expert_dispatch == "all_gather"


@pytest.mark.parametrize(
    ("flags", "dispatch"),
    [
        ("", "all_to_all"),
        ("--moe-token-dispatcher-type flex", "deduplicated"),
        ("--moe-token-dispatcher-type flex --moe-router-num-groups 4 --moe-router-group-topk 2 "
         "--num-experts 16 --expert-model-parallel-size 16", "node_limited"),
    ],
)  # fmt: skip
def test_deepep_sends_a_token_once(flags, dispatch):
    plan = plan_of(f"{EXPERTS} --expert-model-parallel-size 4 {flags}", nodes=2)
    assert plan.expert_dispatch == dispatch


@pytest.mark.parametrize(
    ("pattern", "dense", "every"),
    [("1", 0, 1), ("2", 0, 2), ("[0]*1+[1]*3", 1, 1), ("([0]+[1]*3)", 1, 1), ("[1,0,1,0]", 0, 2),
     ("[1,0]*2", 0, 2)],
)  # fmt: skip
def test_which_layers_have_experts_is_read_off_a_pattern(pattern, dense, every):
    text = f"torchrun pretrain_gpt.py {GPT} {EXPERTS} --moe-layer-freq '{pattern}'"
    model = import_megatron(text, nodes=1).scenario.model
    assert (model.first_k_dense_replace, model.moe_layer_freq) == (dense, every)


@pytest.mark.parametrize(
    ("pattern", "sentence"),
    [
        ("[1]*3", "--moe-layer-freq: it is for 3 layers, not 4"),
        ("[1,1,0,1]", "--moe-layer-freq '[1,1,0,1]': modelled are dense layers first, or experts "
         "in every nth"),
        ("often", "--moe-layer-freq: 'often' is no number and no list as [0]*3+[1]*58"),
    ],
)  # fmt: skip
def test_another_pattern_is_refused(pattern, sentence):
    assert sentence in problems(f"{EXPERTS} --moe-layer-freq {pattern}")


@pytest.mark.parametrize(
    ("modules", "recompute", "parts"),
    [("core_attn", "selective", None), ("layernorm moe_act", "light", None),
     ("layernorm", "light", ("layernorm",))],
)  # fmt: skip
def test_modules_that_are_computed_again_are_the_core_or_what_is_cheap(modules, recompute, parts):
    imported = read(f"--recompute-granularity selective --recompute-modules {modules}")
    plan = imported.scenario.plan
    assert (plan.recompute, plan.recompute_modules) == (recompute, parts)
    assert not imported.not_modelled


@pytest.mark.parametrize(("flag", "layers"), [(3, 3), (4, None), (9, None)])
def test_so_many_first_layers_go_to_the_host(flag, layers):
    plan = plan_of(f"--cpu-offloading-num-layers {flag}")
    assert (plan.offload_activations, plan.offload_layers) == (True, layers)


def test_moments_in_bf16_are_both():
    flags = "--bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16"
    assert scenario(f"{flags} --exp-avg-sq-dtype bf16").run.optimizer == "adamw_bf16"
    assert scenario(flags).run.optimizer == "adamw"


def test_rounds_of_the_interleaved_schedule_are_as_many_as_ranks_or_as_said():
    flags = (
        "--num-layers 8 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
    )
    assert plan_of(flags).microbatch_group is None  # 64 / 4 = 16 microbatches in rounds of 2
    said = f"{flags} --microbatch-group-size-per-virtual-pipeline-stage 4"
    assert plan_of(said).microbatch_group == 4


def test_a_layout_is_read_without_the_backslashes_of_a_shell():
    flags = "--num-layers 6 --pipeline-model-parallel-size 2"
    layout = r"'Et\|\(tt\|\)*2tL'"
    plan = plan_of(f"{flags} --pipeline-model-parallel-layout {layout}")
    assert (plan.layout, plan.chunks) == ("Et|(tt|)*2tL", 2)


# --- the run --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "precision", "gradients"),
    [
        ("", "fp32", None),
        ("--bf16", "bf16", "fp32"),
        ("--bf16 --grad-reduce-in-bf16", "bf16", None),
        ("--fp16", "fp16", None),
        ("--fp16 --accumulate-allreduce-grads-in-fp32", "fp16", "fp32"),
        ("--bf16 --fp8-format hybrid", "fp8", "fp32"),
    ],
)
def test_gradients_are_fp32_where_megatron_keeps_them_so(flags, precision, gradients):
    run = scenario(flags).run
    assert (run.precision, run.gradient_dtype) == (precision, gradients)


@pytest.mark.parametrize(
    ("flags", "attention"),
    [
        ("", "flash"),
        ("--attention-backend unfused", "unfused"),
        ("--transformer-impl local", "unfused"),
        ("--transformer-impl local --use-flash-attn", "flash"),
    ],
)
def test_attention_is_fused_unless_layers_are_local(flags, attention):
    assert scenario(flags).run.attention == attention


@pytest.mark.parametrize(
    ("flags", "optimizer"),
    [("", "adamw"), ("--optimizer sgd", "momentum"), ("--optimizer sgd --sgd-momentum 0", "sgd"),
     ("--optimizer muon", "muon")],
)  # fmt: skip
def test_adam_decouples_its_decay_and_sgd_has_a_momentum(flags, optimizer):
    assert scenario(flags).run.optimizer == optimizer


def test_the_batch_is_a_microbatch_of_each_rank_where_none_is_said():
    text = GPT.replace("--global-batch-size 64", "").replace("micro-batch-size 1",
                                                             "micro-batch-size 3")  # fmt: skip
    assert import_megatron(text, node="dgx-h100", nodes=2).scenario.run.global_batch_size == 48


def test_cuda_graphs_keep_the_host_out_of_the_way():
    assert scenario("--cuda-graph-impl local").cluster.node.host_launch == 0


# --- what is refused, and how it is said ----------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--hidden-size 6x", "--hidden-size: '6x' is not a number"),
        ("--hidden-size 1.5", "--hidden-size: '1.5' is not a whole number of at least 0"),
        ("--num-layers -4", "--num-layers: '-4' is not a whole number of at least 0"),
        ("--hidden-size 1e400", "--hidden-size: '1e400' is more than any run has"),
        ("--hidden-size nan", "--hidden-size: 'nan' is more than any run has"),
        ("--hidden-size", "--hidden-size: takes one value, not 0"),
        ("--hidden-size 1 2", "--hidden-size: takes one value, not 2"),
        ("--bf16 --fp16", "--fp16: it cannot be had together with --bf16"),
        ("--swiglu --squared-relu", "--squared-relu: it cannot be had together with --swiglu"),
        ("--position-embedding-type none",
         "--position-embedding-type none: modelled are learned_absolute and rope positions"),
        ("--fp4-format e2m1", "--fp4-format e2m1: arithmetic in fp4 is not modelled"),
        ("--window-size 8", "--window-size: '8' is not two numbers (back,ahead)"),
        ("--recompute-granularity full",
         "--recompute-method: Megatron-LM's full recomputation needs it: uniform or block"),
        ("--expert-model-parallel-size 2", "--expert-model-parallel-size: 2 needs --num-experts"),
        ("--tp-comm-overlap --tensor-model-parallel-size 2",
         "--tp-comm-overlap: Megatron-LM has it with --sequence-parallel only"),
        ("--tensor-model-parallel-size 0", "--tensor-model-parallel-size: it must be at least 1"),
        ("--spec local --batch-size 4",
         "--batch-size 4: Megatron-LM refuses it: write --micro-batch-size"),
    ],
)  # fmt: skip
def test_a_wrong_flag_is_refused_in_one_sentence(flags, sentence):
    assert sentence in problems(flags)


def test_all_wrong_flags_are_reported_at_once():
    found = problems("--hidden-size x --num-attention-heads y --micro-batch-size 1.5")
    assert len(found) >= 2


def test_a_contradiction_of_the_scenario_is_reported_as_one():
    found = problems("--num-attention-heads 4 --tensor-model-parallel-size 8")
    assert any("plan.tp 8 does not divide num_attention_heads 4" in p for p in found)


def test_a_value_that_only_a_run_would_tell_is_asked_for_by_its_variable():
    text = f"TP=$(detect)\ntorchrun pretrain_gpt.py {GPT} --tensor-model-parallel-size $TP"
    with pytest.raises(DescriptionError, match=r"only a run would tell through \$TP; say --var TP"):
        import_megatron(text, nodes=1)
    given = import_megatron(text, nodes=1, variables={"TP": "2"})
    assert given.scenario.plan.tp == 2


def test_a_value_of_an_unset_variable_is_asked_for():
    text = f"torchrun pretrain_gpt.py {GPT} --tensor-model-parallel-size $TP --bf16"
    with pytest.raises(DescriptionError, match="not set are TP: say --var TP=VALUE"):
        import_megatron(text, nodes=1)


@pytest.mark.parametrize(
    "flags",
    [
        "--pipeline-model-parallel-size 1000000000",
        "--tensor-model-parallel-size 7 --pipeline-model-parallel-size 1000003",
        "--pipeline-model-parallel-layout t*999999999999",
        "--pipeline-model-parallel-layout ((((",
        "--num-layers 1000000000000 --pipeline-model-parallel-size 8 "
        "--num-virtual-stages-per-pipeline-rank 100000000",
        "--num-experts 8 --moe-layer-freq [1]*9999*9999",
        "--window-size 99999999999999999999,0",
        "--nnodes 99999999999999999999",
    ],
)
def test_absurd_sizes_are_refused_at_once(flags):
    with pytest.raises(DescriptionError):
        import_megatron(f"{GPT} {flags}", node="dgx-h100")


def test_brackets_nested_too_deeply_are_refused():
    with pytest.raises(DescriptionError, match="nests brackets too deeply"):
        import_megatron("x=" + "${a:-$(" * 20_000)


def test_how_many_nodes_must_be_said_somewhere():
    with pytest.raises(DescriptionError, match="how many nodes there are is not said"):
        import_megatron(GPT)


def test_an_unknown_flag_is_listed_with_the_one_that_is_near():
    assert read("--tensor-model-paralel-size 2").unknown == (
        "--tensor-model-paralel-size, did you mean 'tensor-model-parallel-size'?",
    )


def test_every_flag_that_is_given_is_in_the_account():
    flags = (
        "--bf16 --lr 1e-4 --rampup-batch-size 1 1 1 --frobnicate --moe-token-dispatcher-type flex"
    )
    imported = read(flags)
    account = imported.report()
    for flag in re.findall(r"--[a-z-]+", f"{GPT} {flags}"):
        assert flag in account, flag


def test_a_flag_is_in_one_table_only():
    tables = [FLAGS, NOT_MODELLED, REFUSED, WITHOUT_EFFECT]
    names = [name for table in tables for name in table]
    assert len(names) == len(set(names))


def test_what_a_flag_becomes_are_keys_that_there_are():
    known = {"plan": Plan, "run": Run}
    for name, flag in FLAGS.items():
        for section, key in re.findall(r"(plan|run)\.(\w+)", flag.becomes):
            fields = {field.name for field in dataclasses.fields(known[section])}
            assert key in fields, f"--{name}: {section}.{key}"


# --- gradient buffers -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "passes"),
    [
        ("--bf16", ("clear", "check", "scale", "copy")),
        ("--bf16 --no-check-for-nan-in-loss-and-grad", ("clear", "scale", "copy")),
        ("--bf16 --ddp-average-in-collective", ("clear", "check", "copy")),
        ("--bf16 --calculate-per-token-loss", ("clear", "check", "divide", "copy")),
        ("--bf16 --use-precision-aware-optimizer", ("clear", "check", "scale")),
        ("--DDP-impl torch", ()),
        ("--bf16 --use-torch-fsdp2", ()),
    ],
)
def test_flags_say_what_passes_over_gradient_buffers_there_are(more, passes):
    assert scenario(more).run.gradient_passes == passes


@pytest.mark.parametrize(("impl", "fused"), [("te", True), ("native", False)])
def test_the_loss_of_transformer_engine_is_told_from_megatrons(impl, fused):
    read_ = read(f"--bf16 --cross-entropy-loss-fusion --cross-entropy-fusion-impl {impl}")
    assert read_.scenario.run.fused_loss is fused
    assert any("cross-entropy-loss-fusion" in line for line in read_.not_modelled) is not fused
