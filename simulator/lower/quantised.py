"""Linear products in fp8: what is cast, moved, kept and gathered in place of bf16.

As Transformer Engine trains with one scale a tensor (Micikevicius et al., 2022, arXiv 2209.05433):
the input, the weight and the gradient of the output are cast before the product that reads them,
and the result is bf16. Up to Hopper a product reads both operands along k, so that the gradients
need transposed copies too; Blackwell's reads either way. The cast input stays for the weight's
gradient, at a byte an element. The gradient of a bias is summed while the output's is cast.

In MXFP8 (Rouhani et al., 2023, arXiv 2310.10537; OCP Microscaling Formats 1.0) each 32 elements in
a row along k share a scale of a byte, so that the products along the other dimension need a copy of
their own, cast from the same bf16: no tensor is read twice, and no copy turned into the other.
"""

from __future__ import annotations

from dataclasses import replace

from simulator.lower.operators import Along, Beside, Elements, Operator, Part, streaming
from simulator.program import Flow, Kernel

FP8 = "fp8"


def in_fp8(o: Operator, e: Elements, *, divided: tuple[int, int] = (1, 1)) -> Operator:
    """Return a linear operator with its products in fp8.

    Args:
        o: as `operators.linear` makes it, in bf16.
        e: bytes of elements, and what casting one moves.
        divided: ranks that each cast a part of the input, and of the gradient of the output, and
            gather the others' parts.
    """
    batch, tokens, outputs, inputs = _shape(o.forward[0])
    sizes = (batch * tokens * inputs, batch * tokens * outputs)
    casts = [
        _cast(name, e, size, ranks)
        for name, size, ranks in zip((o.name, f"{o.name} grad"), sizes, divided, strict=True)
    ]
    wgrad = [p for p in o.weight_grad if isinstance(p, Kernel) and not p.name.endswith("bias grad")]
    return replace(
        o,
        forward=(casts[0], *(_low(p, e) for p in o.forward)),
        input_grad=(casts[1], *(_low(p, e) for p in o.input_grad)),
        weight_grad=tuple(_low(p, e) for p in wgrad),
        kept_bytes=e.low * sizes[0],
        output_grad_bytes=e.low * sizes[1],
    )


def _shape(part: Part) -> tuple[int, int, int, int]:
    assert isinstance(part, Kernel)
    assert part.matmul is not None
    return part.matmul


def _cast(name: str, e: Elements, size: float, ranks: float = 1) -> Kernel:
    """Cast `size` elements; those that other ranks have cast are transposed as they lie, or come
    in both copies.
    """
    moved = (e.cast + e.transposed) * size / (ranks if e.directed else 1)
    if ranks > 1 and not e.directed:
        moved = e.cast * size / ranks + 2 * e.transposed * size
    return Kernel(f"{name} cast", float(size), float(moved), "fp32")


def _low(part: Part, e: Elements) -> Part:
    """Return a product that reads each element in fp8; other parts as they are."""
    if not isinstance(part, Kernel) or part.matmul is None:
        return part
    batch, m, n, k = part.matmul
    saved = (e.activation - e.low) * batch * (m * k + k * n)
    return replace(part, dtype=FP8, bytes=part.bytes - saved)


def gathered_in_fp8(o: Operator, e: Elements) -> Operator:
    """Return an entrance or exit of a tensor-parallel region that gathers elements in fp8."""

    def short(part: Part) -> Part:
        if isinstance(part, (Along, Beside)):
            flow = short(part.flow)
            assert isinstance(flow, Flow)
            return part._replace(flow=flow)
        if isinstance(part, Flow) and part.name == "all_gather":
            return replace(part, bytes=part.bytes * e.low / e.activation)
        return part

    return replace(
        o,
        forward=tuple(map(short, o.forward)),
        input_grad=tuple(map(short, o.input_grad)),
        regathered=tuple(flow for flow in map(short, o.regathered) if isinstance(flow, Flow)),
    )


def weights_cast_in_forward(o: Operator, e: Elements) -> Operator:
    """Return an operator whose forward casts the weights that it has just gathered.

    They stay cast until its backward, as torchao's do; both copies where there are two.
    """
    size = fp8_weights((o,))
    if not size:
        return o
    other = e.transposed if e.directed else 0.0
    cast = Kernel(f"{o.name} weight cast", float(size), (e.cast + other) * size, "fp32")
    kept = o.kept_bytes + (e.low + other) * size
    return replace(o, forward=(cast, *o.forward), kept_bytes=kept)


def weights_turned_in_backward(o: Operator) -> Operator:
    """Return an operator whose backward transposes the fp8 weights that it has just gathered."""
    size, first = fp8_weights((o,)), len(o.regathered)
    if not size:
        return o
    turn = Kernel(f"{o.name} weight transpose", 0.0, float(2 * size), "fp32")
    return replace(o, input_grad=(*o.input_grad[:first], turn, *o.input_grad[first:]))


def fp8_weights(operators: tuple[Operator, ...]) -> int:
    """Return the parameters of one rank that forward multiplies with in fp8."""
    products = [p for o in operators for p in o.forward if isinstance(p, Kernel) and p.dtype == FP8]
    return sum(batch * n * k for batch, _, n, k in map(_shape, products))


def weight_cast(e: Elements, params: int, ranks: float = 1) -> Kernel:
    """Cast weights once a step, where they are held in full: both copies serve all microbatches.

    Each of several `ranks` casts its own part.
    """
    return _cast("weight", e, params, ranks)


def own_weight_cast(e: Elements, params: int, ranks: int) -> Kernel:
    """Cast a rank's part of weights once a step, where they are gathered in fp8 for each use."""
    size = params / ranks
    moved = (e.cast + e.transposed * e.directed) * size
    return streaming("weight cast", size, moved)
