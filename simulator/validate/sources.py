"""All sources: a row of `SOURCES` each, with what it leaves unstated and what was assumed."""

from __future__ import annotations

from functools import partial

from simulator.errors import DescriptionError, suggestion
from simulator.validate import (
    convolution,
    encoder_decoder,
    megatron,
    nemo,
    schedules,
    sharded,
    zero_bubble,
)
from simulator.validate.published import Source

MESSAGES = (
    "gradients are clipped by their norm (clip-grad 1.0 is Megatron-LM's default)",
    "Megatron-LM's ranks: tp innermost, then dp, pp outermost; messages between stages block, and "
    "each tp rank sends a part where the sequence is not divided",
)

PASSES_2022 = (
    "contiguous gradient buffers (Megatron-LM's default since 2021), cleared and divided by dp "
    "once a step, and an optimizer that works on fp32 copies"
)

MEGATRON_2021 = (
    "precision: fp16, gradients summed and reduced in fp16 (Megatron-LM's default without bf16)",
    "dropout 0.1, Adam, tied embeddings, learned positions, unfused attention",
    "DGX A100 80 GB with 8 x 200 Gb/s (Selene), adapters shared by nobody",
    "no overlap of tensor-parallel collectives with products, gradients added by kernels of their "
    "own (both came after the paper)",
    *MESSAGES,
)

TITAN_LABEL = (
    "{table} {model} on {n_gpus}, float8 {float8}, async tp {async_tp}, cp {cp}, {act_ckpt}"
)

ZERO_BUBBLE_LABEL = "{model} p {stages_p} m {microbatches_m} {schedule}"

ZERO_BUBBLE = (
    "ZB-1p and ZB-2p: ordered by the paper's heuristic under p and 2p activations, of which table "
    "1's 32sbh of sb(34h + 5as) wait for W; messages posted ahead, optimizer validated afterwards",
    "1F1B and 1F1B-I (a layer a chunk): Megatron-LM's blocking messages, which the repository's "
    "examples/pretrain_zero_bubble.sh asks for",
)

ZERO_BUBBLE_MODEL = (
    *ZERO_BUBBLE,
    "models of the paper's table 3, a layer less in the first and the last stage",
    "fp16, unfused attention (table 1 counts its 5as^2b), untied embeddings, no recomputation; "
    "vocabulary 50,257 padded; dropout 0.1",
    PASSES_2022,
    *MESSAGES,
    "RoCE at 8 x 200 Gb/s a node of 8 A100 80 GB (not stated)",
)

