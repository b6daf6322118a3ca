"""What a report says of samples, tokens or images, and of what a model does with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulator.describe.layer_list import LayerList
from simulator.describe.model import Model
from simulator.describe.scenario import Scenario
from simulator.units import format_rate

if TYPE_CHECKING:
    from simulator.report.summary import Summary


def sample_name(s: Scenario) -> str:
    """Return what one sample of a batch is."""
    if isinstance(s.model, LayerList):
        return "samples"
    if s.run.image_size:
        return f"images of {s.run.image_size} x {s.run.image_size}"
    if s.run.decoder_sequence_length:
        return f"x {s.sequence_length} + {s.run.decoder_sequence_length} tokens (encoder + decoder)"
    return f"x {s.sequence_length} tokens"


def attention_name(s: Scenario) -> str:
    """Return how attention is computed, where there is any."""
    attends = isinstance(s.model, Model) or (
        isinstance(s.model, LayerList) and any(layer.attention for layer in s.model.layers)
    )
    return f", {s.run.attention} attention" if attends else ""


def throughput(s: Scenario, summary: Summary) -> str:
    """Return tokens and samples of a second, or images."""
    if s.model.reads_images:
        return f"{summary.samples_per_s:,.5g} images/s"
    if isinstance(s.model, LayerList):
        return f"{summary.samples_per_s:,.5g} samples/s"
    tokens = format_rate(summary.tokens_per_s, "tokens")
    return f"{tokens}, {summary.samples_per_s:,.4g} samples/s"


def counted(s: Scenario) -> str:
    """Return what throughput and prices count."""
    if isinstance(s.model, LayerList):
        return "samples"
    return "images" if s.model.reads_images else "tokens"


def model_assumptions(s: Scenario) -> list[str]:
    """Return what was assumed of the model, with the convention of its FLOPs first."""
    if isinstance(s.model, LayerList):
        return [
            "MFU counts 3 x the forward products of the listed layers, attention in full",
            "listed layers: products by their shapes, each with a gradient of either factor as "
            "large as itself; what is element-wise by the bytes it moves; nothing is fused but "
            "attention; the loss only where it is listed; of a layer's own outputs its last one is "
            "alive while it runs",
        ]
    if not isinstance(s.model, Model):
        return [
            "MFU counts 3 x the forward multiply-adds of convolutions and the classifier, though "
            "the first convolution's input has no gradient",
            "convolutions are implicit products of channels-last tensors, as fast as products of "
            "their shape; batch norm, ReLU and sum are kernels of their own, statistics are of "
            "each rank's own microbatch, nothing is in place, and products have no workspace of "
            "their own",
        ]
    if s.model.num_decoder_layers:
        return _of_two_stacks(s.model)
    size = "12 x layers x hidden x sequence"
    if s.model.is_latent:
        size = "6 x layers x heads x sizes of key and value x sequence"
    full = f"MFU counts attention in full ({size} a token)"
    if s.model.num_experts is not None:
        full = f"MFU counts of experts those that a token goes to, and attention in full ({size})"
    if s.model.causal:
        return [f"{full} though causal kernels skip half of it"]
    out = [f"{full}, as it is computed; no token is padding"]
    if s.model.head_transform:
        out.append("the head gives logits of every token, not of the masked ones alone")
    return out


def _of_two_stacks(model: Model) -> list[str]:
    """Return what was assumed of an encoder with its decoder."""
    out = [
        "tokens are the encoder's and the decoder's; MFU counts 3 x the forward products, each "
        "token in its own stack and the encoder's in the keys and values of cross-attention, and "
        "attention in full (12 x layers x heads x head size x keys a query), masked or not; no "
        "token is padding",
        "every layer of the decoder makes keys and values of the encoder's output, which is kept "
        "once, and adds to its gradient",
    ]
    if model.position == "relative":
        out.append(
            "the bias of relative positions is looked up once a stack and microbatch, in the "
            "precision of activations, and stays until its gradient, as large, has been used"
        )
    return out
