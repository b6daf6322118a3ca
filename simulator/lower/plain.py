"""A layer as torchtitan's code has torch run it (`run.layer_code` "torchtitan").

Its Llama (torchtitan/models/llama/model.py, December 2024) is written in torch's own operators:

- q, k and v are three products, and so are the gate and what it multiplies; the gradient of what
  they read is summed over them;
- rotary positions turn fp32 complex numbers, for which torch.compile has no kernels either;
- keys and values are repeated for each query head before attention;
- RMSNorm and the gated product are, unless compiled, a kernel for each term, norms in fp32.

Tensor parallelism is DTensor's: gathered inputs stay for the gradient of the weight, and since
collectives cut the first dimension but sequences are the second, what is gathered, and what is
scattered, is copied in between (`_functional_collectives.py`: all_gather_tensor,
reduce_scatter_tensor). Where layers are compiled the sum before a scatter writes that copy.

With `plan.tp_overlap` "all" (torch's asynchronous tensor parallelism, micro_pipeline_tp.py) a
gather is fused with the products that read it and a scatter with the product before it, in a piece
a rank (_symmetric_memory: _pipelined_multi_all_gather_and_consume, _pipelined_produce_and_all2all):
before a gather each rank copies its own piece out, and the product of the last piece follows its
arrival; the first product precedes a scatter, whose pieces are summed by a kernel at the end. A
scatter after a sum of several products is not fused. Two streams fill each other's last waves;
here each piece has its own.

Bytes are those that torch's eager kernels read and write (tests/test_torch_plain.py counts them).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from simulator.lower.operators import FP32, Beside, Elements, Operator, Part, batched_product
from simulator.program import Flow, Kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What of a layer its code depends on."""

    columns: dict[str, dict[str, int]]
    """Columns of the products that one operator stands for, by its name and theirs."""
    compiled: bool
    tp: int
    pipelined: bool
    """Whether collectives are fused with products."""


def as_written(layer: tuple[Operator, ...], e: Elements, w: Written) -> tuple[Operator, ...]:
    """Return the operators of a layer as torchtitan's code has them run."""
    out: list[Operator] = []
    for o in layer:
        if o.name in w.columns:
            out.append(_apart(o, e, w.columns[o.name], fused_sum=w.compiled))
        elif o.name in NORMS and not w.compiled:
            out.append(eager_norm(o, e))
        elif o.name == "rotary":
            out.append(_complex_rotary(o, e))
        elif o.name in ACTIVATIONS and not w.compiled:
            out.append(_eager_gate(o))
        else:
            out.append(o)
    return _pipelined(out, e, w.tp) if w.pipelined else tuple(out)


NORMS = ("attention norm", "mlp norm")
ACTIVATIONS = ("silu", "gelu", "relu", "relu2")


# --- element-wise -----------------------------------------------------------------------------


def eager_norm(o: Operator, e: Elements) -> Operator:
    """Return a norm in eight kernels, and sixteen in backward.

    Forward casts to fp32, squares, takes the mean, multiplies, casts back, multiplies with the
    weight: 36 bytes an element of two bytes. It keeps the fp32 input, and what the weight
    multiplies. Backward moves 92.
    """
    a, size = e.activation, o.kept_bytes / e.activation
    cast = a + FP32 if a < FP32 else 0
    return replace(
        o,
        forward=_kernels(o.forward, (2 * cast + 5 * FP32 + 2 * a) * size, 8),
        input_grad=_kernels(o.input_grad, (2 * cast + 17 * FP32 + 6 * a) * size, 16),
        kept_bytes=(FP32 + a) * size,
        forward_bytes=(FP32 + a) * size,
        backward_bytes=(4 * FP32 + 2 * a) * size,
    )


def _kernels(parts: tuple[Part, ...], moved: float, count: int) -> tuple[Part, ...]:
    """Return an element-wise kernel as `count` alike ones that move so many bytes in all."""
    (one,) = parts
    assert isinstance(one, Kernel)
    return (replace(one, flops=one.flops / count, bytes=moved / count, count=count),)


