"""What was assumed of experts, of latent attention and of layers that predict further ahead."""

from __future__ import annotations

from simulator.describe.model import Model
from simulator.describe.scenario import Scenario
from simulator.hardware.grouped import ISSUE, STREAMS
from simulator.lower.experts import rows
from simulator.lower.shapes import shapes
from simulator.lower.sharding import expert_replicas, expert_shards
from simulator.units import format_seconds

DISPATCH = {
    "all_to_all": "a token is sent to each of its experts",
    "deduplicated": "a token is sent once to each rank that has some of its experts, as if these "
    "were on as many ranks as they can be, and comes back summed",
    "node_limited": "a token is sent once to each node that has some of its experts, at most "
    "{groups}, and comes back summed; that it goes on inside nodes is hidden behind that",
}
"""What each `plan.expert_dispatch` assumes."""


def expert_assumptions(s: Scenario) -> list[str]:
    """Return what is assumed of a model's experts that the scenario does not say."""
    model = s.model
    if not isinstance(model, Model):
        return []
    out = []
    if model.num_experts is not None:
        out += [_load(s, model), *_ways(s, model), *_sums(s)]
    if model.num_nextn_predict_layers:
        out.append(
            f"parameters and MFU count the {model.num_nextn_predict_layers} layer(s) that predict "
            "further ahead, each with the head and its loss once more; the last stage has a copy "
            "of the embedding where it does not hold the first one"
        )
    return out


def _load(s: Scenario, model: Model) -> str:
    x, load = shapes(s), s.run.expert_load
    name = {"uniform": "the same", "zipf": "a Zipf share"}.get(
        load if isinstance(load, str) else "", "the recorded share"
    )
    found = rows(model, x.routing, x.local_tokens)
    text = f"every expert gets {name} of all copies of tokens"
    if x.routing.ep > 1 and found.fullest > found.sent:
        text += (
            f"; every rank is shown with what the fullest one of ep has, "
            f"{found.fullest / found.sent:.3g} times the mean, since all meet in each exchange"
        )
    if found.dropped:
        text += f"; {found.dropped:.1%} of the copies are dropped"
    if x.routing.padded:
        text += f"; padded to {found.sent / (x.local_tokens * model.experts_per_token):.3g} of them"
    return text


def _ways(s: Scenario, model: Model) -> list[str]:
    out = [
        "each expert of a rank is a product of its own, with an even part of the rows: the host "
        f"issues one in {format_seconds(ISSUE)}, and {STREAMS} at most run at once; copies are "
        "ordered and summed by kernels of their own, and weighted with the activation; losses that "
        "balance experts are left out",
    ]
    if s.plan.ep > 1:
        how = DISPATCH[s.plan.expert_dispatch].format(groups=model.topk_group)
        low = "in fp8, and comes back in bf16" if s.precision.linear == "fp8" else "as activations"
        out.append(
            f"{how}; it goes {low}, and its gradient likewise; beside it a rank computes only what "
            "a schedule of pairs gives it"
        )
    return out


def _sums(s: Scenario) -> list[str]:
    held = expert_replicas(s)
    if held == 1:
        return []
    states = ", which divide their states" if expert_shards(s) > 1 else ""
    return [f"gradients of experts are summed over the {held} ranks that hold the same{states}"]
