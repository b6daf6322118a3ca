"""From a list of layers to blocks of operators: one for what is listed, one for each attention."""

from __future__ import annotations

from dataclasses import replace

from simulator.describe.layer_list import LayerList, ListedLayer, Product
from simulator.lower.attention import ATTENTION, Heads
from simulator.lower.blocks import Block, Blocks
from simulator.lower.operators import Elements, Operator, batched_product
from simulator.lower.shapes import Shapes
from simulator.program import Kernel


def listed(model: LayerList, x: Shapes) -> Blocks:
    """Return the blocks of a listed model; there is no embedding and no head but what is listed."""
    layers = [
        Block(name="layer", operators=_operators(layer, x))
        for layer in model.layers
    ]  # fmt: skip
    return Blocks(
        embedding=Block(name="embedding", operators=()),
        layers=tuple(
            block
            for block, layer in zip(layers, model.layers, strict=True)
            for _ in range(layer.repeat)
        ),
        head=Block(name="head", operators=()),
    )


def _operators(layer: ListedLayer, x: Shapes) -> tuple[Operator, ...]:
    e, samples = x.elements, x.microbatch_size
    forward = [_product(p, e, samples) for p in layer.products]
    input_grad = [k for p in layer.products for k in _input_grad(p, e, samples)]
    weight_grad = [_weight_grad(p, e, samples) for p in layer.products if p.weight]
    rest = _rest(layer.name, layer.kernels, samples * layer.moved + layer.moved_once, e)
    back = _rest(
        f"{layer.name} grad", layer.grad_kernels,
        samples * layer.grad_moved + layer.grad_moved_once, e,
    )  # fmt: skip
    out = float(e.activation * samples * layer.output)
    main = Operator(
        name=layer.name,
        forward=(*forward, *rest),
        input_grad=(*input_grad, *back),
        weight_grad=tuple(weight_grad),
        kept_bytes=samples * (e.activation * layer.kept + layer.kept_bytes),
        forward_bytes=out,
        backward_bytes=2 * out,
        output_grad_bytes=out if weight_grad else 0.0,
        params=layer.parameters,
        model_flops=samples * sum(p.flops for p in layer.products),
    )
    heads = (
        (a, Heads(samples, a.length, a.queries, a.keys, a.dim, a.causal)) for a in layer.attention
    )
    cores = (
        replace(o, core_input_bytes=None)
        for a, shape in heads
        for _ in range(a.count)
        for o in ATTENTION[x.attention](e, shape, False)
    )
    return (main, *cores)


def _shape(p: Product, samples: int) -> tuple[int, int, int, int]:
    """Return (batch, m, n, k) of the products of a microbatch."""
    return (p.batch, p.m * samples, p.n, p.k) if p.weight else (p.batch * samples, p.m, p.n, p.k)


def _kernel(
    p: Product, e: Elements, samples: int, shape: tuple[int, int, int, int], name: str,
    written: int = 0,
) -> Kernel:  # fmt: skip
    """Return a product of some shape; what it moves besides a weight is what forward moves."""
    made = batched_product(name, e, *shape)
    each = p.batch * (p.m * (p.k + p.n) + (0 if p.weight else p.k * p.n))
    moved = e.activation * samples * (p.moved or each)
    weight = p.batch * p.k * p.n * (written or e.activation) if p.weight else 0
    return replace(made, bytes=float(moved + weight), count=p.count)


def _product(p: Product, e: Elements, samples: int) -> Kernel:
    return _kernel(p, e, samples, _shape(p, samples), "product")


def _input_grad(p: Product, e: Elements, samples: int) -> tuple[Kernel, ...]:
    """Return the gradient of the input, or of both factors where neither is a weight."""
    batch, m, n, k = _shape(p, samples)
    left = _kernel(p, e, samples, (batch, m, k, n), "product dgrad")
    if not p.weight:
        return (left, _kernel(p, e, samples, (batch, k, n, m), "product dgrad"))
    return (left,) if p.input_grad else ()


def _weight_grad(p: Product, e: Elements, samples: int) -> Kernel:
    batch, m, n, k = _shape(p, samples)
    written = {"fused": 2 * e.gradient, "separate": e.activation + 2 * e.gradient,
               "none": e.gradient}[e.accumulation]  # fmt: skip
    return _kernel(p, e, samples, (batch, k, n, m), "product wgrad", written)


def _rest(name: str, count: int, moved: float, e: Elements) -> tuple[Kernel, ...]:
    """Return what is element-wise: so many kernels that share what they move evenly."""
    if not count:
        return ()
    return (Kernel(name, moved / (2 * count), e.activation * moved / count, "fp32", None, count),)
