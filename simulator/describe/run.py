"""The run: the batch, the arithmetic and what is simulated of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from simulator.describe.fields import Count, Natural, Probability, Range, Seconds, validate
from simulator.describe.optimizer import OptimizerName
from simulator.describe.tuning import LORA_TARGETS, run_contradictions
from simulator.errors import DescriptionError


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes per element or parameter in one mode of arithmetic."""

    matmul: str
    """Precision of matrix products, a key of `Device.peak`."""
    activation: int
    weight: int
    gradient: int
    master: int
    """Bytes of the fp32 copy that the optimizer updates; 0 where the weight itself is fp32."""
    linear: str = ""
    """Precision of the linear products of layers where it is another than `matmul`."""

    @property
    def fastest(self) -> str:
        """Precision of most products, by whose peak rate MFU is counted."""
        return self.linear or self.matmul


FP32_BYTES = 4

GradientPass: TypeAlias = Literal["clear", "check", "scale", "divide", "copy"]

PRECISIONS = {
    "fp32": Precision("fp32", 4, 4, 4, 0),
    "tf32": Precision("tf32", 4, 4, 4, 0),
    "fp16": Precision("fp16", 2, 2, 2, 4),
    "bf16": Precision("bf16", 2, 2, 2, 4),
    "fp8": Precision("bf16", 2, 2, 2, 4, linear="fp8"),
}
"""Modes of arithmetic; mixed precision as in Micikevicius et al., 2018 (arXiv 1710.03740).

`fp8` is bf16 with the linear products of layers in fp8, as Transformer Engine and torchao do by
default: attention, embedding, head and all that is element-wise stay in bf16, as do weights and
gradients. Each tensor has one scale; gradients of outputs are in e5m2, all else in e4m3.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Batch, precision, optimizer, and how much of the run is simulated."""

    global_batch_size: Count
    """Samples of one optimizer step over all ranks."""
    sequence_length: Count | None = None
    """Tokens of one sample; those that its encoder reads where a decoder follows it."""
    decoder_sequence_length: Count | None = None
    """Tokens of one sample that the decoder of an encoder reads, and predicts."""
    image_size: Count | None = None
    """Pixels along each side of one sample, where samples are images instead."""
    precision: Literal["fp32", "tf32", "fp16", "bf16", "fp8"] = "bf16"
    fp8_scaling: Literal["delayed", "current", "mxfp8"] = "delayed"
    """From what the scale of a tensor is found, in fp8: `delayed` from the largest values of
    earlier steps, found as the tensor is cast; `current` from its own, for which it is read once
    more (torchao's tensorwise recipe), unless `compiled`: found as the tensor is written; `mxfp8`
    from each 32 elements in a row (OCP Microscaling Formats), which Blackwell multiplies: casts are
    read once, and written for both directions of products."""
    fp8_kept: bool = False
    """In fp8, keep the inputs of layers' activation functions in it too (DeepSeek-V3, section
    3.3.3): half the bytes, which forward writes beside its result."""
    fp8_dispatch: bool = False
    """In fp8, whether tokens go to experts, and their gradients back, as bytes, cast before (as
    DeepSeek-V3's do); else in bf16, cast by the products of experts (Megatron-LM)."""
    expert_fusion: Literal["none", "permutation", "all"] = "none"
    """What of a mixture of experts' routing is kernels of Transformer Engine in place of torch's
    operators: `permutation` puts rows in the order of experts and sums them by one kernel each
    (Megatron-LM's --moe-permute-fusion); `all` also scores and chooses (--moe-router-fusion) and
    fills experts up for fp8 as it orders."""
    fp8_weights: bool = False
    """In fp8, hold and gather the weights of layers' products in it alone: each rank casts its own
    shard from the fp32 copy once a step (Megatron-LM's --fp8-param-gather, torchao's
    enable_fsdp_float8_all_gather); else they lie and move in bf16 and are cast where they are.
    Those of `mxfp8` move in bf16 all the same, but where full sharding gathers them
    (--reuse-grad-buf-for-mxfp8-param-ag)."""
    compiled: bool = False
    """Whether each layer is compiled (torch.compile): the sum of the residual stream and the norm
    that follows it in the layer are one kernel, so that what lies between is not read again; a
    layer that recomputes by operators keeps and computes nothing that backward does not need."""
    layer_code: Literal["fused", "torchtitan"] = "fused"
    """Whose code of a layer runs. `fused`: one product for q, k and v, one for a gate and what it
    multiplies, one kernel a norm, rotary positions or activation function, tensor parallelism as
    Megatron-LM's. `torchtitan`: its Llama's, in torch's own operators, with DTensor's tensor
    parallelism and checkpoints that stop before the last product (`lower/plain.py`)."""
    optimizer: OptimizerName = "adamw"
    """See `describe.optimizer.OPTIMIZERS`."""
    fused_optimizer: bool = True
    """Whether an update is one kernel that reads and writes each array once; else each of its
    element-wise steps is a kernel, as in torch's `foreach` implementations."""
    clip_grad: bool = False
    """Whether gradients are scaled down to a global norm: a pass over them, sums of one number over
    the ranks that hold different ones, and a pass that scales (torch's `clip_grad_norm_`)."""
    gradient_passes: tuple[GradientPass, ...] = ()
    """Passes over the buffers in which Megatron-LM has a rank's gradients, once a step: `clear`
    writes zeros; `check` takes a norm before they are summed (its
    --check-for-nan-in-loss-and-grad, on since 2023); `scale` multiplies by one over the ranks that
    sum them, where there are several (without --ddp-average-in-collective), `divide` also where
    there is one (until 2023); `copy` has the optimizer work on fp32 alone, gradients copied to it
    and weights out of it by kernels of their own. torch has none of them."""
    loss_scaling: bool | None = None
    """Whether gradients are divided by the loss's scale and searched for overflow before the
    update, in a pass over them and sums of one number (Micikevicius et al., 2018, section 3.2); so
    with fp16 when absent."""
    frozen_layers: Natural = 0
    """The first layers that are not trained, and below them the embedding (with a tied head)."""
    lora_rank: Count | None = None
    """Rank of adapters, the only parameters trained (Hu et al., 2021, arXiv 2106.09685)."""
    lora_targets: tuple[Literal["qkv", "proj", "fc1", "fc2"], ...] = LORA_TARGETS
    """Products of a layer that have an adapter."""
    base_weights: Literal["int8", "nf4"] | None = None
    """In what the matrices of layers lie under adapters; they are copied out before each use. `nf4`
    as QLoRA (Dettmers et al., 2023, arXiv 2305.14314); in the run's precision when absent."""
    fake_quantization: bool = False
    """Quantisation-aware training: weights and inputs of matrix products are rounded and scaled
    back before each, and gradients pass where nothing was clipped (Jacob et al., 2018)."""
    expert_load: Literal["uniform", "zipf"] | tuple[Probability, ...] = "uniform"
    """Share of all copies of tokens that each expert of a layer gets: the same; falling as 1 over
    the expert's place in a list to the power of `expert_load_exponent`, the list being dealt out
    to the ranks of ep in turn; or shares as a routing histogram has recorded them, which sum to 1.
    No expert gets a token twice: above 1 over the experts of a token nothing goes."""
    expert_load_exponent: Annotated[float, Range(0)] = 1.0
    gradient_dtype: Literal["fp32"] | None = None
    """In what gradients are accumulated and reduced: `fp32` as Megatron-LM's main gradients; that
    of the weights when absent."""
    fused_accumulation: bool = False
    """Whether the product that makes a weight's gradient adds it to those of earlier microbatches
    (Megatron-LM's gradient accumulation fusion); else a kernel of its own does, as in torch."""
    linear_layers: Literal["torch", "megatron", "transformer_engine"] = "torch"
    """Whose products hold what beside their results. Where accumulation is fused autograd is given
    an empty gradient all the same: `megatron` makes it in each backward (Megatron-LM since 2023),
    `transformer_engine` keeps one for each shape of a layer's weights (`get_dummy_wgrad`), and a
    cuBLAS workspace of its own; the head is Megatron-LM's."""
    loss_in_place: bool = True
    """Whether the fp32 logits become the probabilities and their gradient where they lie, as in
    Megatron-LM; else each is a tensor of its own, as in torch's eager `cross_entropy` and, with
    logits divided over tp, its `loss_parallel`."""
    fused_loss: bool = False
    """Whether the loss is Transformer Engine's kernels (Megatron-LM's --cross-entropy-loss-fusion
    with --cross-entropy-fusion-impl te): the logits are read twice and the gradient is written in
    fp32, where Megatron-LM's own passes over them a kernel at a time. `loss_in_place` says nothing
    then."""
    compiled_loss: bool = False
    """Whether the loss is compiled (torch.compile), whatever `loss_in_place` says: it keeps the
    logits as they are and writes nothing in fp32."""
    allocator_reserve: Annotated[float, Range(1, 2)] = 1.0
    """Bytes that torch's allocator has reserved over those allocated, at the peak, and cannot give
    back: what fragmentation costs. 1.0, none, is a lower bound. Pools and holes that follow from
    the plan are reserved beside it."""
    attention: Literal["flash", "flash2", "flash1", "unfused"] = "flash"
    """`flash` never writes the score matrix to memory, as the library's best kernels; `flash2` runs
    FlashAttention-2, slower from Hopper on; `flash1` the first one's kernels in Triton; `unfused`
    writes and keeps the matrix."""
    network: Literal["alpha-beta", "fluid"] = "alpha-beta"
    """`alpha-beta`: every flow takes its time alone; `fluid`: flows share links they meet on."""
    overlap_slowdown: Annotated[float, Range(0, 0.5)] | None = None
    """Share of a rank's computing that each collective or message takes while it moves bytes there;
    0 leaves compute alone. When absent collectives take the SMs that NCCL's kernel holds
    (`Device.communication_units`) and the memory bandwidth of what arrives, and messages nothing.
    """
    num_steps: Count = 2
    """Optimizer steps simulated; the last one is reported as the steady state."""
    warm_up: Seconds = 0.0
    """What the first step begins with on every rank, before it computes: kernels compiled and
    chosen, communicators and caches made. Loaders work meanwhile."""
    log_time: Seconds = 0.0
    """What each host takes to log, in which its rank computes nothing: it reads the loss from the
    device, which it waits for, and launches the next step afterwards."""
    log_every: Count | None = None
    """Steps from one log to the next; each of them when absent. Where so many are not simulated,
    one is before the last of them."""
    detail: Literal["stage", "layer", "kernel"] = "layer"
    """How finely a pass is cut into ops: an op a `kernel`; a run of kernels of a `layer` between
    collectives; a few ops a `stage`, for sweeps (a layer's where what runs beside others needs them
    apart: plan.tp_overlap, zero 2, collectives of layers beside gathers or buckets). It moves no
    time, but what the timeline shows."""

    def __post_init__(self) -> None:
        validate(self)
        problems = list(run_contradictions(self))
        if problems:
            raise DescriptionError(problems)

    @property
    def scales_loss(self) -> bool:
        """Whether gradients are unscaled and searched for overflow."""
        return self.precision == "fp16" if self.loss_scaling is None else self.loss_scaling

    @property
    def trains_all(self) -> bool:
        """Whether every parameter is trained."""
        return not self.frozen_layers and self.lora_rank is None
