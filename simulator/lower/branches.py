"""The branches of a layer, each between a norm and a sum: attention, cross-attention, the MLP."""

from __future__ import annotations

from dataclasses import replace

from simulator.describe.model import LayerKind, Model
from simulator.lower import operators as op
from simulator.lower.attention import ATTENTION, Heads
from simulator.lower.context import context_attention
from simulator.lower.experts import experts
from simulator.lower.latent import latent_heads
from simulator.lower.operators import Operator
from simulator.lower.parallel import closed, linear, norm, opened, parallel
from simulator.lower.plain import repeated_keys
from simulator.lower.shapes import Shapes
from simulator.program import Kernel


def branches(model: Model, x: Shapes, kind: LayerKind) -> tuple[Operator, ...]:
    """Return the operators of a layer, of a decoder's on the tokens of the decoder."""
    own = x.decoded if kind.crosses else x
    return (
        *_attention(model, own, kind.is_causal),
        *(_cross_attention(model, own, x) if kind.crosses else ()),
        *_mlp(model, own, kind.has_experts),
    )


def _attention(model: Model, x: Shapes, causal: bool) -> tuple[Operator, ...]:
    heads = replace(
        _shape(model, x), causal=causal, alibi=model.position == "alibi",
        relative=model.position == "relative",
    )  # fmt: skip
    made = latent_heads(model, x, heads) if model.is_latent else _heads(model, x, heads)
    repeats = x.plain and heads.keys < heads.queries
    if repeats:
        queries, keys, *_ = heads.elements
        made = (*made, repeated_keys(x.elements, queries=queries, keys=keys))
    return (
        norm("attention norm", model, x),
        *made,
        *_core(
            x, replace(heads, keys=heads.queries) if repeats else heads, model.attention_dropout > 0
        ),
        *closed(x, model.hidden_size, _output("proj", model, x, heads)),
        _residual("attention residual", model, x),
    )


def _cross_attention(model: Model, x: Shapes, encoder: Shapes) -> tuple[Operator, ...]:
    """Return attention of a decoder's tokens `x` to what the encoder has made of its own.

    That is kept once for all layers (`layers.bridge`); each adds to its gradient.
    """
    h, e = model.hidden_size, x.elements
    heads = replace(_shape(model, x), causal=False, key_sequence=encoder.sequence_length)
    queries = linear(
        "cross q", x, inputs=h, outputs=heads.queries * heads.dim, bias=model.attention_bias,
        divided=(x.divided, 1),
    )  # fmt: skip
    read = linear(
        "cross kv", encoder, inputs=h, outputs=2 * heads.keys * heads.dim,
        bias=model.attention_bias, divided=(x.divided, 1),
    )  # fmt: skip
    if not e.cast:
        read = replace(read, kept_bytes=0.0)
    size = float(encoder.local_tokens * h)
    summed = Operator(
        name="encoder output",
        input_grad=(Kernel("encoder output grad", size, 3 * e.activation * size, "fp32"),),
        backward_bytes=e.activation * size,
    )
    return (
        norm("cross norm", model, x),
        *opened(x, h, queries),
        summed,
        *opened(encoder, h, read),
        *_core(x, heads, model.attention_dropout > 0),
        *closed(x, h, _output("cross proj", model, x, heads)),
        _residual("cross residual", model, x),
    )


def _shape(model: Model, x: Shapes) -> Heads:
    return Heads(
        batch=x.microbatch_size,
        sequence=x.sequence_length,
        queries=model.num_attention_heads // x.tp,
        keys=model.num_key_value_heads // x.tp,
        dim=model.qk_head_dim,
        value_dim=model.value_head_dim,
    )


def _output(name: str, model: Model, x: Shapes, heads: Heads) -> Operator:
    """Return the product that puts the results of a rank's heads together."""
    bias = model.attention_bias if model.output_bias is None else model.output_bias
    return linear(
        name, x, inputs=heads.queries * heads.value_dim, outputs=model.hidden_size, bias=bias,
        divided=(1, x.divided),
    )  # fmt: skip


def _heads(model: Model, x: Shapes, heads: Heads) -> tuple[Operator, ...]:
    """Return what makes queries, keys and values of a rank's heads from the normed tokens."""
    tokens, h = x.tokens, model.hidden_size
    qkv_size = (heads.queries + 2 * heads.keys) * heads.dim
    rotated = tokens * (heads.queries + heads.keys) * heads.dim
    rotary = op.rotary(x.elements, size=rotated, whole=tokens * qkv_size)
    qkv = linear(
        "qkv", x, inputs=h, outputs=qkv_size, bias=model.attention_bias, divided=(x.divided, 1)
    )
    return (
        *opened(x, h, qkv),
        *([op.head_norm(x.elements, size=rotated, dim=heads.dim)] if model.qk_norm else []),
        *([rotary] if model.position == "rotary" else []),
    )


def _residual(name: str, model: Model, x: Shapes) -> Operator:
    size = x.local_tokens * model.hidden_size
    return op.residual(name, x.elements, size=size, dropout=model.hidden_dropout > 0)


def _core(x: Shapes, heads: Heads, dropout: bool) -> tuple[Operator, ...]:
    """Return the attention core; fused, it keeps its result where the next product has a copy."""
    if x.context.ranks > 1:
        core = context_attention(x.elements, heads, x.attention, x.context)
    else:
        core = ATTENTION[x.attention](x.elements, heads, dropout)
    if not x.elements.cast or x.attention == "unfused":
        return core
    size = x.elements.activation * x.tokens * heads.queries * heads.value_dim
    return tuple(replace(o, kept_bytes=o.kept_bytes + size) if o.kept_bytes else o for o in core)


def _mlp(model: Model, x: Shapes, has_experts: bool) -> tuple[Operator, ...]:
    within = experts(model, x) if has_experts else _dense(model, x)
    return (norm("mlp norm", model, x), *within, _residual("mlp residual", model, x))


def _dense(model: Model, x: Shapes) -> tuple[Operator, ...]:
    h, inner = model.hidden_size, model.intermediate_size // x.tp
    up = (2 if model.gated_mlp else 1) * inner
    dropped = op.dropout("inner dropout", x.elements, size=x.tokens * inner)
    return parallel(
        x, h,
        linear("fc1", x, inputs=h, outputs=up, bias=model.mlp_bias, divided=(x.divided, 1)),
        op.activation(
            model.activation, x.elements, size=x.tokens * inner, gated=model.gated_mlp
        ),
        *([dropped] if model.inner_dropout > 0 else []),
        linear("fc2", x, inputs=inner, outputs=h, bias=model.mlp_bias, divided=(1, x.divided)),
    )  # fmt: skip
