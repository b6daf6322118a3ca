"""What ranks along cp cannot divide, said before anything is lowered."""

from __future__ import annotations

from collections.abc import Iterator

from simulator.describe.layer_list import LayerList
from simulator.describe.model import Model
from simulator.describe.plan import Plan
from simulator.describe.resnet import ResNet
from simulator.describe.run import Run


def context_problems(
    model: Model | ResNet | LayerList, plan: Plan, run: Run, sequence_length: int
) -> Iterator[str]:
    """Say why cp ranks cannot divide the sequences of a model as the plan says."""
    if not isinstance(model, Model) or model.patches:
        has = "is a list of layers" if isinstance(model, LayerList) else "has images"
        yield f"plan.cp {plan.cp} divides sequences of tokens, and {model.name} {has}"
        return
    if model.num_decoder_layers or model.position == "relative":
        what = "a decoder that attends to an encoder"
        if not model.num_decoder_layers:
            what = "scores with a learned bias"
        yield f"plan.cp {plan.cp} does not divide {what}, as {model.name} has; set plan.cp = 1"
        return
    if getattr(model, "kv_lora_rank", None):
        yield (
            f"plan.cp {plan.cp}: {model.name} attends to latent keys and values "
            "(kv_lora_rank), which is not built with context parallelism; set plan.cp = 1"
        )
    if run.attention == "unfused":
        yield (
            f"plan.cp {plan.cp} is for fused attention, whose results over blocks of keys can be "
            "merged, and run.attention is 'unfused'; set run.attention = \"flash\""
        )
    if plan.recompute == "selective-op":
        yield (
            f"plan.recompute 'selective-op' saves the result of one attention, and plan.cp "
            f'{plan.cp} makes it of several; set plan.recompute = "selective"'
        )
    if plan.cp_balance == "contiguous" and not (model.causal and plan.cp_style != "all_to_all"):
        why = (
            f"attention of {model.name} is not causal"
            if not model.causal
            else "cp_style 'all_to_all' gives each rank some heads of whole sequences"
        )
        yield f"plan.cp_balance 'contiguous' has no effect: {why}; leave it out"
    yield from _sizes(model, plan, sequence_length)


def _sizes(model: Model, plan: Plan, sequence_length: int) -> Iterator[str]:
    """Say what of the sequence or of the heads the ranks do not divide evenly."""
    pieces, what = plan.cp, "plan.cp"
    if model.causal and plan.cp_style != "all_to_all" and plan.cp_balance == "zigzag":
        pieces, what = 2 * plan.cp, "2 x plan.cp (zig-zag chunks)"
    if sequence_length % pieces:
        near = max(pieces, sequence_length // pieces * pieces)
        yield (
            f"run.sequence_length {sequence_length} is not a multiple of {what} = {pieces}; "
            f"{near} would be"
        )
    if plan.cp_style != "all_to_all":
        return
    heads = {
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
    }
    wrong = [f"{name} {count}" for name, count in heads.items() if count % (plan.tp * plan.cp)]
    if wrong:
        yield (
            f"plan.cp_style 'all_to_all' divides heads over plan.tp x plan.cp = "
            f"{plan.tp * plan.cp} ranks, but not {' and '.join(wrong)} of {model.name} (keys and "
            'values are not copied to more ranks); set plan.cp_style = "ring"'
        )
