"""The run: the batch, the arithmetic and what is simulated of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from simulator.describe.fields import Count, Range, validate


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


FP32_BYTES = 4

PRECISIONS = {
    "fp32": Precision("fp32", 4, 4, 4, 0),
    "tf32": Precision("tf32", 4, 4, 4, 0),
    "fp16": Precision("fp16", 2, 2, 2, 4),
    "bf16": Precision("bf16", 2, 2, 2, 4),
}
"""Modes of arithmetic; mixed precision as in Micikevicius et al., 2018 (arXiv 1710.03740)."""


@dataclass(frozen=True, slots=True)
class Optimizer:
    """What one optimizer keeps per parameter and computes with it."""

    states: int
    """fp32 numbers kept per parameter, the master copy apart."""
    flops: int
    """Floating-point operations per parameter of one update."""


OPTIMIZERS = {
    "sgd": Optimizer(states=0, flops=2),
    "momentum": Optimizer(states=1, flops=4),
    "adam": Optimizer(states=2, flops=12),
    "adamw": Optimizer(states=2, flops=14),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Batch, precision, optimizer, and how much of the run is simulated."""

    global_batch_size: Count
    """Samples of one optimizer step over all ranks."""
    sequence_length: Count
    """Tokens of one sample."""
    precision: Literal["fp32", "tf32", "fp16", "bf16"] = "bf16"
    optimizer: Literal["sgd", "momentum", "adam", "adamw"] = "adamw"
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
    allocator_reserve: Annotated[float, Range(1, 2)] = 1.0
    """Bytes that torch's allocator has reserved over those allocated, at the peak: what
    fragmentation and its cache cost. 1.0, none, is a lower bound."""
    attention: Literal["flash", "flash2", "unfused"] = "flash"
    """`flash` never writes the score matrix to memory, as the library's best kernels; `flash2` runs
    FlashAttention-2, slower from Hopper on; `unfused` writes and keeps the matrix."""
    network: Literal["alpha-beta", "fluid"] = "alpha-beta"
    """`alpha-beta`: every flow takes its time alone; `fluid`: flows share links they meet on."""
    overlap_slowdown: Annotated[float, Range(0, 0.5)] = 0.0
    """Share of a rank's computing that each collective or message takes while it moves bytes
    there, in a `fluid` run; 0 leaves compute alone. Measurements suggest 0.15: DeepSeek-V3 gives 20
    of an H800's 132 SMs to communication (arXiv 2412.19437, section 3.2.2); on four A100, H100,
    MI250 or MI210 overlapped compute takes 18.9 % longer on average and 40 % at most (arXiv
    2507.03114), which is 0.16 where communication runs beside all of it."""
    num_steps: Count = 2
    """Optimizer steps simulated; the last one is reported as the steady state."""
    detail: Literal["stage", "layer", "kernel"] = "layer"
    """How finely a pass is cut into ops: an op a `kernel`; a run of kernels of a `layer` between
    collectives; a few ops a `stage`, for sweeps (a layer's where plan.tp_overlap needs them
    apart). It moves no time, but what the timeline shows."""

    def __post_init__(self) -> None:
        validate(self)
