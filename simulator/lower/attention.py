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
    """Tokens of a sample, of which each has queries."""
    queries: int
    """Query heads."""
    keys: int
    """Key and value heads."""
    dim: int
    """Numbers of a query or a key."""
    causal: bool = True
    alibi: bool = False
    relative: bool = False
    """Whether scores have a learned bias (`operators.relative_positions`)."""
    key_sequence: int = 0
    """Tokens of a sample that have keys and values; `sequence` where 0."""
    value_dim: int = 0
    """Numbers of a value and of a head's result; `dim` where 0."""

    @property
    def length(self) -> int:
        """Keys of a query, the masked ones too."""
        return self.key_sequence or self.sequence

    @property
    def elements(self) -> tuple[int, int, int, int]:
        """Elements of the queries, the keys, the values and the result."""
        per_query = self.batch * self.sequence * self.queries
        per_key, value = self.batch * self.length * self.keys, self.value_dim or self.dim
        return per_query * self.dim, per_key * self.dim, per_key * value, per_query * value


def flash_attention(e: Elements, heads: Heads, version: str = "flash") -> Operator:
    """Attention that never writes its scores; keeps q, k, v and one fp32 a row and head.

    `version` names the implementation, whose rates are `Device.fused`. Backward sums the gradient
    of q in fp32 before it is rounded (`dq_accum` of flash-attention's flash_api.cpp). Of its five
    products (scores, their gradient, and those of v, q and k) three are as deep or wide as keys.
    """
    b, s, a, d = heads.batch, heads.sequence, heads.queries, heads.dim
    t, v = heads.length, heads.value_dim or d
    (q, *_, out), kv = heads.elements, sum(heads.elements[1:3])
    # FLOPs for each number of a head; the masked half of causal attention is skipped
    each = 2.0 * b * a * s * t / (2 if heads.causal else 1)
    rows = FP32 * b * s * a
    shape = (b * a, s, t, (d + v) // 2)  # of its products
    read = e.activation * (q + out + kv) + rows
    read_back = e.activation * 2 * (q + out + kv) + rows

    def kernel(name: str, numbers: int, moved: float, which: str) -> Kernel:
        fused = f"{version} {which}"
        return Kernel(name, each * numbers, moved, e.matmul, shape, 1, fused)

    return Operator(
        name="attention",
        forward=(kernel("attention", d + v, read, "forward"),),
        input_grad=(kernel("attention grad", 3 * d + 2 * v, read_back, "backward"),),
        kept_bytes=e.activation * (q + kv) + rows,
        core_input_bytes=e.activation * (q + kv),
        forward_bytes=e.activation * out,
        backward_bytes=e.activation * (q + out + kv) + FP32 * q,
        model_flops=2.0 * b * a * s * t * (d + v),
    )


def unfused_attention(e: Elements, heads: Heads, *, dropout: bool) -> tuple[Operator, ...]:
    """Attention by separate kernels: scores, softmax, dropout, context; keeps the score matrix."""
    b, s, a, d = heads.batch, heads.sequence, heads.queries, heads.dim
    (q, k, v, out), width, t = heads.elements, heads.value_dim or d, heads.length
    scores, batch, flops = b * a * s * t, b * a, 2.0 * b * a * s * t
    mask = scores / e.activation
    product = Operator(
        name="scores",
        forward=(batched_product("scores", e, batch, s, t, d),),
        input_grad=(
            batched_product("scores dq", e, batch, s, d, t),
            batched_product("scores dk", e, batch, t, d, s),
        ),
        kept_bytes=e.activation * (q + k),
        core_input_bytes=e.activation * (q + k),
        forward_bytes=e.activation * scores,
        backward_bytes=e.activation * (scores + q + k),
        model_flops=flops * d,
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
        forward=(batched_product("context", e, batch, s, width, t),),
        input_grad=(
            batched_product("context dp", e, batch, s, t, width),
            batched_product("context dv", e, batch, t, width, s),
        ),
        # the dropped-out probabilities are a tensor of their own; without dropout softmax kept them
        kept_bytes=e.activation * ((scores if dropout else 0) + v),
        core_input_bytes=e.activation * v,
        forward_bytes=e.activation * out,
        backward_bytes=e.activation * (out + scores + v),
        model_flops=flops * width,
    )
    # heads go to the front of tokens and back: the result is copied forward and in backward, and
    # the gradients of q, k and v are gathered into one
    back = q + k + v + out
    copies = pointwise(
        "attention layout", e, reads=out, writes=out, grad_reads=back, grad_writes=back,
        kept_bytes=0.0, passing=(2 * out, 2 * (q + k + v)),
    )  # fmt: skip
    biased = [_alibi(e, scores)] if heads.alibi else []
    biased += [_relative(e, scores, scores // b)] if heads.relative else []
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


def _relative(e: Elements, scores: int, bias: int) -> Operator:
    """Add the learned bias of a stack to the scores of a layer.

    It is one for all samples, so its gradient is that of the scores summed over them, added to what
    the layers above have left.
    """
    return pointwise(
        "position bias", e, reads=scores + bias, writes=scores, grad_reads=scores + bias,
        grad_writes=bias, kept_bytes=0.0, passing=(2 * scores, scores + bias), core_input_bytes=0.0,
    )  # fmt: skip


ATTENTION: Mapping[str, Callable[[Elements, Heads, bool], tuple[Operator, ...]]] = {
    "flash": lambda e, heads, _dropout: (flash_attention(e, heads),),
    "flash2": lambda e, heads, _dropout: (flash_attention(e, heads, "flash2"),),
    "flash1": lambda e, heads, _dropout: (flash_attention(e, heads, "flash1"),),
    "unfused": lambda e, heads, dropout: unfused_attention(e, heads, dropout=dropout),
}
"""Operators of the attention core by implementation; flash draws its dropout inside the kernel."""
