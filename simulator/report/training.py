"""What was assumed of the optimizer, of what it trains and of quantisation in training."""

from __future__ import annotations

from simulator.describe.optimizer import OPTIMIZERS
from simulator.describe.run import Run
from simulator.describe.scenario import Scenario


def training_name(run: Run) -> str:
    """Return what of a run is trained, and in what way, where it is not the usual one."""
    words = (
        (run.frozen_layers, f"{run.frozen_layers} layers frozen"),
        (run.lora_rank, f"LoRA rank {run.lora_rank}"),
        (run.base_weights, f"{run.base_weights} base weights"),
        (run.fake_quantization, "fake quantisation"),
        (run.clip_grad, "gradients clipped"),
        (not run.fused_optimizer, "unfused optimizer"),
    )
    return "".join(f", {text}" for given, text in words if given)


def training_assumptions(s: Scenario) -> list[str]:
    """Return what was assumed that moves the answer and that the scenario does not say."""
    run, rule = s.run, OPTIMIZERS[s.run.optimizer]
    out = []
    if run.optimizer == "adam8bit":
        out.append("8-bit Adam keeps a byte a state and an fp32 scale a block of 2048, everywhere")
    if rule.factored:
        out.append(
            "Adafactor has no momentum and keeps a sum a row and a column of each matrix of a "
            "rank, q, k and v as one; other parameters keep an fp32 second moment"
        )
    if rule.orthogonal:
        out.append(
            "Muon orthogonalises the matrices of layers, q, k and v as one, in 5 iterations of "
            "bf16 products where the device has them, each matrix by itself"
            + (", each tensor-parallel rank its part alone" if s.plan.tp > 1 else "")
            + "; AdamW updates the rest"
        )
    if not run.fused_optimizer:
        out.append(
            "each element-wise step of the optimizer is one kernel for all tensors of a rank"
        )
    if run.scales_loss:
        out.append(
            "with loss scaling gradients are read, divided and written once a step; no step is "
            "skipped for overflow"
        )
    if run.gradient_passes:
        names = ", ".join(run.gradient_passes)
        out.append(f"passes over Megatron-LM's gradient buffers once a step: {names}")
    if run.clip_grad:
        out.append("gradients are clipped every step, whatever their norm")
    if run.clip_grad or run.scales_loss:
        out.append("the host never waits for the device to learn a norm or an overflow")
    return out + _subset(s) + _rounded(run)


def _subset(s: Scenario) -> list[str]:
    run = s.run
    out = []
    if not run.trains_all:
        out.append(
            "backward ends with the first layer that is trained, the gradient of whose input it "
            "still computes; MFU leaves out the products of gradients that are not needed"
        )
    if run.lora_rank is not None:
        out.append(
            "adapters compute in kernels of their own beside the products, without dropout; they "
            f"are {run.precision}, with a master copy as all that is trained"
        )
    if run.base_weights:
        out.append(
            f"weights under adapters lie in {run.base_weights} and are copied out before every "
            "product, forward and backward; the copy's memory is left out"
        )
    return out


def _rounded(run: Run) -> list[str]:
    if not run.fake_quantization:
        return []
    return [
        "fake quantisation rounds the input and the weight of each product of layers and head for "
        "every microbatch, in kernels that observe, round and, in backward, mask"
    ]
