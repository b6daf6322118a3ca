"""Quantisation-aware training: what rounding weights and activations in training costs.

Before each product its input and its weight are observed, rounded to a few levels and scaled back
(Jacob et al., 2018, arXiv 1712.05877, section 3). Arithmetic stays in the run's precision, so it
adds passes over memory and saves none. As torch's eager kernels: an observer reads the tensor
(`fused_moving_avg_obs_fq_helper`), rounding reads it and writes the result and a mask of what was
not clipped, one byte each; backward multiplies the gradient with the mask (straight-through).
"""

from __future__ import annotations

from dataclasses import replace

from simulator.lower.operators import Elements, Operator, Part
from simulator.program import Kernel

MASK = 1
"""Bytes of an element's mask."""


def fake_quantized(o: Operator, e: Elements) -> Operator:
    """Return a product whose input and weight are rounded.

    The mask of the input, the rounded weight and its mask are kept until backward, once for every
    microbatch in flight, as autograd keeps them; the rounded input takes the input's place.
    """
    at = next(i for i, part in enumerate(o.forward) if isinstance(part, Kernel))
    product = o.forward[at]
    assert isinstance(product, Kernel)
    assert product.matmul is not None
    _, tokens, outputs, inputs = product.matmul
    entering, weight = tokens * inputs, inputs * outputs
    # where gradients accumulate apart, the product's result is still as short as activations
    gradient = e.activation if e.accumulation == "separate" else e.gradient
    return replace(
        o,
        forward=(
            *o.forward[:at],
            _rounding(f"{o.name} input", entering, e.activation),
            _rounding(f"{o.name} weight", weight, e.weight),
            *o.forward[at:],
        ),
        input_grad=_after(o.input_grad, _masking(f"{o.name} input", entering, e.activation)),
        weight_grad=_after(o.weight_grad, _masking(f"{o.name} weight", weight, gradient)),
        kept_bytes=o.kept_bytes + MASK * entering + (e.weight + MASK) * weight,
        input_kept_bytes=float(MASK * entering + e.weight * weight),
    )


def _rounding(name: str, size: int, element: int) -> Kernel:
    """Return the kernels, as one, that observe (read) and round (read, write) a tensor."""
    moved = (3 * element + MASK) * size
    return Kernel(f"{name} fake quantise", 6.0 * size, float(moved), "fp32")


def _masking(name: str, size: int, element: int) -> Kernel:
    return Kernel(f"{name} mask", float(size), float((2 * element + MASK) * size), "fp32")


def _after(parts: tuple[Part, ...], kernel: Kernel) -> tuple[Part, ...]:
    """Return parts with a kernel right after the matrix product among them."""
    at = next(i for i, p in enumerate(parts) if isinstance(p, Kernel) and p.matmul is not None)
    return (*parts[: at + 1], kernel, *parts[at + 1 :])
