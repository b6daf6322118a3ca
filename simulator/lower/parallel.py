"""Operators of a layer as tensor parallelism divides them: Megatron-LM's regions and their ends."""

from __future__ import annotations

from dataclasses import replace

from simulator.describe.model import Model
from simulator.lower import operators as op
from simulator.lower import plain
from simulator.lower.operators import Operator
from simulator.lower.quantised import gathered_in_fp8, in_fp8
from simulator.lower.shapes import Shapes
from simulator.program import Flow


def parallel(x: Shapes, hidden: int, first: Operator, *rest: Operator) -> tuple[Operator, ...]:
    """Wrap operators whose inner dimension is divided over the tensor-parallel ranks."""
    return (*opened(x, hidden, first), *rest[:-1], *closed(x, hidden, rest[-1]))


def opened(x: Shapes, hidden: int, first: Operator) -> tuple[Operator, ...]:
    """Return the first product of a region of a layer, behind its entrance."""
    if x.tp == 1:
        return (first,)
    enter, first = entrance(x, hidden, first, in_layer=True)
    if x.elements.cast:
        enter, first = (gathered_in_fp8(o, x.elements) for o in (enter, first))
    if x.plain:
        return enter if x.tp_overlap == "all" else _copied(x, enter, compiled=x.compiled), first
    return op.beside(enter, first) if x.tp_overlap == "all" else (enter, first)


def closed(x: Shapes, hidden: int, last: Operator) -> tuple[Operator, ...]:
    """Return the last product of a region of a layer, before its exit."""
    if x.tp == 1:
        return (last,)
    leave = _exit(x, hidden)
    if x.elements.cast:
        leave = gathered_in_fp8(leave, x.elements)
    if x.plain:
        return last, leave if x.tp_overlap == "all" else _copied(x, leave, compiled=x.compiled)
    if x.tp_overlap == "all":
        leave, last = op.beside(leave, last)
    return (last, leave)


def linear(
    name: str, x: Shapes, *, inputs: int, outputs: int, bias: bool, divided: tuple[int, int]
) -> Operator:
    """Return a linear operator of a layer; `divided` are those of `quantised.in_fp8`."""
    e = x.elements
    o = op.linear(name, e, tokens=x.tokens, inputs=inputs, outputs=outputs, bias=bias)
    return in_fp8(o, e, divided=divided) if e.cast else o


def repeated(name: str, x: Shapes, *, inputs: int, outputs: int) -> Operator:
    """Return a linear operator that every tp rank holds whole, for the tokens that it norms."""
    e = x.elements
    o = op.linear(name, e, tokens=x.local_tokens, inputs=inputs, outputs=outputs, bias=False)
    return replace(in_fp8(o, e) if e.cast else o, repeated=True)


def entrance(
    x: Shapes, hidden: int, product: Operator, tokens: int | None = None, *, in_layer: bool = False
) -> tuple[Operator, Operator]:
    """Return the entrance of a region for `hidden` numbers a token, and the product it feeds."""
    size = float(x.elements.activation * (tokens or x.tokens) * hidden)
    if x.plain:
        enter = op.entering_tensor_parallel(size, sequence=x.sequence_parallel)
        return enter if in_layer else _copied(x, enter, compiled=False), product
    return op.first_of_region(
        product, size, x.tp, sequence=x.sequence_parallel, overlap=x.tp_overlap != "none"
    )


def leaving(x: Shapes, hidden: int) -> Operator:
    """Return the sum of the partial results of a region, `hidden` numbers a token."""
    leave = _exit(x, hidden)
    return _copied(x, leave, compiled=False) if x.plain else leave


def _exit(x: Shapes, hidden: int) -> Operator:
    size = float(x.elements.activation * x.tokens * hidden)
    return op.leaving_tensor_parallel(size, sequence=x.sequence_parallel)


def _copied(x: Shapes, o: Operator, *, compiled: bool) -> Operator:
    """Return an entrance or exit whose collectives copy what they gather or scatter."""
    size = max(part.bytes for part in (*o.forward, *o.input_grad) if isinstance(part, Flow))
    return plain.with_copies(o, size, scatter_is_copied=not compiled)


def norm(name: str, model: Model, x: Shapes) -> Operator:
    """Return the norm of the tokens that a rank holds."""
    bias = model.norm == "layer_norm"
    return op.norm(name, x.elements, tokens=x.local_tokens, hidden=model.hidden_size, bias=bias)
