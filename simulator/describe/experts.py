"""What of a mixture of experts, latent attention and prediction further ahead contradicts the rest
of a scenario, and what of it is not modelled.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from simulator.describe.model import Model
from simulator.describe.plan import Plan
from simulator.describe.run import Run


def expert_problems(model: Model, plan: Plan, run: Run, per_node: int) -> Iterator[str]:
    """Say what does not fit a model's experts, or needs some; a node has `per_node` ranks."""
    yield from _unlike_problems(model, plan, run)
    if model.num_experts is None:
        yield from _without_experts(model, plan, run)
        return
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

    yield from _plan_problems(model, plan, per_node)
    yield from _load_problems(model, run)
    yield from _fp8_problems(plan, run)


def _without_experts(model: Model, plan: Plan, run: Run) -> Iterator[str]:
    plain_plan, plain_run = _plain()
    for where, mine, plain, names in (
        ("plan", plan, plain_plan, ("ep", "etp", "expert_capacity", "expert_padding",
                                    "expert_dispatch")),
        ("run", run, plain_run, ("expert_load", "expert_load_exponent", "expert_fusion",
                                 "fp8_dispatch")),
    ):  # fmt: skip
        for name in names:
            value = getattr(mine, name)
            if value != getattr(plain, name):
                yield f"{where}.{name} {value!r} is for experts, and {model.name} has none"


@cache
def _plain() -> tuple[Plan, Run]:
    """Return a plan and a run that say nothing."""
    return Plan(), Run(global_batch_size=1)


def _plan_problems(model: Model, plan: Plan, per_node: int) -> Iterator[str]:
    """Say what of the plan does not go with experts."""
    if plan.expert_padding and plan.expert_capacity is None:
        yield "plan.expert_padding fills experts up to plan.expert_capacity, which is not set"
    dispatch = plan.expert_dispatch
    if dispatch != "all_to_all" and plan.ep == 1:
        yield f"plan.expert_dispatch {dispatch!r} has no effect with plan.ep 1"
    if dispatch == "all_gather" and plan.expert_capacity is not None:
        yield (
            "plan.expert_capacity with plan.expert_dispatch 'all_gather', which Megatron-LM does "
            'not have: leave it out, or set plan.expert_dispatch = "all_to_all"'
        )
    if dispatch == "node_limited" and model.topk_group == model.n_group:
        yield (
            f"plan.expert_dispatch 'node_limited': a token of {model.name} may go to all "
            f'{model.n_group} groups of experts; set plan.expert_dispatch = "deduplicated"'
        )
    if dispatch == "node_limited" and plan.ep * plan.etp <= per_node:
        yield (
            f"plan.expert_dispatch 'node_limited': the {plan.ep} ranks of plan.ep fit on a node of "
            f'{per_node}; set plan.expert_dispatch = "deduplicated"'
        )
    for name, why in (
        ("dp_shard", "experts have no groups of shards"),
        ("offload_optimizer", "the states of experts stay on the device"),
    ):
        if getattr(plan, name):
            yield f"plan.{name} with experts is not modelled: {why}; leave it out"
    if plan.num_servers:
        yield (
            "plan.gradient_exchange 'parameter_server' with experts, which other ranks hold than "
            "hold the rest, is not modelled; leave it out"
        )


def _fp8_problems(plan: Plan, run: Run) -> Iterator[str]:
    """Say why tokens cannot go to experts as bytes."""
    if not run.fp8_dispatch:
        return
    if run.precision != "fp8":
        yield f'run.fp8_dispatch is for run.precision "fp8", not {run.precision!r}'
    if plan.expert_dispatch == "all_gather":
        yield "run.fp8_dispatch: plan.expert_dispatch 'all_gather' gathers tokens as they are"
    if plan.ep == 1:
        yield "run.fp8_dispatch has no effect with plan.ep 1; leave it out"


def _load_problems(model: Model, run: Run) -> Iterator[str]:
    """Say what is wrong with how tokens are said to be shared out."""
    load, experts = run.expert_load, model.num_experts or 1
    most = 1 / max(model.experts_per_token, 1)
    if load != "zipf" and run.expert_load_exponent != 1:
        yield (
            f"run.expert_load_exponent {run.expert_load_exponent:g} is for run.expert_load 'zipf', "
            f"not {load if isinstance(load, str) else 'a list'!r}"
        )
    if isinstance(load, str):
        return
    if len(load) != experts:
        yield f"run.expert_load: lists {len(load)} shares; {model.name} has {experts} experts"
    if abs(sum(load) - 1) > TOLERANCE:
        yield f"run.expert_load: the shares sum to {sum(load):.6g}, not to 1"
    if max(load, default=0.0) > most + TOLERANCE:
        yield (
            f"run.expert_load: a share of {max(load):.4g} is more than 1 / "
            f"{model.experts_per_token} experts a token = {most:.4g}; no expert gets a token twice"
        )


TOLERANCE = 1e-6
"""By which recorded shares may miss a sum of 1."""


def expert_shares(model: Model, run: Run, ep: int) -> tuple[float, ...] | None:
    """Return the share of all copies of tokens that each expert gets; None where all get the same.

    Experts are counted in the order in which the ranks of ep hold them.
    """
    count, load = model.num_experts, run.expert_load
    assert count is not None
    if load == "uniform":
        return None
    if not isinstance(load, str):
        return tuple(load)
    shares = _zipf(count, run.expert_load_exponent, 1 / model.experts_per_token)
    return tuple(shares[rank::ep][slot] for rank in range(ep) for slot in range(count // ep))


def _zipf(count: int, exponent: float, most: float) -> list[float]:
    """Return shares as 1 / place ** exponent, none above `most`: what is goes to the others."""
    weights = [1 / place**exponent for place in range(1, count + 1)]
    full = 0  # the first ones, that get no more than `most`
    while True:
        each = (1 - full * most) / max(sum(weights[full:]), 1e-300)
        if full == count or weights[full] * each <= most:
            return [most] * full + [weight * each for weight in weights[full:]]
        full += 1


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
