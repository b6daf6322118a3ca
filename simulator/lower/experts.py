"""A mixture of experts as operators: router, dispatch, experts, combination, shared experts.

Each rank routes the tokens that it norms. Copies of them, one for each expert of a token, are
ordered by expert, exchanged all to all over the ranks that hold the experts (expert parallelism:
Lepikhin et al., 2020, arXiv 2006.16668), multiplied in one grouped product for all experts of a
rank, weighted in the activation, exchanged back and summed, as Megatron-LM's
`MoEAlltoAllTokenDispatcher` does. Where experts are divided too, their ranks gather each other's
tokens before and scatter the sums of results after. Backward takes the same way.

All ranks of a layer meet in these exchanges, so that the slowest counts: every rank is taken to
have what the fullest one has, its rows in the products of experts and its bytes in the exchanges.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from simulator.describe.model import Model
from simulator.lower import operators as op
from simulator.lower.operators import FP32, Along, Elements, Operator, Part
from simulator.lower.parallel import linear, parallel
from simulator.lower.quantised import in_fp8
from simulator.lower.routing import PLACE, choice, counts, permutation, unpermutation
from simulator.lower.routing import rows as moving_rows
from simulator.lower.shapes import Routing, Shapes
from simulator.program import Flow, Kernel

FP8_ROWS = 16
"""Rows of an expert that products in fp8 need a multiple of."""


class Rows(NamedTuple):
    """Copies of tokens that one layer makes."""

    sent: float
    """Those that a rank makes of its own tokens."""
    fullest: float
    """Those that arrive at the rank whose experts get most, from all ranks that send there."""
    dropped: float
    """Share of the copies asked for that find no place."""


@lru_cache(maxsize=256)
def rows(model: Model, routing: Routing, tokens: int) -> Rows:
    """Return the copies that a layer makes of `tokens` tokens a rank.

    With a capacity an expert takes at most ceil(capacity x tokens x experts a token / experts) of
    each rank, and just as many where they are padded (Megatron-LM's `get_capacity`).
    """
    assert model.num_experts is not None
    pairs = float(tokens * model.experts_per_token)
    share = 1 / model.num_experts if routing.load is None else np.array(routing.load)
    wanted = np.broadcast_to(share * pairs, model.num_experts)
    given, dropped = wanted, 0.0
    if routing.capacity is not None:
        most = float(math.ceil(routing.capacity * pairs / model.num_experts))
        given = np.minimum(wanted, most)
        dropped = 1 - float(given.sum()) / pairs
        if routing.padded:
            given = np.full(model.num_experts, most)
    by_rank = given.reshape(routing.ep, -1).sum(axis=1)
    return Rows(float(given.sum()), routing.ep * float(by_rank.max()), max(0.0, dropped))


def copies(model: Model, routing: Routing) -> int:
    """Return how often a token is sent: to each of its experts, ranks or nodes once.

    Of nodes a token reaches `topk_group` at most; it goes on inside them over their own links
    while the next ones arrive.
    """
    most = {
        "all_to_all": model.experts_per_token,
        "deduplicated": routing.ep,
        "node_limited": model.topk_group,
    }[routing.dispatch]
    return min(model.experts_per_token, most)


def experts(model: Model, x: Shapes) -> tuple[Operator, ...]:
    """Return the operators of a layer's experts, from the normed tokens to their sum."""
    assert model.moe_intermediate_size is not None
    shared, routed = _shared(model, x), _routed(model, x)
    waiting = x.elements.activation * float(x.local_tokens * model.hidden_size)
    if shared:  # its result waits for the experts', and in backward their gradient for its own
        routed = tuple(replace(o, forward_bytes=o.forward_bytes + waiting) for o in routed)
        shared = tuple(replace(o, backward_bytes=o.backward_bytes + waiting) for o in shared)
    return (_router(model, x), choice(model, x), *counts(model, x), *shared, *routed)


def _routed(model: Model, x: Shapes) -> tuple[Operator, ...]:
    """Return the way of copies of tokens to experts and back.

    With `run.fp8_dispatch` they go there as bytes, cast before, and so do the gradients of what
    comes back.
    """
    assert model.num_experts is not None
    assert model.moe_intermediate_size is not None
    e, r, h, tokens = x.elements, x.routing, model.hidden_size, x.local_tokens
    found, per_token = rows(model, r, tokens), model.experts_per_token
    here, there, size = found.sent * h, r.etp * found.fullest, float(tokens * h)
    inner, count = model.moe_intermediate_size // r.etp, model.num_experts // r.ep
    up = (2 if model.gated_mlp else 1) * inner
    low = 1 / e.activation if r.fp8 and r.ep > 1 else 1.0
    cast = per_token if low < 1 else 1
    sent = copies(model, r) / per_token  # of the copies that ask for an expert
    direct = r.dispatch == "all_to_all"  # rows are ordered before they are sent

    def product(name: str, inputs: int, outputs: int, divided: tuple[int, int]) -> Operator:
        return grouped(
            name, e, experts=count, rows=there, inputs=inputs, outputs=outputs,
            asked=2.0 * tokens * per_token * r.etp * inputs * outputs, divided=divided,
        )  # fmt: skip

    # copies of tokens as ranks exchange them, of a rank's own tokens and of those that it gets
    own, others = sent * here, sent * there * h
    exchanged, weights = sent * found.fullest * h, FP32 * found.fullest if direct else 0.0
    finds = r.fusion != "none" and not r.padded
    weighted = op.activation(model.activation, e, size=there * inner, gated=model.gated_mlp)
    shared = model.num_shared_experts > 0
    ordered = permutation(
        model, x, before=size if direct else others, after=here if direct else there * h,
        columns=model.num_experts if direct else count, low=low,
    )  # fmt: skip
    if direct:
        first, last = ordered, unpermutation(
            "combine", x, before=here, after=size, low=low, shared=shared
        )  # fmt: skip
        sort = _sorting("sort", x, there * h, there, low=(low, 1), weights=not finds, finds=finds)
        unsort = _sorting("unsort", x, there * h, there, low=(1, low), finds=finds)
    else:
        first, sort = _summed_copies(e, own, size), ordered
        unsort = unpermutation("unsort", x, before=there * h, after=others, low=low)
        last = _combination(e, size=size, copies=own, shared=shared, low=low)
    ways = [
        first,
        _exchange("to experts", x, exchanged, (low, 1), weights),
        _gathering("gather", e.activation * others, "etp", low),
        sort,
        _sorting("pad", x, there * h, there, weights=True),
        product("expert fc1", h, up, (cast, 1)),
        replace(weighted, kept_bytes=weighted.kept_bytes + FP32 * there),
        product("expert fc2", inner, h, (1, cast)),
        _sorting("unpad", x, there * h, there),
        unsort,
        _scattering("scatter", e.activation * others, "etp", low),
        _exchange("from experts", x, exchanged, (1, low)),
        last,
    ]
    alone, padded = direct and (r.ep == 1 or count == 1), _is_padded(model, x)
    absent = {
        "to experts": r.ep == 1, "from experts": r.ep == 1, "gather": r.etp == 1,
        "scatter": r.etp == 1, "sort": alone, "unsort": alone, "pad": not padded,
        "unpad": not padded,
    }  # fmt: skip
    return tuple(o for o in ways if not absent.get(o.name))


def _is_padded(model: Model, x: Shapes) -> bool:
    """Return whether rows of each expert are copied once more, to a number that fp8 multiplies.

    Transformer Engine's `Fp8Padding`, which does nothing where the number is a multiple already.
    """
    r = x.routing
    if not x.elements.cast or r.fusion == "all":
        return False
    each = rows(model, r, x.local_tokens).sent / (model.num_experts or 1)
    return not (r.padded and each % FP8_ROWS == 0)


def _router(model: Model, x: Shapes) -> Operator:
    """Return the product that scores experts, which each rank holds whole, in `matmul` precision.

    It keeps the normed tokens for what reads them after it too.
    """
    assert model.num_experts is not None
    o = op.linear(
        "router", x.elements, tokens=x.local_tokens, inputs=model.hidden_size,
        outputs=model.num_experts, bias=False,
    )  # fmt: skip
    return replace(o, repeated=True)


def _shared(model: Model, x: Shapes) -> tuple[Operator, ...]:
    """Return the shared experts, one MLP that is divided over tp like a dense layer's."""
    if not model.num_shared_experts:
        return ()
    assert model.moe_intermediate_size is not None
    e, h = x.elements, model.hidden_size
    inner = model.num_shared_experts * model.moe_intermediate_size // x.tp
    up = (2 if model.gated_mlp else 1) * inner
    fc1 = linear("shared fc1", x, inputs=h, outputs=up, bias=False, divided=(x.divided, 1))
    if not e.cast:  # the router keeps its input
        fc1 = replace(fc1, kept_bytes=0.0)
    return parallel(
        x, h, fc1,
        op.activation(model.activation, e, size=x.tokens * inner, gated=model.gated_mlp),
        linear("shared fc2", x, inputs=inner, outputs=h, bias=False, divided=(1, x.divided)),
    )  # fmt: skip


def _sorting(
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
        forward=(*found, moving_rows(name, e, size, size, low=there), *beside),
        input_grad=(moving_rows(f"{name} grad", e, size, size, low=back), *beside),
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
        input_grad=(moving_rows("send grad", e, copies, size),),
        backward_bytes=e.activation * (copies + size),
    )


def _combination(e: Elements, *, size: float, copies: float, shared: bool, low: float) -> Operator:
    """Sum what comes back for a token, as DeepEP's combine does, and the shared experts' result."""
    added = (moving_rows("shared sum", e, 2 * size, size),) if shared else ()
    cast = (moving_rows("combine grad", e, size, size, low=low),) if low < 1 else ()
    return Operator(
        name="combine",
        forward=(moving_rows("combine", e, copies, size), *added),
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


def grouped(
    name: str, e: Elements, *, experts: int, rows: float, inputs: int, outputs: int, asked: float,
    divided: tuple[int, int] = (1, 1),
) -> Operator:  # fmt: skip
    """Multiply rows of several experts, each with its own weight, in one kernel; keeps its input.

    Args:
        name: of the operator.
        e: bytes of elements.
        experts: of the rank.
        rows: of all of them; tiles count as if each had as many.
        inputs: of one weight.
        outputs: of one weight.
        asked: FLOPs by the MFU convention, whatever is dropped, padded or uneven.
        divided: those of `quantised.in_fp8`: copies that one cast serves.
    """
    m, weights = max(1, math.ceil(rows / experts)), float(experts * inputs * outputs)
    moved, flops = e.activation * rows * (inputs + outputs), 2.0 * rows * inputs * outputs
    written = {"fused": 2 * e.gradient, "separate": e.activation, "none": e.gradient}

    def kernel(label: str, each: float, shape: tuple[int, int, int]) -> Kernel:
        return Kernel(label, flops, moved + each * weights, e.matmul, (experts, *shape))

    wgrad = kernel(f"{name} wgrad", written[e.accumulation], (inputs, outputs, m))
    weight_grad: tuple[Part, ...] = (wgrad,)
    if e.accumulation == "separate":
        added = (e.activation + 2 * e.gradient) * weights
        weight_grad = (wgrad, Kernel(f"{name} accumulation", weights, added, "fp32"))
    apart = e.accumulation == "separate" or (e.accumulation == "fused" and e.placeholder)
    o = Operator(
        name=name,
        forward=(kernel(name, e.activation, (m, outputs, inputs)),),
        input_grad=(kernel(f"{name} dgrad", e.activation, (m, inputs, outputs)),),
        weight_grad=weight_grad,
        kept_bytes=e.activation * rows * inputs,
        forward_bytes=e.activation * rows * outputs,
        backward_bytes=moved + (e.weight * weights if apart else 0),
        weight_grad_bytes=e.weight * weights if apart else 0.0,
        output_grad_bytes=e.activation * rows * outputs,
        params=experts * inputs * outputs,
        matrices=((inputs, outputs),) * experts,
        model_flops=asked,
        expert=True,
    )
    return in_fp8(o, e, divided=divided) if e.cast else o
