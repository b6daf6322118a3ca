"""A mixture of experts as operators: router, dispatch, experts, combination, shared experts.

Each rank routes the tokens that it norms. Copies of them, one for each expert of a token, are
ordered by expert, exchanged all to all over the ranks that hold the experts (expert parallelism:
Lepikhin et al., 2020, arXiv 2006.16668), multiplied in one grouped product for all experts of a
rank, exchanged back and summed with their weights, as Megatron-LM's `MoEAlltoAllTokenDispatcher`
does. Where experts are divided too, their ranks gather each other's tokens before and scatter the
sums of results after. Backward takes the same way.

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
from simulator.lower.shapes import Routing, Shapes
from simulator.program import Flow, Kernel

ROW = 4
"""Bytes of the place of one copy of a token, kept to bring it back."""


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
    assert model.num_experts is not None
    assert model.moe_intermediate_size is not None
    e, r, h = x.elements, x.routing, model.hidden_size
    tokens, found = x.local_tokens, rows(model, x.routing, x.local_tokens)
    size = float(tokens * h)
    inner = model.moe_intermediate_size // r.etp
    there = r.etp * found.fullest
    shared = _shared(model, x)
    up = (2 if model.gated_mlp else 1) * inner
    whole = 2.0 * tokens * model.experts_per_token * h  # FLOPs that the model asks for
    count = model.num_experts // r.ep

    def product(name: str, inputs: int, outputs: int) -> Operator:
        asked = whole * inputs * outputs / h * r.etp
        return grouped(
            name, e, experts=count, rows=there, inputs=inputs, outputs=outputs, asked=asked
        )

    exchanged = found.fullest * copies(model, r) / model.experts_per_token * h * e.activation
    gathered = float(there * h * e.activation)
    sorts = r.ep > 1 and count > 1
    routed = (
        _permutation("dispatch", e, before=size, after=found.sent * h, places=found.sent),
        *_exchange("to experts", "all_to_all", "all_to_all", exchanged, "ep", r.ep, e),
        *_exchange("gather", "all_gather", "reduce_scatter", gathered, "etp", r.etp, e),
        *([_permutation("sort", e, before=there * h, after=there * h)] if sorts else []),
        product("expert fc1", h, up),
        op.activation(model.activation, e, size=there * inner, gated=model.gated_mlp),
        product("expert fc2", inner, h),
        *([_permutation("unsort", e, before=there * h, after=there * h)] if sorts else []),
        *_exchange("scatter", "reduce_scatter", "all_gather", gathered, "etp", r.etp, e),
        *_exchange("from experts", "all_to_all", "all_to_all", exchanged, "ep", r.ep, e),
        _combination(e, size=size, copies=found.sent * h, places=found.sent, adds=bool(shared)),
    )
    waiting = e.activation * size
    if shared:  # its result waits for the experts', and in backward their gradient for its own
        routed = tuple(replace(o, forward_bytes=o.forward_bytes + waiting) for o in routed)
        shared = tuple(replace(o, backward_bytes=o.backward_bytes + waiting) for o in shared)
    return (_router(model, x), _routing(model, x), *shared, *routed)


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


def _routing(model: Model, x: Shapes) -> Operator:
    """Return the choice of experts from scores in fp32, which are kept for backward."""
    assert model.num_experts is not None
    size = float(x.local_tokens * model.num_experts)
    moved = size * (x.elements.activation + 2 * FP32)
    return Operator(
        name="routing",
        forward=(Kernel("routing", 5 * size, moved, "fp32"),),
        input_grad=(Kernel("routing grad", 2 * size, moved, "fp32"),),
        kept_bytes=FP32 * size,
        forward_bytes=x.elements.activation * size,
        backward_bytes=x.elements.activation * size,
    )


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


def _permutation(
    name: str, e: Elements, *, before: float, after: float, places: float = 0.0
) -> Operator:
    """Copy rows into another order; backward sums the copies of a row. `places` are kept."""
    return op.pointwise(
        name, e, reads=before, writes=after, grad_reads=after, grad_writes=before,
        kept_bytes=ROW * places, passing=(before + after, before + after), flops_per_element=0,
    )  # fmt: skip


def _combination(e: Elements, *, size: float, copies: float, places: float, adds: bool) -> Operator:
    """Sum the results of a token's experts by their weights, and the shared ones' result.

    The results and the weights are kept for each other's gradients.
    """
    return op.pointwise(
        "combine", e, reads=copies + (size if adds else 0), writes=size,
        grad_reads=size + copies, grad_writes=copies,
        kept_bytes=e.activation * copies + FP32 * places, passing=(size, copies),
        flops_per_element=2,
    )  # fmt: skip


def _exchange(
    name: str, there: str, back: str, size: float, axis: str, degree: int, e: Elements
) -> tuple[Operator, ...]:
    """Return a collective over an axis, and the one in backward; none where it has one rank."""
    if degree == 1:
        return ()

    def one(flow: str) -> tuple[Part, ...]:
        return (Along(Flow(flow, size), axis),)

    return (Operator(name=name, forward=one(there), input_grad=one(back)),)


def grouped(
    name: str, e: Elements, *, experts: int, rows: float, inputs: int, outputs: int, asked: float
) -> Operator:
    """Multiply rows of several experts, each with its own weight, in one kernel; keeps its input.

    Args:
        name: of the operator.
        e: bytes of elements.
        experts: of the rank.
        rows: of all of them; tiles count as if each had as many.
        inputs: of one weight.
        outputs: of one weight.
        asked: FLOPs by the MFU convention, whatever is dropped, padded or uneven.
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
    return in_fp8(o, e) if e.cast else o
