"""What was assumed of sequences that several ranks divide."""

from __future__ import annotations

from simulator.describe.model import Model
from simulator.describe.scenario import Scenario

STYLES = {
    "ring": "K and V go round in {steps} steps, each beside the attention over the block before "
    "it, in backward again with the sums of their gradients a step behind; K, V and the result of "
    "every step are held until all results are merged, as Transformer Engine holds them",
    "all_to_all": "queries, keys and values are swapped for heads of whole sequences before "
    "attention and its result after it, beside nothing; backward swaps result and gradients",
    "all_gather": "K and V are gathered before attention and again in its backward, and their "
    "gradients reduce-scattered, beside nothing",
}
"""What each `plan.cp_style` assumes."""

BALANCE = {
    "zigzag": "zig-zag chunks give every rank the same causal work; kernels run at the rate of "
    "causal attention over as many rows",
    "contiguous": "the last rank has most causal work, {ratio:.3g} times the mean, and every rank "
    "is shown with as much, since all meet in each transfer",
}
"""What each `plan.cp_balance` assumes."""


def context_assumptions(s: Scenario) -> list[str]:
    """Return what is assumed of context parallelism that the scenario does not say."""
    plan, model = s.plan, s.model
    if plan.cp == 1 or not isinstance(model, Model):
        return []
    how = STYLES[plan.cp_style].format(steps=plan.cp - 1)
    out = [f"each of {plan.cp} ranks has {s.sequence_length // plan.cp:,} tokens: {how}"]
    if model.causal and plan.cp_style != "all_to_all":
        out.append(BALANCE[plan.cp_balance].format(ratio=(2 * plan.cp - 1) / plan.cp))
    if model.pooler:
        out.append("the rank with the first token counts for all where only that token is used")
    return out
