"""What of a run's optimizer, trainable parameters and quantisation contradicts the rest of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from simulator.describe.layer_list import LayerList
from simulator.describe.model import Model
from simulator.describe.optimizer import OPTIMIZERS
from simulator.describe.plan import Plan
from simulator.describe.resnet import ResNet

if TYPE_CHECKING:
    from simulator.describe.run import Run


def run_contradictions(run: Run) -> Iterator[str]:
    """Say what of the run itself does not fit together."""
    rule = OPTIMIZERS[run.optimizer]
    if not run.fused_optimizer and not rule.unfused:
        yield (
            f"Run.fused_optimizer: false, but {run.optimizer} is one kernel only: its states are "
            "in 32 bits nowhere but in registers; leave it out"
        )
    if run.loss_scaling and run.precision != "fp16":
        yield (
            f"Run.loss_scaling: true is for precision 'fp16'; gradients of {run.precision!r} do "
            "not underflow; leave it out"
        )
    if len(set(run.gradient_passes)) < len(run.gradient_passes):
        yield f"Run.gradient_passes: {list(run.gradient_passes)} must name each once"
    if run.fused_loss and run.compiled_loss:
        yield "Run.fused_loss: true, and so is compiled_loss; the loss runs in one way alone"
    if {"scale", "divide"} <= set(run.gradient_passes):
        yield (
            "Run.gradient_passes: 'scale' and 'divide' are the same pass, of newer and of older "
            "versions; leave one of them out"
        )
    if run.lora_rank is None:
        for name, plain in (("lora_targets", LORA_TARGETS), ("base_weights", None)):
            if getattr(run, name) != plain:
                yield (
                    f"Run.{name}: {getattr(run, name)!r} is for adapters, and there are none; set "
                    "run.lora_rank"
                )
    elif not run.lora_targets or len(set(run.lora_targets)) < len(run.lora_targets):
        yield f"Run.lora_targets: {list(run.lora_targets)} must name one or more, each once"
    if run.fake_quantization and run.lora_rank is not None:
        yield (
            f"Run.fake_quantization: true trains the weights that it rounds, but lora_rank "
            f"{run.lora_rank} freezes them; leave one of them out"
        )
    if run.fake_quantization and run.fused_accumulation:
        yield (
            "Run.fake_quantization: true masks the gradient of each weight, which "
            "fused_accumulation has already added to others; set run.fused_accumulation = false"
        )


LORA_TARGETS: tuple[Literal["qkv", "proj", "fc1", "fc2"], ...] = ("qkv", "proj", "fc1", "fc2")
"""Products of a layer that have adapters."""


def contradictions(model: Model | ResNet | LayerList, plan: Plan, run: Run) -> Iterator[str]:
    """Say what does not fit the model and the plan."""
    frozen, layers = run.frozen_layers, model.num_hidden_layers
    most = layers if run.lora_rank is None else layers - 1
    if frozen > most:
        left = "" if run.lora_rank is None else ", and adapters need one that is not frozen"
        yield f"run.frozen_layers {frozen}: {model.name} has {layers} layers{left}"
    if run.lora_rank is not None and plan.tp > 1:
        yield (
            f"run.lora_rank {run.lora_rank} with plan.tp {plan.tp}: adapters are not divided over "
            "tensor-parallel ranks; set plan.tp = 1"
        )
    if run.fake_quantization and plan.sequence_parallel:
        yield (
            "run.fake_quantization with plan.sequence_parallel: what is gathered again in backward "
            "would be rounded again; set plan.sequence_parallel = false"
        )
    for name, kernels in (("lora_rank", "adapters"), ("fake_quantization", "rounding")):
        if run.precision == "fp8" and getattr(run, name):
            yield (
                f"run.precision 'fp8' with run.{name}: kernels of {kernels} have no fp8 form here; "
                'set run.precision = "bf16"'
            )
    if frozen and plan.chunks > 1 and not plan.p2p_overlap:
        yield (
            f"run.frozen_layers {frozen} with plan.chunks {plan.chunks} and plan.p2p_overlap "
            "false: chunks whose backward is nothing send nothing, and a rank would wait for them; "
            "set plan.p2p_overlap = true"
        )
    if run.gradient_passes and plan.zero > 1:
        yield (
            f"run.gradient_passes {list(run.gradient_passes)} are over gradients that a rank holds "
            f"in full, and plan.zero {plan.zero} divides them; leave them out"
        )
    rule = OPTIMIZERS[run.optimizer]
    if (rule.factored or rule.orthogonal) and plan.zero and plan.shards > 1:
        yield (
            f"run.optimizer {run.optimizer!r} needs whole matrices, but plan.zero {plan.zero} "
            f"divides states over {plan.shards} ranks; set plan.zero = 0"
        )
    if run.clip_grad and plan.staleness is not None:
        yield (
            f"run.clip_grad with plan.staleness {plan.staleness}: no rank ever holds the sum of "
            "one step's gradients, so it has no norm; leave one of them out"
        )
