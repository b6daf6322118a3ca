"""The core of attention as operators: fused, or kernel by kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from simulator.lower.operators import FP32, Elements, Operator, batched_product, pointwise
from simulator.program import Kernel


@dataclass(frozen=True, slots=True)
class Heads:
    """Shape of the attention of one rank."""

    batch: int
    sequence: int
    queries: int
    """Query heads."""
    keys: int
    """Key and value heads."""
    dim: int
    causal: bool = True
    alibi: bool = False


def flash_attention(e: Elements, heads: Heads, version: str = "flash") -> Operator:
    """Attention that never writes its scores; keeps q, k, v and one fp32 a row and head.

    `version` names the implementation, whose rates are `Device.fused`. Backward sums the gradient
    of q in fp32 before it is rounded (`dq_accum` of flash-attention's flash_api.cpp).
    """
    b, s, a, g, d = heads.batch, heads.sequence, heads.queries, heads.keys, heads.dim
    q, kv = b * s * a * d, 2 * b * s * g * d
    # one of the products; the masked half of causal attention is skipped
    product = 2.0 * b * a * s * s * d / (2 if heads.causal else 1)
    rows = FP32 * b * s * a
    shape = (b * a, s, s, d)  # of its products
    read, read_back = e.activation * (2 * q + kv) + rows, e.activation * (4 * q + 2 * kv) + rows
    return Operator(
        name="attention",
        forward=(Kernel("attention", 2 * product, read, e.matmul, shape, 1, f"{version} forward"),),
        input_grad=(
            Kernel(
                "attention grad", 5 * product, read_back, e.matmul, shape, 1, f"{version} backward"
            ),
        ),
        kept_bytes=e.activation * (q + kv) + rows,
        core_input_bytes=e.activation * (q + kv),
        forward_bytes=e.activation * q,
        backward_bytes=e.activation * (2 * q + kv) + FP32 * q,
        model_flops=4.0 * b * a * s * s * d,
    )


def unfused_attention(e: Elements, heads: Heads, *, dropout: bool) -> tuple[Operator, ...]:
    """Attention by separate kernels: scores, softmax, dropout, context; keeps the score matrix."""
    b, s, a, g, d = heads.batch, heads.sequence, heads.queries, heads.keys, heads.dim
    q, kv, scores = b * s * a * d, 2 * b * s * g * d, b * a * s * s
    batch, flops = b * a, 2.0 * b * a * s * s * d
    mask = scores / e.activation
    product = Operator(
        name="scores",
        forward=(batched_product("scores", e, batch, s, s, d),),
        input_grad=(
            batched_product("scores dq", e, batch, s, d, s),
            batched_product("scores dk", e, batch, s, d, s),
        ),
        kept_bytes=e.activation * (q + kv // 2),
        core_input_bytes=e.activation * (q + kv // 2),
        forward_bytes=e.activation * scores,
        backward_bytes=e.activation * (scores + q + kv // 2),
        model_flops=flops,
    )
    softmax = pointwise(
        "softmax", e, reads=scores, writes=scores, grad_reads=2 * scores, grad_writes=scores,
        kept_bytes=e.activation * scores, passing=(scores, 2 * scores), flops_per_element=5,
        core_input_bytes=0.0,
    )  # fmt: skip
    drop = pointwise(
        "attention dropout", e, reads=scores, writes=scores + mask, grad_reads=scores + mask,
        grad_writes=scores, kept_bytes=float(scores), passing=(scores, 2 * scores),
        core_input_bytes=0.0,
    )  # fmt: skip
    context = Operator(
        name="context",
        forward=(batched_product("context", e, batch, s, d, s),),
        input_grad=(
            batched_product("context dp", e, batch, s, s, d),
            batched_product("context dv", e, batch, s, d, s),
        ),
        # the dropped-out probabilities are a tensor of their own; without dropout softmax kept them
        kept_bytes=e.activation * ((scores if dropout else 0) + kv // 2),
        core_input_bytes=e.activation * (kv // 2),
        forward_bytes=e.activation * q,
        backward_bytes=e.activation * (q + scores + kv // 2),
        model_flops=flops,
    )
    # heads go to the front of tokens and back: the result is copied forward and in backward, and
    # the gradients of q, k and v are gathered into one
    copies = pointwise(
        "attention layout", e, reads=q, writes=q, grad_reads=2 * q + kv, grad_writes=2 * q + kv,
        kept_bytes=0.0, passing=(2 * q, 2 * (q + kv)),
    )  # fmt: skip
    biased = (_alibi(e, scores),) if heads.alibi else ()
    return (product, *biased, softmax, *([drop] if dropout else []), context, copies)


def _alibi(e: Elements, scores: int) -> Operator:
    """Add the fixed bias of ALiBi to the scores; it has no parameters and no gradient.

    Fused attention adds it where the scores are.
    """
    added = pointwise(
        "alibi", e, reads=scores, writes=scores, grad_reads=0, grad_writes=0, kept_bytes=0.0,
        passing=(2 * scores, 0), core_input_bytes=0.0,
    )  # fmt: skip
    return replace(added, input_grad=())


ATTENTION: Mapping[str, Callable[[Elements, Heads, bool], tuple[Operator, ...]]] = {
    "flash": lambda e, heads, _dropout: (flash_attention(e, heads),),
    "flash2": lambda e, heads, _dropout: (flash_attention(e, heads, "flash2"),),
    "flash1": lambda e, heads, _dropout: (flash_attention(e, heads, "flash1"),),
    "unfused": lambda e, heads, dropout: unfused_attention(e, heads, dropout=dropout),
}
"""Operators of the attention core by implementation; flash draws its dropout inside the kernel."""
