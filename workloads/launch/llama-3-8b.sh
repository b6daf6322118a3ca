#!/bin/bash
# Llama-3-8B by Megatron-LM on 8 nodes of 8 H100; TP, PP and NNODES may come from the environment.
export CUDA_DEVICE_MAX_CONNECTIONS=1

GPUS_PER_NODE=8
NNODES=${NNODES:-8}
TP=${TP:-2}
PP=${PP:-4}
CHECKPOINTS=$1
DATA=$2

LAUNCH=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NNODES
    --node_rank ${NODE_RANK:-0}
)

MODEL=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --seq-length 8192
    --max-position-embeddings 8192
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model meta-llama/Meta-Llama-3-8B
)

PARALLEL=(
    --tensor-model-parallel-size $TP
    --pipeline-model-parallel-size $PP
    --num-virtual-stages-per-pipeline-rank 2   # 8 stages of 4 layers
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)
if [ $TP -gt 1 ]; then
    PARALLEL+=(--sequence-parallel)
fi

TRAINING=(
    --micro-batch-size 1
    --global-batch-size 256
    --train-iters 100000
    --bf16
    --lr 3e-4
    --clip-grad 1.0
    --data-path $DATA
    --save $CHECKPOINTS
    --save-interval 1000
    --log-throughput
)

torchrun "${LAUNCH[@]}" pretrain_gpt.py \
    "${MODEL[@]}" \
    "${PARALLEL[@]}" \
    "${TRAINING[@]}"
