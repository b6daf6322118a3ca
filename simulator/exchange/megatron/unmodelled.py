"""Megatron-LM's flags that are not mapped: why each is refused, listed, or without effect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Unmapped(NamedTuple):
    """A flag that asks for what a scenario cannot say."""

    why: str
    neutral: tuple[str, ...] = ()
    """Values that ask for nothing."""


_FUSED = "element-wise kernels are counted as Megatron-LM fuses them by default"
_PARTS = "the overlap of tensor-parallel collectives is taken as a whole"
_OTHER = "decoders alone are read: GPT, Llama, Mixtral, DeepSeek and their like"
_T5 = f"{_OTHER}; a T5 is described by its config.json"
_STATES = "master weights are in fp32"

REFUSED: Mapping[str, Unmapped] = {
    "perform-rl-step": Unmapped("reinforcement learning is not modelled"),
    "skip-train": Unmapped("nothing would be trained"),
    "retro-add-retriever": Unmapped(_OTHER),
    "vision-pretraining": Unmapped(_OTHER),
    "is-hybrid-model": Unmapped("state-space layers are not modelled"),
    "hybrid-override-pattern": Unmapped("state-space layers are not modelled"),
    "hybrid-attention-ratio": Unmapped("state-space layers are not modelled", ("0", "0.0")),
    "hybrid-mlp-ratio": Unmapped("state-space layers are not modelled", ("0", "0.0")),
    "spec": Unmapped("layers of a module of one's own are not known", ("local",)),
    "heterogeneous-layers-config-path": Unmapped("layers that differ are not modelled"),
    "heterogeneous-layers-config-encoded-json": Unmapped("layers that differ are not modelled"),
    "window-attn-skip-freq": Unmapped("layers that differ are not modelled"),
    "yaml-cfg": Unmapped("its settings are in that file: import it instead"),
    "fp4-format": Unmapped("arithmetic in fp4 is not modelled"),
    "hierarchical-context-parallel-sizes": Unmapped("context parallelism in levels is not built"),
    "encoder-tensor-model-parallel-size": Unmapped(_T5, ("0",)),
    "encoder-pipeline-model-parallel-size": Unmapped(_T5, ("0",)),
    "pipeline-model-parallel-split-rank": Unmapped(_T5),
    "decoder-num-layers": Unmapped(_T5),
    "batch-size": Unmapped("Megatron-LM refuses it: write --micro-batch-size"),
    "model-parallel-size": Unmapped("Megatron-LM refuses it: write --tensor-model-parallel-size"),
}
"""What would make another run of it altogether."""

NOT_MODELLED: Mapping[str, Unmapped] = {
    "rampup-batch-size": Unmapped("the step has the full batch"),
    "overlap-param-gather": Unmapped("updated weights are gathered after the update, exposed"),
    "overlap-param-gather-with-optimizer-step": Unmapped(
        "updated weights are gathered after the update, exposed"
    ),
    "no-align-grad-reduce": Unmapped("each stage reduces its gradients as they are ready"),
    "no-align-param-gather": Unmapped("weights are gathered after the update"),
    "ddp-num-buckets": Unmapped("buckets are of equal size: write --ddp-bucket-size"),
    "ddp-reduce-scatter-with-fp32-accumulation": Unmapped("sums are NCCL's reduce-scatters"),
    "suggested-communication-unit-size": Unmapped("weights are gathered a block at a time"),
    "enable-full-sharding-in-hsdp": Unmapped("optimizer states have the shards of the weights"),
    "overlap-p2p-communication-warmup-flush": Unmapped("messages of one kind alike overlap or not"),
    "use-ring-exchange-p2p": Unmapped("messages are sends and receives"),
    "pipeline-model-parallel-comm-backend": Unmapped("messages are NCCL's", ("nccl",)),
    "distributed-backend": Unmapped("collectives are NCCL's", ("nccl",)),
    "use-nccl-ub": Unmapped("registered buffers change no rate"),
    "use-sharp": Unmapped("sums in InfiniBand switches are not built"),
    "defer-embedding-wgrad-compute": Unmapped("the head's weight gradient is made in its backward"),
    "delay-wgrad-compute": Unmapped("weight gradients are made in their backward"),
    "overlap-moe-expert-parallel-comm": Unmapped("dispatch and combine are exposed"),
    "tp-comm-overlap-rs-dgrad": Unmapped(_PARTS),
    "disable-tp-comm-overlap-ag": Unmapped(_PARTS),
    "disable-tp-comm-overlap-rs": Unmapped(_PARTS),
    "disable-tp-comm-bulk-dgrad": Unmapped(_PARTS),
    "disable-tp-comm-bulk-wgrad": Unmapped(_PARTS),
    "disable-tp-comm-split-ag": Unmapped(_PARTS),
    "disable-tp-comm-split-rs": Unmapped(_PARTS),
    "no-masked-softmax-fusion": Unmapped(_FUSED),
    "no-bias-gelu-fusion": Unmapped(_FUSED),
    "no-bias-swiglu-fusion": Unmapped(_FUSED),
    "no-bias-dropout-fusion": Unmapped(_FUSED),
    "no-rope-fusion": Unmapped(_FUSED),
    "no-persist-layer-norm": Unmapped(_FUSED),
    "use-te-activation-func": Unmapped(_FUSED),
    "fp32-residual-connection": Unmapped("the residual stream has the run's precision"),
    "fp16-lm-cross-entropy": Unmapped("the loss is in fp32"),
    "no-fp8-wgrad": Unmapped("weight gradients are made in fp8"),
    "first-last-layers-bf16": Unmapped("all layers are in fp8"),
    "keep-fp8-transpose-cache": Unmapped("casts are of a step each"),
    "main-params-dtype": Unmapped(_STATES, ("fp32",)),
    "muon-num-ns-steps": Unmapped("Newton-Schulz takes 5 rounds", ("5",)),
    "muon-tp-mode": Unmapped("each rank orthogonalises its part", ("blockwise",)),
    "overlap-cpu-optimizer-d2h-h2d": Unmapped("copies and update on the host are exposed"),
    "distribute-saved-activations": Unmapped("each rank of a stage keeps the whole input"),
    "softmax-type": Unmapped("the softmax has no offset", ("vanilla",)),
    "no-rope-freq": Unmapped("all layers have rotary embeddings"),
    "qk-l2-norm": Unmapped("queries and keys are not normalised"),
    "reset-attention-mask": Unmapped("tokens attend over the whole sequence"),
    "deterministic-mode": Unmapped("kernels are the fastest"),
    "empty-unused-memory-level": Unmapped("the allocator keeps its cache", ("0",)),
    "log-params-norm": Unmapped("the pass over parameters is not counted"),
    "log-num-zeros-in-grad": Unmapped("the pass over gradients is not counted"),
    "moe-shared-expert-overlap": Unmapped("the shared expert runs before the others"),
    "moe-layer-recompute": Unmapped("experts keep what they need"),
    "moe-router-dtype": Unmapped("the router has the run's precision"),
    "moe-router-padding-for-fp8": Unmapped("rows of experts are filled up by copying them"),
    "no-scatter-gather-tensors-in-pipeline": Unmapped(
        "Megatron core sends whole tensors anyhow, without sequence parallelism"
    ),
}
"""What moves times or bytes in Megatron-LM, and what is taken instead."""

_GROUPS = {
    "data": """
        data-path split train-data-path valid-data-path test-data-path data-args-path
        per-split-data-args-path data-cache-path no-mmap-bin-files mock-data decoder-seq-length
        retriever-seq-length sample-rate mask-prob short-seq-prob num-workers reset-position-ids
        eod-mask-loss no-create-attention-mask-in-dataloader num-dataset-builder-threads
        object-storage-cache-path mid-level-dataset-surplus allow-ambiguous-pad-tokens
        dataloader-type data-impl mmap-warmup iterations-to-skip result-rejected-tracker-filename
        no-data-sharding sft sft-tokenizer-prompt-format train-iters train-samples
        exit-interval exit-duration-in-mins exit-signal-handler decrease-batch-size-if-needed
        full-validation multiple-validation-sets eval-iters eval-interval test-mode mmap-bin-files
        create-attention-mask-in-dataloader data-sharding""",
    "tokenizer": """
        vocab-file merge-file tokenizer-metadata tiktoken-pattern tiktoken-num-special-tokens
        tiktoken-special-tokens legacy-tokenizer trust-remote-code
        tokenizer-hf-use-fast tokenizer-hf-include-special-tokens""",
    "logging": """
        log-throughput log-progress timing-log-level log-energy no-barrier-with-level-1-timing
        barrier-with-l1-time timing-log-option tensorboard-log-interval tensorboard-queue-size
        log-timers-to-tensorboard no-log-loss-scale-to-tensorboard log-loss-scale-to-tensorboard
        no-log-learnig-rate-to-tensorboard no-log-learning-rate-to-tensorboard
        log-validation-ppl-to-tensorboard log-memory-to-tensorboard log-world-size-to-tensorboard
        wandb-project wandb-entity wandb-exp-name wandb-save-dir logging-level log-interval
        tensorboard-dir log-straggler disable-straggler-on-startup straggler-ctrlr-port
        straggler-minmax-count run-workload-inspector-server no-one-logger enable-one-logger
        one-logger-project one-logger-run-name one-logger-async app-tag-run-name
        app-tag-run-version config-logger-dir moe-per-layer-logging profile profile-step-start
        profile-step-end use-pytorch-profiler profile-ranks record-memory-history
        memory-snapshot-path log-batch-size-to-tensorboard timers log-loss-scale-to-wandb
        logging-rank log-learning-rate-to-tensorboard""",
    "checkpoints": """
        save save-interval save-retain-interval no-save-optim no-save-rng load no-load-optim
        load-main-params-from-ckpt no-load-rng no-strict-fsdp-dtensor-load
        non-persistent-save-interval non-persistent-ckpt-type non-persistent-global-ckpt-dir
        non-persistent-local-ckpt-dir non-persistent-local-ckpt-algo finetune
        pretrained-checkpoint ckpt-step no-initialization use-checkpoint-args
        use-mp-args-from-checkpoint-args no-use-tokenizer-model-from-checkpoint-args
        exit-on-missing-checkpoint use-dist-ckpt use-persistent-ckpt-worker
        auto-detect-ckpt-format dist-ckpt-format ckpt-format ckpt-convert-format
        ckpt-convert-save ckpt-convert-update-legacy-dist-opt-format ckpt-fully-parallel-save
        no-ckpt-fully-parallel-save async-save ckpt-fully-parallel-load
        ckpt-assume-constant-structure dist-ckpt-strictness dist-ckpt-save-pre-mcore-014
        dist-ckpt-optim-fully-reshardable distrib-optim-fully-reshardable-mem-efficient
        replication replication-jump replication-factor moe-use-upcycling
        moe-upcycling-granularity override-opt-param-scheduler
        use-checkpoint-opt-param-scheduler perform-initialization""",
    "learning rate and numbers that cost no time": """
        lr lr-decay-style lr-wsd-decay-style lr-decay-iters lr-decay-samples lr-wsd-decay-samples
        lr-wsd-decay-iters lr-warmup-fraction lr-warmup-iters lr-warmup-samples lr-warmup-init
        min-lr decoupled-lr decoupled-min-lr warmup weight-decay start-weight-decay
        end-weight-decay weight-decay-incr-style adam-beta1 adam-beta2 adam-eps muon-momentum
        muon-no-split-qkv muon-use-nesterov muon-scale-mode muon-fp32-matmul-prec
        muon-extra-scale-factor loss-scale initial-loss-scale min-loss-scale loss-scale-window
        hysteresis apply-query-key-layer-scaling no-query-key-layer-scaling
        attention-softmax-in-fp32 disable-bf16-reduced-precision-matmul norm-epsilon
        layernorm-epsilon apply-layernorm-1p layernorm-zero-centered-gamma
        apply-residual-connection-post-layernorm openai-gelu activation-func-clamp-value
        glu-linear-offset onnx-safe rotary-base rotary-percent rotary-interleaved
        rotary-seq-len-interpolation-factor use-rope-scaling rope-scaling-factor rope-type
        mrope-section relative-attention-num-buckets relative-attention-max-distance
        no-position-embedding add-position-embedding rotary-scaling-factor mscale mscale-all-dim
        original-max-position-embeddings beta-fast beta-slow
        mtp-loss-scaling-factor fp8-margin fp8-interval fp8-amax-history-len
        fp8-amax-compute-algo fp8-quantizer-factory check-for-spiky-loss
        check-for-large-grads no-gradient-reduce-div-fusion
        moe-router-load-balancing-type moe-aux-loss-coeff moe-z-loss-coeff moe-input-jitter-eps
        moe-router-score-function moe-router-pre-softmax
        moe-router-topk-scaling-factor moe-router-enable-expert-bias moe-router-bias-update-rate
        moe-router-force-load-balancing moe-token-drop-policy moe-apply-probs-on-input
        moe-token-dropping
        seed data-parallel-random-init init-method-std embedding-init-method-std
        init-method-xavier-uniform init-method output-layer-init-method use-cpu-initialization
        init-model-with-meta-device te-rng-tracker inference-rng-tracker
        num-layers-at-start-in-bf16 num-layers-at-end-in-bf16 fp4-recipe fp4-quantizer-factory
        fp4-param-gather fp8-wgrad""",
    "processes": """
        node-rank master-addr master-port rdzv-id rdzv-backend rdzv-endpoint rdzv-conf
        max-restarts tee log-dir redirects local-addr standalone use-env local-ranks-filter
        role monitor-interval start-method no-python run-path nnode
        local-rank distributed-timeout-minutes distributed-timeout-seconds-after-init
        lazy-mpu-init disable-gloo-process-groups nccl-communicator-config-path
        high-priority-stream-groups disable-symmetric-registration sharp-enabled-group
        manual-gc manual-gc-interval no-manual-gc-eval manual-gc-eval train-sync-interval
        inprocess-restart enable-ft-package calc-ft-timeouts adlr-autoresume
        adlr-autoresume-interval error-injection-rate error-injection-type rerun-mode
        disable-msc check-weight-hash-across-dp-replicas-interval tp-comm-bootstrap-backend
        tp-comm-overlap-cfg cuda-graph-warmup-steps cuda-graph-scope enable-experimental""",
    "no longer read by Megatron-LM, or a choice of kernels that are counted alike": """
        use-mcore-models use-legacy-models no-async-tensor-model-parallel-allreduce
        async-tensor-model-parallel-allreduce use-contiguous-buffers-in-local-ddp
        no-contiguous-buffers-in-local-ddp use-contiguous-parameters-in-local-ddp
        keep-fp8-weight-transpose-cache ddp-pad-buckets-for-high-nccl-busbw fsdp-double-buffer
        reuse-grad-buf-for-mxfp8-param-ag no-clone-scatter-output-in-embedding
        clone-scatter-output-in-embedding
        use-torch-optimizer-for-cpu-offload no-pin-cpu-grads no-pin-cpu-params
        dump-param-to-param-group-map moe-grouped-gemm moe-use-legacy-grouped-gemm
        moe-extended-tp moe-deepep-num-sms cache-mla-latents
        use-fused-weighted-squared-relu wgrad-deferral-limit standalone-embedding-stage
        delay-grad-reduce delay-param-gather bert-no-binary-head bert-binary-head
        memory-efficient-layer-norm persist-layer-norm bias-activation-fusion
        cpu-offloading cpu-offloading-weights cpu-offloading-activations batch-p2p-comm
        batch-p2p-sync deallocate-pipeline-outputs variable-seq-lengths tp-comm-split-ag
        tp-comm-atomic-ag tp-comm-split-rs tp-comm-atomic-rs tp-comm-bulk-wgrad
        tp-comm-bulk-dgrad enable-autocast loss-on-targets-only
        mamba-state-dim mamba-head-dim mamba-num-groups mamba-num-heads
        disable-mamba-mem-eff-path num-classes img-h img-w num-channels patch-dim""",
}

WITHOUT_EFFECT: Mapping[str, str] = {
    name: group for group, names in _GROUPS.items() for name in names.split()
}
"""The group of each flag that moves nothing that is simulated."""

FAMILIES: Mapping[str, str] = {
    "inference-": "inference", "rl-": "reinforcement learning", "grpo-": "reinforcement learning",
    "langrl-": "reinforcement learning", "retro-": "other models", "dino-": "other models",
    "swin-": "other models", "biencoder-": "other models", "ict-": "other models",
    "inprocess-": "processes", "kitchen-": "other models",
}  # fmt: skip
"""Groups of flags that have no effect on a step, by how their names begin."""


def group_of(name: str) -> str | None:
    """Return the group of a flag without effect, or None for any other."""
    return WITHOUT_EFFECT.get(name) or next(
        (group for start, group in FAMILIES.items() if name.startswith(start)), None
    )
