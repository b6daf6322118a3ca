"""What one sample of a run is: tokens, or an image; and what does not fit a model of either."""

from __future__ import annotations

from collections.abc import Iterator

from simulator.describe.layer_list import LayerList
from simulator.describe.model import Model
from simulator.describe.optimizer import OPTIMIZERS
from simulator.describe.plan import Plan
from simulator.describe.resnet import ResNet
from simulator.describe.run import Run


def positions(model: Model | ResNet | LayerList, run: Run) -> int:
    """Return the tokens of one sample: those of an image are its patches and the class token.

    A convolution network has none, nor has a list of layers: one position stands for a sample.
    """
    if not isinstance(model, Model):
        return 1
    return model.patches.tokens if model.patches else run.sequence_length or 0


def tokens(model: Model | ResNet | LayerList, run: Run) -> int:
    """Return the tokens of one sample as throughput counts them: an encoder's and a decoder's."""
    return positions(model, run) + (run.decoder_sequence_length or 0)


def sample_problems(model: Model | ResNet | LayerList, plan: Plan, run: Run) -> Iterator[str]:
    """Say what is missing of a sample, or of no use to its model."""
    if isinstance(model, LayerList):
        yield from _list_problems(model, plan, run)
        return
    if model.reads_images:
        if run.image_size is None:
            yield f"run.image_size is missing: {model.name} reads images (224 is usual)"
        if run.sequence_length is not None:
            yield (
                f"run.sequence_length {run.sequence_length} is for models of text, and "
                f"{model.name} reads images; run.image_size says how large they are"
            )
    else:
        if run.sequence_length is None:
            yield f"run.sequence_length is missing: the tokens of one sample of {model.name}"
        if run.image_size is not None:
            yield f"run.image_size {run.image_size} is for images, and {model.name} reads text"
    decodes, length = getattr(model, "num_decoder_layers", 0) > 0, run.decoder_sequence_length
    if decodes and length is None:
        yield (
            f"run.decoder_sequence_length is missing: the tokens of one sample that the decoder of "
            f"{model.name} reads"
        )
    if length is not None and not decodes:
        yield (
            f"run.decoder_sequence_length {length} is for decoders that follow an encoder, and "
            f"{model.name} has none; leave it out"
        )
    if isinstance(model, ResNet):
        yield from _convolution_problems(model, plan, run)
    elif model.patches:
        yield from _patch_problems(model, plan, run)


def _patch_problems(model: Model, plan: Plan, run: Run) -> Iterator[str]:
    size = model.patches.image_size if model.patches else 0
    if run.image_size not in (None, size):
        yield (
            f"run.image_size {run.image_size}: {model.name} has learned positions for images of "
            f"{size} pixels"
        )
    if plan.sequence_parallel:
        yield (
            f"plan.sequence_parallel divides the sequence, of which the head of {model.name} sees "
            "the class token alone; set plan.sequence_parallel = false"
        )


def _list_problems(model: LayerList, plan: Plan, run: Run) -> Iterator[str]:
    """Say what is not modelled of a list of layers."""
    for name in ("sequence_length", "decoder_sequence_length", "image_size"):
        if getattr(run, name) is not None:
            yield (
                f"run.{name} {getattr(run, name)}: {model.name} is a list of layers with the sizes "
                "of its samples; leave it out"
            )
    if plan.tp > 1:
        yield f"plan.tp {plan.tp}: a list of layers says not how they divide; set plan.tp = 1"
    if plan.num_stages > 1 and len(model.outputs) > 1:
        low, high = model.outputs[0], model.outputs[-1]
        yield (
            f"plan.pp {plan.pp}: layers of {model.name} hand on from {low:,.0f} to {high:,.0f} "
            "elements a sample; stages are modelled between layers that hand on the same"
        )
    if plan.recompute != "none":
        yield (
            f"plan.recompute {plan.recompute!r}: a list of layers says not what is computed again; "
            'set plan.recompute = "none"'
        )
    if run.attention != "flash" and not any(layer.attention for layer in model.layers):
        yield f"run.attention {run.attention!r} has no effect on {model.name}, which has none"
    yield from _plain_training(model, run, "a list of layers", "layers that are listed")


def _convolution_problems(model: ResNet, plan: Plan, run: Run) -> Iterator[str]:
    if plan.tp > 1 or plan.num_stages > 1:
        yield (
            f"plan.tp {plan.tp} x plan.pp {plan.pp}: convolution networks are modelled with data "
            f"parallelism only; set plan.tp = 1 and plan.pp = 1 for {model.name}"
        )
    if plan.recompute not in ("none", "full"):
        yield (
            f"plan.recompute {plan.recompute!r} tells parts of a transformer's layer apart, and "
            f'{model.name} has none; set plan.recompute = "full" or "none"'
        )
    if run.attention != "flash":
        yield f"run.attention {run.attention!r} has no effect on {model.name}, which has none"
    yield from _plain_training(model, run, "a convolution network", "convolutions")


def _plain_training(model: ResNet | LayerList, run: Run, what: str, of: str) -> Iterator[str]:
    """Say which settings speak of a transformer's layers or of matrices."""
    if run.precision == "fp8":
        yield f"run.precision 'fp8' is not modelled of {of}; {FLOATS} are"
    for name, plain in TRANSFORMERS_ONLY.items():
        value = getattr(run, name)
        if value != plain:
            yield (
                f"run.{name} {_toml(value)} is modelled of transformers, and {model.name} is "
                f"{what}; leave it out"
            )
    rule = OPTIMIZERS[run.optimizer]
    if rule.factored or rule.orthogonal:
        why = (
            "the weights of convolutions have four dimensions"
            if isinstance(model, ResNet)
            else "a list of layers says not which weights are some"
        )
        yield (
            f"run.optimizer {run.optimizer!r} is modelled of matrices, and {why}; set "
            f'run.optimizer = "momentum" for {model.name}'
        )


FLOATS = "fp32, tf32, fp16 and bf16"

TRANSFORMERS_ONLY = {
    "frozen_layers": 0, "lora_rank": None, "fake_quantization": False, "compiled": False,
    "linear_layers": "torch",
}  # fmt: skip
"""Settings of a run that speak of a transformer's layers, as they are when they say nothing."""


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
