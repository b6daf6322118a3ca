"""What of a mixture of experts, latent attention and prediction further ahead contradicts the rest
of a scenario, and what of it is not modelled.
"""

from __future__ import annotations

from collections.abc import Iterator

from simulator.describe.model import Model
from simulator.describe.plan import Plan
from simulator.describe.run import Run


def expert_problems(model: Model, plan: Plan, run: Run) -> Iterator[str]:
    """Say what does not fit a model's experts, or needs some."""
    yield from _unlike_problems(model, plan, run)
    if model.num_experts is None:
        for name in ("ep", "etp"):
            if getattr(plan, name) > 1:
                yield f"plan.{name} {getattr(plan, name)} divides experts; {model.name} has none"
        return
    if plan.tp > 1 or plan.ep > 1 or plan.etp > 1:
        yield f"plan.tp {plan.tp}, plan.ep {plan.ep}, plan.etp {plan.etp}: experts are not divided"
    for name, count in (("ep", model.num_experts), ("etp", model.moe_intermediate_size or 1)):
        degree = getattr(plan, name)
        if count % degree:
            what = "experts" if name == "ep" else "numbers inside an expert"
            yield f"plan.{name} {degree} does not divide the {count} {what} of {model.name}"
    if plan.tp > 1 and not plan.sequence_parallel:
        yield (
            f"plan.tp {plan.tp}: ranks route the tokens that they norm, and without "
            "plan.sequence_parallel all would route the same; set plan.sequence_parallel = true"
        )


def _unlike_problems(model: Model, plan: Plan, run: Run) -> Iterator[str]:
    """Say what is modelled only of decoders whose layers are alike and have one MLP each."""
    unlike = [
        name
        for name, has in (
            ("experts", model.num_experts is not None),
            ("latent attention", model.is_latent),
            ("prediction further ahead", model.num_nextn_predict_layers > 0),
        )
        if has
    ]
    if not unlike:
        return
    what = f"of {model.name}, which has {' and '.join(unlike)}"
    if plan.recompute == "selective-op":
        yield (
            f"plan.recompute 'selective-op' is not modelled {what}; set plan.recompute = "
            '"selective" or "full"'
        )
    if run.lora_rank is not None:
        yield f"run.lora_rank {run.lora_rank}: adapters are not modelled {what}; leave it out"
    if unlike == ["latent attention"]:
        return
    if run.frozen_layers:
        yield f"run.frozen_layers {run.frozen_layers} is not modelled {what}; leave it out"
    if run.fake_quantization:
        yield f"run.fake_quantization is not modelled {what}; leave it out"
    if plan.zero > 1:
        yield f"plan.zero {plan.zero} is not modelled {what}; set plan.zero = 1 or 0"