def _complex_rotary(o: Operator, e: Elements) -> Operator:
    """Return the rotation of queries and keys: cast, multiplied as complex numbers, cast back."""
    a = e.activation
    (one,) = o.forward
    assert isinstance(one, Kernel)
    size = one.bytes / (2 * a)
    moved = (2 * (a + FP32 if a < FP32 else 0) + 2 * FP32) * size
    return replace(
        o,
        forward=_kernels(o.forward, moved, 6),
        input_grad=_kernels(o.input_grad, moved, 6),
        forward_bytes=o.forward_bytes + 2 * FP32 * size,
        backward_bytes=o.backward_bytes + 2 * FP32 * size,
    )


def repeated_keys(e: Elements, *, queries: float, keys: float) -> Operator:
    """Repeat keys and values for every query head; backward sums over the copies.

    Args:
        e: bytes of an element.
        queries: elements of the queries, and of keys and of values afterwards.
        keys: those of the keys, and of the values, before.
    """
    moved = float(e.activation * (queries + keys))
    return Operator(
        name="repeat keys",
        forward=(Kernel("repeat keys", queries, moved, "fp32", count=2),),
        input_grad=(Kernel("repeat keys grad", queries, moved, "fp32", count=2),),
        forward_bytes=2 * moved,
        backward_bytes=2 * moved,
    )


def _eager_gate(o: Operator) -> Operator:
    """Return an activation function and the product it gates as kernels of their own.

    5 elements moved for each of the result forward, 9 in backward; the function's result is kept.
    """
    inputs = o.kept_bytes  # of both halves
    each = inputs / 2
    return replace(
        o,
        forward=_kernels(o.forward, 5 * each, 2),
        input_grad=_kernels(o.input_grad, 9 * each, 3),
        kept_bytes=3 * each,
    )


# --- products ---------------------------------------------------------------------------------


def _apart(o: Operator, e: Elements, columns: dict[str, int], *, fused_sum: bool) -> Operator:
    """Return an operator whose product is several, with those columns each.

    The gradient of what they read is a tensor of each, which `fused_sum` adds up in one kernel.
    """
    tokens, inputs = _shape(o.forward)[1], _shape(o.forward)[3]
    size, parts = float(e.activation * tokens * inputs), len(columns)
    count, moved = (1, (parts + 1) * size) if fused_sum else (parts - 1, 3 * size)
    summed = Kernel(f"{o.name} grad sum", float(tokens * inputs), moved, "fp32", count=count)
    return replace(
        o,
        forward=_split(o.forward, columns, 2, e),
        input_grad=(*_split(o.input_grad, columns, 3, e), summed),
        weight_grad=_split(o.weight_grad, columns, 2, e),
        backward_bytes=o.backward_bytes + size,
    )


def _split(
    parts: tuple[Part, ...], columns: dict[str, int], axis: int, e: Elements
) -> tuple[Part, ...]:
    """Return parts with each product as several along an axis of its shape."""
    out: list[Part] = []
    for part in parts:
        if not _is_product(part):
            out.append(part)
            continue
        assert isinstance(part, Kernel)
        for name, n in columns.items():
            shape = list(_shape((part,)))
            shape[axis] = n
            out.append(_sized(part, e, (shape[0], shape[1], shape[2], shape[3]), name))
    return tuple(out)


def _sized(kernel: Kernel, e: Elements, shape: tuple[int, int, int, int], name: str = "") -> Kernel:
    """Return a product of another shape that reads and writes the same bytes an element."""
    assert kernel.matmul is not None
    read = 1 if kernel.dtype == "fp8" else e.activation
    batch, m, n, k = kernel.matmul
    out = (kernel.bytes - read * batch * (m * k + k * n)) / (batch * m * n)
    batch, m, n, k = shape
    made = batched_product(kernel.name, e, *shape)
    moved = batch * (read * (m * k + k * n) + out * m * n)
    label = f"{kernel.name} {name}" if name else kernel.name
    return replace(kernel, name=label, flops=made.flops, bytes=moved, matmul=shape)


def _is_product(part: Part) -> bool:
    return isinstance(part, Kernel) and part.matmul is not None


def _shape(parts: Sequence[Part]) -> tuple[int, int, int, int]:
    shapes = [p.matmul for p in parts if isinstance(p, Kernel) and p.matmul is not None]
    return shapes[0]


# --- collectives ------------------------------------------------------------------------------


def copied(name: str, size: float) -> Kernel:
    """Return the kernel that reads so many bytes and writes them in another order."""
    return Kernel(f"{name} copy", 0.0, 2 * size, "fp32")


