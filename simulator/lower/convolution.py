"""Operators of convolution networks: convolutions as products, batch norm, ReLU, pools.

A convolution is an implicit product (Chetlur et al., 2014, arXiv 1410.0759, section 3): every
output position is a row, the inputs below the kernel are its columns. The unrolled input is never
written, so bytes are those of the input itself. Tensors lie with their channels last.

What a step keeps is counted once, where it enters: a convolution keeps its input, which the ReLU
before it needs too; a batch norm keeps its input, the convolution's result. Nothing is in place:
what a batch norm writes is alive until ReLU has read it. A weight has four dimensions: it is none
of the matrices that some optimizers look for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from simulator.lower.operators import Elements, Operator, linear, pointwise
from simulator.program import Kernel

INDEX = 8
"""Bytes in which torch's max pool keeps where each maximum was."""


@dataclass(frozen=True, slots=True)
class Maps:
    """Shape of square feature maps of a microbatch."""

    batch: int
    channels: int
    side: int
    """Pixels along each side."""

    @property
    def positions(self) -> int:
        """Pixels of all images."""
        return self.batch * self.side * self.side

    @property
    def size(self) -> int:
        """Elements."""
        return self.positions * self.channels


def below(x: Maps, channels: int, kernel: int, stride: int, padding: int) -> Maps:
    """Return the shape that a window of `kernel` x `kernel` leaves, moved by `stride`."""
    return Maps(x.batch, channels, (x.side + 2 * padding - kernel) // stride + 1)


def convolution(
    name: str, e: Elements, x: Maps, y: Maps, *, kernel: int, bias: bool = False
) -> Operator:
    """Convolve `x` into `y` with windows of `kernel` x `kernel`; keeps its input.

    Forward multiplies (positions of y) x (channels of x, kernel, kernel) with the weight; the
    weight's gradient sums over positions. The input's gradient is a product of (channels of y,
    kernel, kernel) columns; where windows move by more than one, as many products as forward makes
    are made there too, for the zeros between are skipped (CUTLASS's strided data gradient).
    """
    window = kernel * kernel
    inputs, shape = x.channels * window, (1, y.positions, x.channels, y.channels * window)
    product = linear(
        name, e, tokens=y.positions, inputs=inputs, outputs=y.channels, bias=bias
    )  # of the unrolled input
    unrolled = float(e.activation * (y.positions * inputs - x.size))

    def rolled(part: Kernel) -> Kernel:
        is_grad = part.name.endswith(" dgrad")
        matmul = shape if is_grad else part.matmul
        return part if matmul is None else replace(
            part, bytes=part.bytes - unrolled, matmul=matmul
        )  # fmt: skip

    def each(parts: tuple[object, ...]) -> tuple[Kernel, ...]:
        return tuple(rolled(part) for part in parts if isinstance(part, Kernel))

    return replace(
        product,
        forward=each(product.forward),
        input_grad=each(product.input_grad),
        weight_grad=each(product.weight_grad),
        kept_bytes=float(e.activation * x.size),
        backward_bytes=product.backward_bytes - unrolled,
        matrices=(),
    )


def of_images(first: Operator) -> Operator:
    """Return an operator whose input, which it keeps, needs no gradient: it is data."""
    backward_bytes = first.backward_bytes - first.kept_bytes
    return replace(first, input_grad=(), backward_bytes=backward_bytes)


def batch_norm(name: str, e: Elements, x: Maps) -> Operator:
    """Normalise each channel over the batch (Ioffe and Szegedy, 2015); keeps its input.

    Statistics need all of a channel first: forward reads its input twice, backward reads input and
    gradient twice. Statistics themselves, 8 bytes a channel, are left out.
    """
    return pointwise(
        name, e, reads=2 * x.size, writes=x.size, grad_reads=4 * x.size, grad_writes=x.size,
        kept_bytes=float(e.activation * x.size), passing=(x.size, 2 * x.size),
        params=2 * x.channels, flops_per_element=3,
    )  # fmt: skip


def relu(name: str, e: Elements, x: Maps) -> Operator:
    """Apply ReLU; backward needs its result, which the next operator keeps as its input."""
    return pointwise(
        name, e, reads=x.size, writes=x.size, grad_reads=2 * x.size, grad_writes=x.size,
        kept_bytes=0.0, passing=(2 * x.size, 2 * x.size),
    )  # fmt: skip


def max_pool(name: str, e: Elements, x: Maps, y: Maps, *, kernel: int) -> Operator:
    """Take the largest of each window; keeps its input and, as torch does, where each was."""
    moved = float(e.activation * (x.size + y.size) + INDEX * y.size)
    return Operator(
        name=name,
        forward=(Kernel(name, float(kernel * kernel * y.size), moved, "fp32"),),
        input_grad=(Kernel(f"{name} grad", float(y.size), moved, "fp32"),),
        kept_bytes=float(e.activation * x.size + INDEX * y.size),
        forward_bytes=float(e.activation * y.size),
        backward_bytes=float(e.activation * (x.size + y.size)),
    )


def average_pool(name: str, e: Elements, x: Maps) -> Operator:
    """Average each map; keeps its input, the result of the last ReLU."""
    averages = x.batch * x.channels
    return pointwise(
        name, e, reads=x.size, writes=averages, grad_reads=averages, grad_writes=x.size,
        kept_bytes=float(e.activation * x.size), passing=(averages, averages + x.size),
    )  # fmt: skip
