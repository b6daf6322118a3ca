"""A mixture of experts as operators: router, dispatch, experts, combination, shared experts.

Each rank routes the tokens that it norms. Copies of them, one for each expert of a token, are
ordered by expert, exchanged all to all over the ranks that hold the experts (expert parallelism:
Lepikhin et al., 2020, arXiv 2006.16668), multiplied, a product for each expert of a rank
(`hardware.grouped`), weighted in the activation, exchanged back and summed, as Megatron-LM's
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
from simulator.lower.dispatch import WAYS, Sizes, sorting
from simulator.lower.operators import FP32, Elements, Operator, Part, streaming
from simulator.lower.parallel import linear, parallel
from simulator.lower.quantised import in_fp8
from simulator.lower.routing import choice, counts
from simulator.lower.shapes import Routing, Shapes
from simulator.program import GROUPED, Kernel

FP8_ROWS = {False: 16, True: 32}
"""Rows of an expert that products in fp8 need a multiple of, by whether blocks have scales."""


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
        "all_gather": routing.ep,
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
    e, r, h = x.elements, x.routing, model.hidden_size
    found, count = rows(model, r, x.local_tokens), model.num_experts // r.ep
    places, inner = r.etp * found.fullest, model.moe_intermediate_size // r.etp
    up = (2 if model.gated_mlp else 1) * inner
    low = e.low / e.activation if r.fp8 and r.ep > 1 else 1.0
    cast = model.experts_per_token if low < 1 else 1
    asked = 2.0 * x.local_tokens * model.experts_per_token * r.etp

    def product(name: str, inputs: int, outputs: int, divided: tuple[int, int]) -> Operator:
        return grouped(
            name, e, experts=count, rows=places, inputs=inputs, outputs=outputs,
            asked=asked * inputs * outputs, divided=divided,
        )  # fmt: skip

    weighted = op.activation(model.activation, e, size=places * inner, gated=model.gated_mlp)
    sizes = Sizes(
        tokens=float(x.local_tokens * h), own=found.sent * h, places=places, arrived=places * h,
        weights=FP32 * found.fullest, sent=copies(model, r) / model.experts_per_token, low=low,
    )  # fmt: skip
    way = WAYS[r.dispatch](model, x, sizes)
    ways = [
        *way.there,
        sorting("pad", x, places * h, places, weights=True),
        product("expert fc1", h, up, (cast, 1)),
        replace(weighted, kept_bytes=weighted.kept_bytes + FP32 * places),
        product("expert fc2", inner, h, (1, cast)),
        sorting("unpad", x, places * h, places),
        *way.back,
    ]
    padded = _is_padded(model, x)
    absent = {
        "to experts": r.ep == 1, "from experts": r.ep == 1, "gather": r.etp == 1,
        "scatter": r.etp == 1, "pad": not padded, "unpad": not padded,
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
    return not (r.padded and each % FP8_ROWS[x.elements.directed] == 0)


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


def grouped(
    name: str, e: Elements, *, experts: int, rows: float, inputs: int, outputs: int, asked: float,
    divided: tuple[int, int] = (1, 1),
) -> Operator:  # fmt: skip
    """Multiply rows of several experts, each with its own weight; keeps its input.

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
        moved_in_all = moved + each * weights
        return Kernel(label, flops, moved_in_all, e.matmul, (experts, *shape), algorithm=GROUPED)

    wgrad = kernel(f"{name} wgrad", written[e.accumulation], (inputs, outputs, m))
    weight_grad: tuple[Part, ...] = (wgrad,)
    if e.accumulation == "separate":
        added = (e.activation + 2 * e.gradient) * weights
        weight_grad = (wgrad, streaming(f"{name} accumulation", weights, added))
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