def with_copies(o: Operator, size: float, *, scatter_is_copied: bool) -> Operator:
    """Return the entrance or exit of a region with the copies around its collectives.

    Args:
        o: it.
        size: bytes that are gathered, or scattered, in all.
        scatter_is_copied: whether a copy of its own precedes a scatter in backward.
    """

    def one(parts: tuple[Part, ...], always: bool) -> tuple[Part, ...]:
        out: list[Part] = []
        for part in parts:
            assert isinstance(part, Flow)
            if part.name == "all_gather":
                out += [part, copied(o.name, part.bytes)]
            elif always:
                out += [copied(o.name, part.bytes), part]
            else:
                out.append(part)
        return tuple(out)

    return replace(
        o,
        forward=one(o.forward, always=True),
        input_grad=one(o.input_grad, always=scatter_is_copied),
        forward_bytes=o.forward_bytes + 2 * size,
        backward_bytes=o.backward_bytes + 2 * size,
    )


def _pipelined(layer: Sequence[Operator], e: Elements, tp: int) -> tuple[Operator, ...]:
    """Return a layer whose gathers and scatters are fused with the products beside them."""
    out: list[Operator] = []
    at = 0
    while at < len(layer):
        o = layer[at]
        if o.name == "enter tp":
            out += _gathered(o, layer[at + 1], e, tp)
            at += 2
        elif at + 1 < len(layer) and layer[at + 1].name == "leave tp":
            out += _scattered(o, layer[at + 1], e, tp)
            at += 2
        else:
            out.append(o)
            at += 1
    return tuple(out)


def _pieces(parts: tuple[Part, ...], e: Elements, tp: int, count: int) -> tuple[Part, ...]:
    """Return so many of the tp pieces, by tokens, of the products among parts."""
    out: list[Part] = []
    for part in parts:
        if _is_product(part):
            assert isinstance(part, Kernel)
            batch, m, n, k = _shape((part,))
            out.append(replace(_sized(part, e, (batch, -(-m // tp), n, k)), count=count))
    return tuple(out)


def _others(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    return tuple(p for p in parts if not _is_product(p))


def _flow(parts: tuple[Part, ...]) -> Flow:
    return next(p for p in parts if isinstance(p, Flow))


def _gathered(enter: Operator, product: Operator, e: Elements, tp: int) -> list[Operator]:
    """Return an entrance, all pieces of its products but the last, and the last."""
    flow = _flow(enter.forward)
    move = copied(product.name, flow.bytes / tp)
    ahead = Operator(
        name=f"{product.name} ahead",
        forward=(
            *_others(product.forward), move, Beside(flow),
            *_pieces(product.forward, e, tp, tp - 1),
        ),
        forward_bytes=flow.bytes + product.forward_bytes,
        stream_bytes=product.stream_bytes,
    )  # fmt: skip
    enter = replace(enter, forward=(), forward_bytes=0.0)
    return [enter, ahead, replace(product, forward=_pieces(product.forward, e, tp, 1))]


def _scattered(product: Operator, leave: Operator, e: Elements, tp: int) -> list[Operator]:
    """Return the first piece of a product, the others beside the scatter, and the sum.

    In backward the gathered gradient's pieces but the last, then that and the weight's gradient.
    """
    scatter, gather = _flow(leave.forward), _flow(leave.input_grad)
    move = copied(product.name, gather.bytes / tp)
    rest = Operator(
        name=f"{product.name} rest",
        forward=(Beside(scatter), *_pieces(product.forward, e, tp, tp - 1)),
        input_grad=(
            *_others(product.input_grad), move, Beside(gather),
            *_pieces(product.input_grad, e, tp, tp - 1),
        ),
        forward_bytes=product.forward_bytes,
        backward_bytes=product.backward_bytes,
        stream_bytes=product.stream_bytes,
    )  # fmt: skip
    first = replace(
        product,
        forward=(*_others(product.forward), *_pieces(product.forward, e, tp, 1)),
        input_grad=_pieces(product.input_grad, e, tp, 1),
    )
    moved = scatter.bytes * (1 + 1 / tp)
    summed = Kernel(f"{product.name} sum", scatter.bytes / e.activation, moved, "fp32")
    leave = replace(leave, forward=(summed,), input_grad=(), backward_bytes=0.0)
    return [first, rest, replace(leave, forward_bytes=scatter.bytes)]