SOURCES = (
    Source(
        name="korthikanti-step",
        title="Reducing Activation Recomputation in Large Transformer Models, table 5",
        url="https://arxiv.org/abs/2205.05198",
        file="korthikanti_seqpar_iteration.csv",
        unit="s", printed="seconds of an iteration", label="{model} dp {dp}, {variant}",
        build=megatron.korthikanti_step,
        assumed=(
            "precision: fp16 with fp32 gradients (18 bytes a parameter in the paper's figure 1)",
            "unfused attention, dropout 0.1, vocabulary 51,200, Adam, tied embeddings",
            "interleaved by 3 model chunks where the paper says m = 3",
            PASSES_2022,
            "backward's tensor-parallel collectives run beside products; gradients are reduced "
            "after the last backward, and added by the products that make them",
            *MESSAGES,
            "DGX A100 80 GB with 8 x 200 Gb/s (Selene)",
        ),
    ),
    Source(
        name="korthikanti-states",
        title="the same, weights, gradients and optimizer states of figure 1 (computed there)",
        url="https://arxiv.org/abs/2205.05198",
        file="korthikanti_memory.csv", holds=lambda row: row["param_opt_GiB"] != "",
        unit="GiB", printed="GiB of the first stage", label="{model} {mode}",
        build=megatron.korthikanti_states,
        assumed=(
            "the paper counts 18 bytes for each of 12 x layers x hidden^2 weights; here "
            "embeddings, biases and norms count too",
        ),
    ),
    Source(
        name="korthikanti-activations",
        title="the same, activations of the first stage (computed there)",
        url="https://arxiv.org/abs/2205.05198",
        file="korthikanti_memory.csv", holds=lambda row: row["activation_GiB"] != "",
        unit="GiB", printed="GiB of the first stage", label="{model} {mode}",
        build=megatron.korthikanti_activations,
        assumed=(
            "the peak over time of the simulated step, so the embedding, the head of a single "
            "stage and what backward recomputes count too; the paper counts kept activations of "
            "layers",
        ),
    ),
    Source(
        name="korthikanti-saving",
        title="the same, activations of a layer by mode (figure 7, computed there)",
        url="https://arxiv.org/abs/2205.05198",
        file="korthikanti_memory.csv",
        holds=lambda row: row["activation_pct_of_baseline"] != "",
        unit="%", printed="% of tensor parallelism alone", label="{model} {mode}",
        build=megatron.korthikanti_share,
        assumed=("what a second layer adds to the bytes kept when a forward has ended",),
    ),
    Source(
        name="sc21-table1",
        title="Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, "
        "table 1",
        url="https://arxiv.org/abs/2104.04473",
        file="megatron_sc21_table1.csv",
        unit="s", printed="TFLOP/s a GPU; seconds by its equation 3", label="{params_B}B",
        build=megatron.sc21_table1,
        assumed=(
            "microbatch sizes, layers of a virtual stage and DDP from NVIDIA/Megatron-LM, "
            "examples/sc21/run_table_1.sh; TFLOP/s are printed to three digits",
            *MEGATRON_2021,
        ),
    ),
    Source(
        name="sc21-table2",
        title="the same, table 2: ZeRO-3 against tensor and pipeline parallelism",
        url="https://arxiv.org/abs/2104.04473",
        file="megatron_sc21_table2_zero3.csv",
        unit="s", printed="TFLOP/s a GPU; seconds by its equation 3",
        label="{scheme} {params_B}B on {n_gpus}",
        build=megatron.sc21_table2,
        assumed=(
            "tp 8, no interleaving, full recomputation; ZeRO-3 without tensor parallelism",
            *MEGATRON_2021,
        ),
    ),
    Source(
        name="vtrain-multi",
        title="vTrain, measured iterations on several nodes",
        url="https://github.com/VIA-Research/vTrain",
        file="vtrain_multi_node.csv",
        unit="s", printed="milliseconds of an iteration",
        label="{params_B}B tp {tp} dp {dp} pp {pp} microbatch {micro_batch}",
        build=megatron.vtrain,
        assumed=(
            "full recomputation, 1F1B, no gradient buckets, 800 Gb/s between nodes of 8: the "
            "repository's config/validation; node type not stated: DGX A100 80 GB with 4 adapters",
            "Megatron-LM: fp16 gradients, vocabulary 50,257 padded to 128 x tp, dropout 0.1, "
            "unfused attention, backward's tensor-parallel collectives beside products",
            PASSES_2022,
            *MESSAGES,
            "the host is not stated: it issues a kernel in 10 us, as in the catalogue's node",
        ),
    ),
    Source(
        name="vtrain-single",
        title="vTrain, iterations on one node as its own program sums them from profiled layers",
        url="https://github.com/VIA-Research/vTrain",
        file="vtrain_single_node.csv", kind="calibrated",
        unit="s", printed="milliseconds of an iteration",
        label="{hidden} x {layers} tp {tp} dp {dp} pp {pp} microbatch {micro_batch} of "
        "{global_batch}",
        build=megatron.vtrain_single,
        assumed=(
            "no run was measured, though data/README.md says so: every row is, to the nanosecond, "
            "what src/predictor.py adds up from 32 profiled layers and a table of all-reduces",
            "as that program does: no recomputation (though the configs say so), gradients neither "
            "added up, unscaled nor clipped, vocabulary 50,257 not padded, collectives of tensor "
            "parallelism in line with kernels, each with the time of its table",
            "the profiler's host issues a kernel in 82 us, fitted to these rows; messages go over "
            "NVLink, where that program sends twice the activations at 200 Gb/s",
        ),
    ),
    Source(
        name="zero-bubble-replay",
        title="Zero Bubble Pipeline Parallelism, table 4, from the profiled times of table 6",
        url="https://arxiv.org/abs/2401.10241",
        file="zero_bubble_table4.csv", kind="replayed",
        unit="s", printed="samples/s a GPU",
        label=ZERO_BUBBLE_LABEL,
        build=zero_bubble.replay,
        assumed=(
            "all stages take the profiled T_F, T_B and T_W, each message T_comm; the times are "
            "those of ZB-2p runs, the optimizer step takes none",
            *ZERO_BUBBLE,
        ),
    ),
    Source(
        name="zero-bubble-step",
        title="the same, from the model's shapes",
        url="https://arxiv.org/abs/2401.10241",
        file="zero_bubble_table4.csv",
        unit="s", printed="samples/s a GPU",
        label=ZERO_BUBBLE_LABEL,
        build=zero_bubble.step,
        assumed=("schedules are ordered for predicted times, not for the profiled ones",
                 *ZERO_BUBBLE_MODEL),
    ),
    Source(
        name="zero-bubble-memory",
        title="the same, memory",
        url="https://arxiv.org/abs/2401.10241",
        file="zero_bubble_table4.csv",
        unit="GB", printed="GB, of the fullest rank",
        label=ZERO_BUBBLE_LABEL,
        build=zero_bubble.memory,
        assumed=(
            "what torch's allocator gives out is compared, in GB of 1e9",
            "schedules are ordered for the profiled times of table 6",
            *ZERO_BUBBLE_MODEL,
        ),
    ),
    Source(
        name="zero-bubble-few-step",
        title="the same, fewer microbatches than stages: table 9",
        url="https://arxiv.org/abs/2401.10241",
        file="zero_bubble_table9.csv",
        unit="s", printed="samples/s a GPU",
        label=ZERO_BUBBLE_LABEL,
        build=zero_bubble.step,
        assumed=("schedules are ordered for predicted times", *ZERO_BUBBLE_MODEL),
    ),
    Source(
        name="zero-bubble-few-memory",
        title="the same, memory",
        url="https://arxiv.org/abs/2401.10241",
        file="zero_bubble_table9.csv",
        unit="GB", printed="GB, of the fullest rank",
        label=ZERO_BUBBLE_LABEL,
        build=zero_bubble.memory,
        assumed=(
            "what torch's allocator gives out is compared, in GB of 1e9",
            "schedules are ordered for predicted times",
            *ZERO_BUBBLE_MODEL,
        ),
    ),
    Source(
        name="mosaic",
        title="MosaicML llm-foundry, MPT training benchmarks",
        url="https://github.com/mosaicml/llm-foundry",
        file="mosaic_llmfoundry_mpt.csv",
        unit="s", printed="tokens/s",
        label="{model} {seq_len} on {n_gpus} {gpu}, microbatch {micro_batch}",
        build=sharded.mosaic,
        assumed=(
            "shapes of mpt-*.yaml (they give the printed parameter counts exactly); "
            "FlashAttention in Triton, no dropout: attn_impl triton of submit_benchmarks.py",
            "gradients reduced in fp32 (Composer's mixed_precision DEFAULT; early versions had "
            "bf16 there too) or in bf16 (PURE); SHARD_GRAD_OP keeps gathered weights after the "
            "forward; two gathers at most (limit_all_gathers)",
            "H100: DGX H100 with 8 x 400 Gb/s (not stated); A100: 8 x 200 Gb/s as stated",
            "clipped gradients, and an optimizer of separate kernels (decoupled_adamw, taken for "
            "unfused AdamW), as mpt-*.yaml says",
        ),
    ),
    Source(
        name="torchtitan-step",
        title="torchtitan, Llama 3.1 on H100",
        url="https://github.com/pytorch/torchtitan",
        file="torchtitan_h100.csv",
        unit="s", printed="tokens/s a GPU", label=TITAN_LABEL,
        build=sharded.torchtitan_step,
        assumed=(
            "FlashAttention-2 (torch's); gradients reduced in fp32",
            "the limit of 500 W in place of 700 W leaves 0.70 of the clock to products and fused "
            "attention, since 700 W lie below the knee of voltage; memory is not slowed",
            "layers run as torchtitan's Llama is written (run.layer_code); torch.compile makes one "
            "kernel of a residual sum and the norm after it and finds scales of fp8 as tensors are "
            "written; without it norms and the gate are a kernel for each term",
            "runs of 2024: AdamW term by term (foreach, its default then), the loss not compiled, "
            "embedding and head held by FSDP's root; those of 2025: fused, compiled, by themselves",
            "float8: one scale a tensor, from its own values; weights gathered in bf16 and cast",
            "selective checkpointing is that by operators (llama3_8b.toml); async TP fuses gathers "
            "and scatters with products in a piece a rank, but no scatter after a sum of them",
            "a microbatch for each stage (torchtitan's default), gradients reduced once a step; "
            "two chunks a rank interleaved; layers cut as generate_split_points does",
            "context parallelism gathers K and V (its rotate method \"allgather\")",
        ),
    ),
    Source(
        name="torchtitan-memory",
        title="torchtitan, Llama 3.1 on H100, peak memory",
        url="https://github.com/pytorch/torchtitan",
        file="torchtitan_h100.csv", holds=lambda row: row["memory_GiB"] != "",
        unit="GiB", printed="GiB of the fullest GPU",
        label=TITAN_LABEL,
        build=sharded.torchtitan_memory,
        assumed=(
            "as torchtitan-step",
            "torchtitan prints what is reserved (metrics.py): what is allocated, the pool of "
            "FSDP2's gathers, what the loss leaves free, buffers of torch's pipelines for each "
            "microbatch; no holes between tensors of layers",
        ),
    ),
    Source(
        name="nemo",
        title="NVIDIA NeMo and Megatron-Bridge performance summaries",
        url="https://docs.nvidia.com/nemo/megatron-bridge/latest/performance-summary.html",
        file="nemo_performance_summary.csv",
        unit="s", printed="tokens/s a GPU",
        label="{product} {container} {system} {precision} {model} on {n_gpus}",
        build=nemo.nemo,
        together=("system", "model", "n_gpus"),
        assumed=(
            "what the authors' recipes say, of the version nearest to a row's release, each with "
            "its commit in validate/nemo_recipes.py: recomputation, layers offloaded, the "
            "precision of gradients, weights in fp8, buckets, layouts of DeepSeek-V3, CUDA graphs "
            "of a whole iteration, moments in bf16, Megatron-FSDP's shards of low-precision "
            "weights; degrees and batches are the row's",
            "recipes that differ from a row in degrees: 405B (25.11, GB300), DeepSeek-V3 (25.11, "
            "GB300), Qwen3, GPT-3; long sequences (24.03) are taken as that of 4,096 tokens",
            "what they say and is not modelled: gathers of the distributed optimizer's weights run "
            "beside nothing (overlap_param_gather), experts' exchanges are waited for "
            "(moe_a2a_overlap), CUDA graphs of parts of a layer",
            "fp8 scales by earlier steps in NeMo (its default), by a tensor's own values or those "
            "of 32 elements (MXFP8, FP8-MX) in Megatron-Bridge; attention and head in bf16",
            "attention is cuDNN's, but FlashAttention-2's in NeMo's runs of 2024, whose launcher "
            "switched cuDNN's off (NVTE_FUSED_ATTN=0), and in Automodel, which calls torch's; "
            "that launcher also kept NCCL from reducing in switches (NCCL_NVLS_ENABLE=0)",
            "DeepSeek-V3 with its further layer, as recipes have it, but in 25.11, where the "
            "summary says so",
            "tensor-parallel collectives of layers run beside products (tp_comm_overlap)",
            "GPT-3 5B and 20B of NeMo-Framework-Launcher, vocabulary padded to 128 x tp, dropout "
            "0.1; Nemotron-340B rotates all of its heads, not half",
            "context parallelism is a ring (Megatron-LM's default); Automodel gathers K and V",
            "every expert gets the same (moe_router_force_load_balancing); tokens are sent to each "
            "of theirs, exchanges exposed, also where a later recipe has HybridEP",
        ),
    ),
    Source(
        name="nemo-t5",
        title="NVIDIA NeMo Framework, T5 results",
        url="https://docs.nvidia.com/nemo-framework/user-guide/latest/llms/t5/performance.html",
        file="nemo_t5.csv",
        unit="s", printed="tokens/s", label="{model} on {n_nodes} nodes, table of {table}",
        build=encoder_decoder.nemo_t5,
        assumed=(
            "tokens are the encoder's, 512 a sample: the configuration's steps make a trillion so; "
            "the decoder's 128 are read off it",
            "shapes, tp and 220M's microbatch of NeMo-Framework-Launcher; the table of scaling has "
            "the batch of the table of training, and 3B one microbatch a rank on 20 nodes",
            "fp32 gradients all-reduced during the last backward (the distributed optimizer came "
            "later), no recomputation, unfused attention, learned positions for both stacks, "
            "dropout 0.1; backward's tensor-parallel collectives beside products",
        ),
    ),
    Source(
        name="llama3-405b",
        title="The Llama 3 Herd of Models, table 4",
        url="https://arxiv.org/abs/2407.21783",
        file="llama3_405b_table4.csv",
        unit="s", printed="TFLOP/s a GPU; seconds by the report's FLOPs of a token",
        label="{n_gpus} GPUs, cp {cp}",
        build=sharded.llama3,
        assumed=(
            "microbatch of 1, 4 chunks a rank (the paper interleaves and takes a layer from the "
            "first and the last stage, but states no number), no recomputation",
            "FSDP that keeps weights gathered after the forward; DGX H100 with 8 x 400 Gb/s; "
            "oversubscription between pods is not modelled",
            "K and V gathered over cp (its section 3.3.2), causal masks over whole sequences; dp "
            "is what tp, cp and pp leave of the GPUs: 8 where the row prints 4",
            "attention counts in full among the FLOPs, which the paper does not say; counted half "
            "the row of cp 16 would be 16 % too long",
        ),
    ),
    Source(
        name="simumax-step",
        title="SimuMax, Megatron-LM on a node of 8 B200",
        url="https://github.com/MooreThreads/SimuMax",
        file="simumax_b200_real_vs_pred.csv",
        unit="s", printed="milliseconds of an iteration", label="{case}",
        build=megatron.simumax_step,
        assumed=(
            "distributed optimizer, fp32 gradients reduced after the last backward, sequence "
            "parallelism, no recomputation, flash attention, vocabulary padded to 128 x tp: "
            "simu_tools/megatron_scripts/scripts/run_pretrain_llama3.sh and _deepseekv2.sh, whose "
            "experts are padded to a capacity of 1 and whose first layer alone is dense",
            "Transformer Engine runs backward's tensor-parallel collectives beside products",
            "Transformer Engine's fused loss (the cases' suffix _cef, docs/strategy-zh.md); "
            "gradient buffers are cleared, checked and, over several ranks, scaled once a step",
            "the device's rates are fitted to half of the source's own measurements of single "
            "kernels on this machine, configs/system/b200_bf16_ceperm.json, to no step",
            *MESSAGES,
        ),
    ),
    Source(
        name="simumax-memory",
        title="SimuMax, the same runs, torch.cuda.max_memory_allocated of the fullest rank",
        url="https://github.com/MooreThreads/SimuMax",
        file="simumax_b200_real_vs_pred.csv",
        unit="GiB", printed="GiB", label="{case}",
        build=megatron.simumax_memory,
        assumed=(
            "as simumax-step",
            "Transformer Engine's linear layers keep a tensor for each shape of weight "
            "(get_dummy_wgrad) and a cuBLAS workspace beside torch's",
        ),
    ),
    Source(
        name="nvidia-resnet50",
        title="NVIDIA Deep Learning Examples, ResNet50 v1.5 for PyTorch (21.03)",
        url="https://github.com/NVIDIA/DeepLearningExamples",
        file="nvidia_resnet50.csv",
        unit="s", printed="images/s", label="{system} {n_gpus} GPUs, {precision}",
        build=convolution.resnet50,
        assumed=(
            "batches of the repository's configs.yml, which the table does not state; batch norm "
            "over each GPU's own images; decoding of images is never waited for",
            "channels last everywhere; the TF32 and FP32 runs lay channels first",
            "mixed precision: fp16 with fp32 weights and gradients, copied once a step",
        ),
    ),
    Source(
        name="gpipe",
        title="GPipe, table 2",
        url="https://arxiv.org/abs/1811.06965",
        file="gpipe_table2.csv",
        unit="s", printed="normalised throughput",
        label="{model} K {partitions_K} M {microbatches_M}",
        build=partial(
            schedules.never,
            "normalised throughput without a time, of partitions whose shapes are not stated",
        ),
    ),
    Source(
        name="textbook",
        title="Machine Learning Systems (harvard-edge/cs249r_book), training chapter",
        url="https://github.com/harvard-edge/cs249r_book",
        file="mlsysbook_training_claims.csv",
        unit="GB", printed="claims and arithmetic", label="{section}: {item}",
        build=schedules.claim,
        assumed=("GPT-2 XL of the catalogue, 1.558 billion parameters; the book rounds to 1.5",),
    ),
    Source(
        name="bubble-formulas",
        title="DualPipe and zero-bubble READMEs",
        url="https://github.com/deepseek-ai/DualPipe",
        file="dualpipe_bubble_formulas.csv",
        unit="s", printed="formulas", label="{method}",
        build=partial(schedules.never, "a formula, nothing measured"),
    ),
    Source(
        name="llama3-interruptions",
        title="The Llama 3 Herd of Models, table 5",
        url="https://arxiv.org/abs/2407.21783",
        file="llama3_interruptions.csv",
        unit="s", printed="interruptions in 54 days", label="{component}",
        build=partial(
            schedules.never,
            "rates of failures: trainsim operate llama-3-405b-operations runs them",
        ),
    ),
)  # fmt: skip
"""In the order in which they are printed."""


def named(names: tuple[str, ...]) -> list[Source]:
    """Return the sources of some names, in the order of the table; all for none.

    Raises:
        DescriptionError: when there is no source of a name.
    """
    known = [source.name for source in SOURCES]
    for name in names:
        if name not in known:
            raise DescriptionError(
                f"no source {name!r}{suggestion(name, known)} (known: {', '.join(known)})"
            )
    return [source for source in SOURCES if not names or source.name in names]
