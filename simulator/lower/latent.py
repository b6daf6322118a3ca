"""Multi-head latent attention: queries, keys and values from few numbers a token (DeepSeek-V2,
arXiv 2405.04434, section 2.1).

Down projections and their norms are repeated on every tp rank, under sequence parallelism for its
own part of it; up projections are divided by heads, and what they read is gathered there: Megatron-
LM's `MLASelfAttention`. A token's one rotated key goes with what its keys and values are made from.
"""

from __future__ import annotations

from dataclasses import replace

from simulator.describe.model import Model
from simulator.lower import operators as op
from simulator.lower.attention import Heads
from simulator.lower.operators import Operator
from simulator.lower.parallel import linear, opened, repeated
from simulator.lower.shapes import Shapes


def latent_heads(model: Model, x: Shapes, heads: Heads) -> tuple[Operator, ...]:
    """Return what makes queries, keys and values of a rank's heads from the normed tokens."""
    rank, nope, rope = model.kv_lora_rank, model.qk_nope_head_dim, model.qk_rope_head_dim
    assert rank is not None
    assert nope is not None
    assert rope is not None
    h, width = model.hidden_size, heads.value_dim
    down = repeated("kv down", x, inputs=h, outputs=rank + rope)
    if not x.elements.cast:  # its input is kept for the queries
        down = replace(down, kept_bytes=0.0)
    up = linear(
        "kv up", x, inputs=rank, outputs=heads.keys * (nope + width), bias=False,
        divided=(x.divided, 1),
    )  # fmt: skip
    return (
        *_queries(model, x, heads),
        down,
        op.norm("kv norm", x.elements, tokens=x.local_tokens, hidden=rank, bias=False),
        *opened(x, rank + rope, up),
        _rotated(x, heads, nope, rope),
    )


def _queries(model: Model, x: Shapes, heads: Heads) -> tuple[Operator, ...]:
    h, rank, outputs = model.hidden_size, model.q_lora_rank, heads.queries * heads.dim
    if rank is None:
        whole = linear("q", x, inputs=h, outputs=outputs, bias=False, divided=(x.divided, 1))
        return opened(x, h, whole)
    up = linear("q up", x, inputs=rank, outputs=outputs, bias=False, divided=(x.divided, 1))
    return (
        repeated("q down", x, inputs=h, outputs=rank),
        op.norm("q norm", x.elements, tokens=x.local_tokens, hidden=rank, bias=False),
        *opened(x, rank, up),
    )


def _rotated(x: Shapes, heads: Heads, nope: int, rope: int) -> Operator:
    """Rotate a part of each query in place and a token's one key, and lay out keys by heads."""
    queries = x.tokens * heads.queries * rope
    keys = x.tokens * heads.keys * heads.dim
    apart = x.tokens * (heads.keys * nope + rope)
    return op.pointwise(
        "rotary", x.elements, reads=queries + apart, writes=queries + keys,
        grad_reads=queries + keys, grad_writes=queries + apart, kept_bytes=0.0,
        passing=(sum(heads.elements[:3]),) * 2, flops_per_element=3,
    )  # fmt: skip
