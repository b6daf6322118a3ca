"""How copies of tokens reach experts and come back, by `plan.expert_dispatch`."""

from __future__ import annotations

from typing import NamedTuple

from simulator.describe.model import Model
from simulator.lower.operators import FP32, Along, Elements, Operator
from simulator.lower.routing import PLACE, moving, permutation, unpermutation
from simulator.lower.shapes import Shapes
from simulator.program import Flow, Kernel


class Sizes(NamedTuple):
    """What the ways to experts move: elements, but for `places`."""

    tokens: float
    """Of a rank's own tokens."""
    own: float
    """Of their copies, one an expert."""
    places: float
    """Rows that the experts of a rank get, with those of the ranks that divide them."""
    arrived: float
    """Of these rows."""
    weights: float
    """Bytes of the weights of copies that a rank gets."""
    sent: float
    """Of a token's copies those that are exchanged."""
    low: float
    """Share of an element's bytes that goes to experts, and that comes back in backward."""


class Way(NamedTuple):
    """Operators between a layer's tokens and its experts, and back."""

    there: tuple[Operator, ...]
    back: tuple[Operator, ...]


def _each_copy(model: Model, x: Shapes, n: Sizes) -> Way:
    """Order copies by expert, exchange them and sort those of each rank (all-to-all dispatch)."""
    assert model.num_experts is not None
    r, low = x.routing, n.low
    finds = r.fusion != "none" and not r.padded
    alone = model.num_experts == r.ep or (r.padded and r.ep * r.etp == 1)
    shared, columns = model.num_shared_experts > 0, model.num_experts
    gathered, exchanged = x.elements.activation * n.arrived, n.arrived / r.etp
    there = (
        permutation(model, x, before=n.tokens, after=n.own, columns=columns, low=low),
        _exchange("to experts", x, exchanged, (low, 1), n.weights),
        _gathering("gather", gathered, "etp", low),
        sorting(
            "sort", x, n.arrived, n.places, low=(low, 1), weights=not finds, finds=finds
        ),
    )  # fmt: skip
    back = (
        sorting("unsort", x, n.arrived, n.places, low=(1, low), finds=finds),
        _scattering("scatter", gathered, "etp", low),
        _exchange("from experts", x, exchanged, (1, low)),
        unpermutation("combine", x, before=n.own, after=n.tokens, low=low, shared=shared),
    )
    return Way(there[: 3 if alone else 4], back[1 if alone else 0 :])


def _each_token(model: Model, x: Shapes, n: Sizes) -> Way:
    """Send a token once to where its experts are, and order its copies there (DeepEP)."""
    assert model.num_experts is not None
    r, low, e = x.routing, n.low, x.elements
    own, arrived = n.sent * n.own, n.sent * n.arrived
    columns, shared = model.num_experts // r.ep, model.num_shared_experts > 0
    there = (
        _summed_copies(e, own, n.tokens),
        _exchange("to experts", x, arrived / r.etp, (low, 1)),
        _gathering("gather", e.activation * arrived, "etp", low),
        permutation(model, x, before=arrived, after=n.arrived, columns=columns, low=low),
    )
    back = (
        unpermutation("unsort", x, before=n.arrived, after=arrived, low=low),
        _scattering("scatter", e.activation * arrived, "etp", low),
        _exchange("from experts", x, arrived / r.etp, (1, low)),
        _combination(e, size=n.tokens, copies=own, shared=shared, low=low),
    )
    return Way(there, back)


