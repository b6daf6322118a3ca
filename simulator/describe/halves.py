"""What schedules cannot be combined with that split a backward, pair passes or copy stages."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from simulator.describe.layer_list import LayerList
from simulator.describe.model import Model
from simulator.describe.plan import Plan
from simulator.describe.resnet import ResNet
from simulator.describe.run import Run
from simulator.describe.stages import even_layers, listed_layers
from simulator.describe.target import target_of
from simulator.schedules.layout import Layout, layout_of
from simulator.schedules.table import schedule_of, size_complaint


def schedule_contradictions(
    model: Model | ResNet | LayerList, plan: Plan, run: Run, microbatches: int
) -> Iterator[str]:
    """Say what a schedule, of a size that it takes, does not go together with."""
    if plan.post_validation and (plan.pp == 1 or not (run.clip_grad or run.scales_loss)):
        yield (
            "plan.post_validation: true has no effect without a pipeline that waits for a norm or "
            "an overflow; set run.clip_grad = true, or leave it out"
        )
    found = layout_of(
        schedule_of(plan.schedule), plan.pp, microbatches, plan.chunks, plan.microbatch_group,
        target_of(plan, run),
    )  # fmt: skip
    if found.updates:
        yield from _after_every_microbatch(model, plan, run)
        begun = microbatches * run.num_steps + plan.pp
        complaint = size_complaint(
            plan.schedule, plan.pp, begun, plan.chunks, plan.microbatch_group
        )  # fmt: skip
        if complaint:
            yield (
                f"plan.schedule {complaint}: steps without a flush need lists of all "
                f"run.num_steps {run.num_steps} x {microbatches} microbatches and of plan.pp "
                f"{plan.pp} that are then in flight"
            )
    if plan.recompute_again and (plan.recompute != "full" or not found.splits):
        yield (
            "plan.recompute_again: true is for plan.recompute 'full' and a schedule that splits "
            f"backward, not {plan.recompute!r} and {plan.schedule}; leave it out"
        )
    if isinstance(model, LayerList):
        yield from _empty_stages(model, plan, found.splits)
    traits = _traits(found)
    if traits and plan.zero > 1 and plan.shards > 1:
        yield (
            f"plan.zero {plan.zero} with plan.schedule {plan.schedule}, which {traits}: when "
            "weights are gathered and gradients sharded is not modelled; set plan.zero = 1 or 0"
        )
    if traits and plan.offload_activations:
        yield (
            f"plan.offload_activations with plan.schedule {plan.schedule}, which {traits}: when "
            "activations come back is not modelled; leave it out"
        )
    if found.copies > 1 and plan.num_servers:
        yield (
            f"plan.gradient_exchange 'parameter_server' with plan.schedule {plan.schedule}, which "
            "has every stage on two ranks: servers of both are not modelled; leave it out"
        )
    ends = found.ranks_of[0] == found.ranks_of[max(found.ranks_of)]
    if plan.zero == 3 and plan.shards > 1 and plan.pp > 1 and ends and model.tie_word_embeddings:
        yield (
            f"plan.zero 3 with plan.schedule {plan.schedule}, whose first and last stage share a "
            f"rank: how long {model.name}'s tied embedding stays gathered is not modelled; set "
            "plan.zero = 1, or model.tie_word_embeddings = false"
        )


def _traits(found: Layout) -> str:
    """Return what is unusual about a schedule, in words."""
    words = (
        (found.splits, "splits backward"),
        (found.pairs, "runs forwards and backwards together"),
        (found.copies > 1, "has every stage on two ranks"),
    )
    return " and ".join(text for given, text in words if given)


def _empty_stages(model: LayerList, plan: Plan, splits: bool) -> Iterator[str]:
    """Say which stage of a list has nothing to do, or nothing for the half that is put off."""
    counts = listed_layers(plan) or even_layers(plan, model.num_hidden_layers)
    if sum(counts) != model.num_hidden_layers:  # another sentence says so, or they are not cut yet
        return
    for stage, (first, count) in enumerate(zip(accumulate((0, *counts)), counts, strict=False)):
        held = model.every[first : first + count]
        if not any(layer.products or layer.attention or layer.kernels for layer in held):
            yield f"plan.pp {plan.pp}: no layer of {model.name} on stage {stage} computes anything"
        elif splits and not any(p.weight for layer in held for p in layer.products):
            names = ", ".join(layer.name for layer in held[:4])
            yield (
                f"plan.schedule {plan.schedule} puts gradients of weights off, and stage {stage} "
                f"({names}) of {model.name} has no product with one"
            )


def _after_every_microbatch(
    model: Model | ResNet | LayerList, plan: Plan, run: Run
) -> Iterator[str]:
    """Say what does not go with a schedule that updates weights after every microbatch."""
    rules = (
        (plan.zero > 0, f"plan.zero {plan.zero}", "set plan.zero = 0"),
        (plan.num_servers > 0, "plan.gradient_exchange 'parameter_server'", "leave it out"),
        (plan.offload_optimizer, "plan.offload_optimizer", "leave it out"),
        (plan.offload_activations, "plan.offload_activations", "leave it out"),
        (not plan.grad_overlap, "plan.grad_overlap false", "leave it out"),
        (run.clip_grad, "run.clip_grad", "leave it out"),
        (bool(run.gradient_passes), "run.gradient_passes", "leave them out"),
        (run.scales_loss, "loss scaling", 'set run.precision = "bf16" or run.loss_scaling = false'),
        (
            model.tie_word_embeddings and plan.pp > 1, f"{model.name}'s tied embedding",
            "set model.tie_word_embeddings = false",
        ),
    )  # fmt: skip
    for given, what, remedy in rules:
        if given:
            yield (
                f"{what} with plan.schedule {plan.schedule}, which updates weights after every "
                f"microbatch without waiting for a step's end: not modelled; {remedy}"
            )
