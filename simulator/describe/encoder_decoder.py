"""What a decoder that attends to an encoder, and relative positions, do not go together with."""

from __future__ import annotations

from collections.abc import Iterator

from simulator.describe.model import Model
from simulator.describe.plan import Plan
from simulator.describe.run import Run


def encoder_decoder_problems(model: Model, plan: Plan, run: Run) -> Iterator[str]:
    """Say what of a plan and a run is not modelled of such a model."""
    if model.position == "relative" and run.attention != "unfused":
        yield (
            f"run.attention {run.attention!r}: {model.name} learns the bias of its scores "
            "(position 'relative'), of which fused attention gives no gradient; set run.attention "
            '= "unfused"'
        )
    if model.num_decoder_layers:
        what = "a decoder that attends to an encoder"
    elif model.position == "relative":
        what = "relative positions"
    else:
        return
    of = f"with {what}, as {model.name} has, is not modelled"
    rules = (
        (plan.num_stages > 1, f"a pipeline (plan.pp {plan.pp})", "set plan.pp = 1"),
        (plan.recompute == "selective-op", "plan.recompute 'selective-op'",
         'set plan.recompute = "selective"'),
        (run.frozen_layers > 0, f"run.frozen_layers {run.frozen_layers}", "leave it out"),
        (run.lora_rank is not None, f"run.lora_rank {run.lora_rank}", "leave it out"),
        (run.fake_quantization, "run.fake_quantization", "leave it out"),
    )  # fmt: skip
    for given, asked, remedy in rules:
        if given:
            yield f"{asked} {of}; {remedy}"
    length = run.decoder_sequence_length
    if plan.sequence_parallel and length is not None and length % plan.tp:
        yield (
            f"plan.sequence_parallel: plan.tp {plan.tp} does not divide "
            f"run.decoder_sequence_length {length}"
        )