def _all_tokens(model: Model, x: Shapes, n: Sizes) -> Way:
    """Gather the tokens of all ranks, with their tables, and sum results over all of them.

    Each rank then takes copies of those that its experts get, and writes results for all.
    """
    assert model.num_experts is not None
    r, e = x.routing, x.elements
    whole, pairs = r.ep * r.etp * n.tokens, r.ep * x.local_tokens * model.num_experts
    size = e.activation * whole / r.etp
    table = Operator(
        name="tables",
        forward=tuple(Along(Flow("all_gather", float(each * pairs)), "ep")
                      for each in (1, e.activation)),
        input_grad=(Along(Flow("reduce_scatter", float(e.activation * pairs)), "ep"),),
    )  # fmt: skip
    columns, shared = model.num_experts // r.ep, model.num_shared_experts > 0
    added = moving("shared sum", e, 2 * n.tokens, n.tokens)
    there = (
        *([table] if r.ep > 1 else []),
        _gathering("to experts", size, "ep", 1.0),
        _gathering("gather", e.activation * whole, "etp", 1.0),
        permutation(model, x, before=whole, after=n.arrived, columns=columns, low=1.0),
    )
    back = (
        unpermutation("unsort", x, before=n.arrived, after=whole, low=1.0),
        _scattering("scatter", e.activation * whole, "etp", 1.0),
        _scattering("from experts", size, "ep", 1.0),
        *([Operator(name="combine", forward=(added,))] if shared else []),
    )
    return Way(there, back)


WAYS = {
    "all_to_all": _each_copy,
    "deduplicated": _each_token,
    "node_limited": _each_token,
    "all_gather": _all_tokens,
}
"""How tokens reach experts, by `plan.expert_dispatch`."""


def sorting(
    name: str, x: Shapes, size: float, places: float, *, low: tuple[float, float] = (1.0, 1.0),
    weights: bool = False, finds: bool = False,
) -> Operator:  # fmt: skip
    """Copy rows into another order, runs of them as a whole.

    Args:
        name: of the operator.
        x: how tokens are routed.
        size: elements of the rows.
        places: rows.
        low: shares of the bytes of an element that are moved forward and backward.
        weights: whether the weights of the rows are copied too.
        finds: whether a kernel finds the places of rows first; they are kept.
    """
    e, there, back = x.elements, *low
    beside = (Kernel(f"{name} weights", 0.0, 2 * FP32 * places, "fp32"),) if weights else ()
    found = (Kernel(f"{name} places", 0.0, PLACE * places, "fp32"),) if finds else ()
    return Operator(
        name=name,
        forward=(*found, moving(name, e, size, size, low=there), *beside),
        input_grad=(moving(f"{name} grad", e, size, size, low=back), *beside),
        kept_bytes=PLACE * places if finds else 0.0,
        forward_bytes=2 * there * e.activation * size,
        backward_bytes=2 * back * e.activation * size,
    )


def _summed_copies(e: Elements, copies: float, size: float) -> Operator:
    """Send each token to where its experts are; backward sums the gradients that come back.

    Nothing is copied before: DeepEP's dispatch reads the tokens as it sends them.
    """
    return Operator(
        name="send",
        input_grad=(moving("send grad", e, copies, size),),
        backward_bytes=e.activation * (copies + size),
    )


def _combination(e: Elements, *, size: float, copies: float, shared: bool, low: float) -> Operator:
    """Sum what comes back for a token, as DeepEP's combine does, and the shared experts' result."""
    added = (moving("shared sum", e, 2 * size, size),) if shared else ()
    cast = (moving("combine grad", e, size, size, low=low),) if low < 1 else ()
    return Operator(
        name="combine",
        forward=(moving("combine", e, copies, size), *added),
        input_grad=cast,
        forward_bytes=e.activation * size,
    )


def _exchange(
    name: str, x: Shapes, size: float, low: tuple[float, float], weights: float = 0.0
) -> Operator:
    """Return an all-to-all of `size` elements, and the one in backward, shares `low` of each.

    Another one follows with `weights` bytes of the weights of copies, or their gradients.
    """
    beside = (Along(Flow("all_to_all", weights), "ep"),) if weights else ()
    there, back = (
        Along(Flow("all_to_all", share * x.elements.activation * size), "ep") for share in low
    )
    return Operator(name=name, forward=(there, *beside), input_grad=(back, *beside))


def _gathering(name: str, size: float, axis: str, low: float) -> Operator:
    gather, sums = Flow("all_gather", size * low), Flow("reduce_scatter", size)
    return Operator(name=name, forward=(Along(gather, axis),), input_grad=(Along(sums, axis),))


def _scattering(name: str, size: float, axis: str, low: float) -> Operator:
    gather, sums = Flow("all_gather", size * low), Flow("reduce_scatter", size)
    return Operator(name=name, forward=(Along(sums, axis),), input_grad=(Along(gather, axis),))
