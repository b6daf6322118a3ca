"""From a model to blocks of operators: the embedding, one layer, the head with its loss.

Tensor parallelism is Megatron-LM's: attention heads and the MLP's inner dimension are divided over
tp ranks, the vocabulary too; norms, residuals and dropouts are repeated on every rank, or with
sequence parallelism divided along the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from simulator.describe.model import Model
from simulator.describe.scenario import Scenario
from simulator.lower import operators as op
from simulator.lower.operators import Operator
from simulator.program import Flow


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """What the operators of a model depend on, besides the model itself."""

    microbatch_size: int
    sequence_length: int
    tp: int
    elements: op.Elements
    attention: str
    sequence_parallel: bool = False
    tp_overlap: bool = False
    megatron_head: bool = False
    """Whether the head's product is Megatron-LM's own, with its placeholder for the gradient."""

    @property
    def tokens(self) -> int:
        """Tokens of one microbatch."""
        return self.microbatch_size * self.sequence_length

    @property
    def local_tokens(self) -> int:
        """Tokens that one rank norms, adds and drops out."""
        return self.tokens // self.tp if self.sequence_parallel else self.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A run of operators that is never cut by a stage boundary."""

    name: str
    operators: tuple[Operator, ...]

    @property
    def params(self) -> int:
        """Parameters held by one rank."""
        return sum(o.params for o in self.operators)

    @property
    def kept_bytes(self) -> float:
        """Activations of one microbatch that one rank keeps for backward."""
        return sum(o.kept_bytes for o in self.operators)

    def around(self, inner: Callable[[Operator], bool]) -> tuple[Block, Block, Block]:
        """Return the operators before the run of those that `inner` names, the run, the rest."""
        at = [i for i, o in enumerate(self.operators) if inner(o)]
        cuts = (slice(0, at[0]), slice(at[0], at[-1] + 1), slice(at[-1] + 1, None))
        before, run, after = (Block(name=self.name, operators=self.operators[c]) for c in cuts)
        return before, run, after

    @property
    def model_flops(self) -> float:
        """Forward matrix FLOPs of one microbatch on one rank, by the MFU convention."""
        return sum(o.model_flops for o in self.operators)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """The three kinds of block of a decoder."""

    embedding: Block
    layer: Block
    head: Block


def shapes(s: Scenario) -> Shapes:
    """Return what the operators of a scenario depend on."""
    p = s.precision
    accumulation = "fused" if s.run.fused_accumulation else "separate"
    if s.num_microbatches == 1 or (s.plan.zero > 1 and s.plan.shards > 1):
        accumulation = "none"  # shards are added, which takes next to nothing
    return Shapes(
        microbatch_size=s.plan.microbatch_size,
        sequence_length=s.run.sequence_length,
        tp=s.plan.tp,
        elements=op.Elements(
            p.activation, p.weight, p.gradient, p.matmul, accumulation,
            placeholder=s.run.linear_layers == "megatron",
        ),
        attention=s.run.attention,
        sequence_parallel=s.plan.sequence_parallel,
        tp_overlap=s.plan.tp_overlap == "grads",
        megatron_head=s.run.linear_layers != "torch",
    )  # fmt: skip


@lru_cache(maxsize=256)
def blocks(model: Model, x: Shapes) -> Blocks:
    """Return the blocks of a model as one rank of a tensor-parallel group computes them."""
    stream = float(x.elements.activation * x.local_tokens * model.hidden_size)
    branches = (*_attention(model, x), *_mlp(model, x))
    layer = tuple(replace(operator, stream_bytes=stream) for operator in branches)
    return Blocks(
        embedding=Block(name="embedding", operators=_embedding(model, x)),
        layer=Block(name="layer", operators=layer),
        head=Block(name="head", operators=_head(model, x)),
    )


def num_parameters(model: Model) -> int:
    """Return the parameters of a whole model, a tied embedding counted once."""
    x = Shapes(
        microbatch_size=1, sequence_length=1, tp=1, attention="flash",
        elements=op.Elements(2, 2, 2, "bf16"),
    )  # fmt: skip
    parts = blocks(model, x)
    tied = model.vocab_size * model.hidden_size if model.tie_word_embeddings else 0
    layers = model.num_hidden_layers * parts.layer.params
    return parts.embedding.params + layers + parts.head.params - tied


def model_flops_per_token(s: Scenario) -> float:
    """Return the FLOPs that training one token takes by the MFU convention.

    Three times the forward matrix products (forward, input gradient, weight gradient) with
    attention counted in full: 6 FLOPs a weight and 12 x layers x hidden x sequence, as PaLM
    (Chowdhery et al., 2022, appendix B), nanoGPT and Megatron-LM count.
    """
    x = shapes(s)
    parts = blocks(s.model, Shapes(
        microbatch_size=1, sequence_length=x.sequence_length, tp=1, elements=x.elements,
        attention=x.attention,
    ))  # fmt: skip
    forward = s.model.num_hidden_layers * parts.layer.model_flops + parts.head.model_flops
    return 3 * forward / x.sequence_length


def recomputed_flops_per_token(s: Scenario) -> float:
    """Return the forward matrix FLOPs of one token that backward computes again."""
    x, layer = shapes(s), blocks(s.model, shapes(s)).layer
    flops = {
        "none": 0.0,
        "selective": sum(o.model_flops for o in layer.operators if o.core_input_bytes is not None),
        "full": layer.model_flops,
    }[s.plan.recompute]
    limit = s.plan.recompute_layers
    layers = s.model.num_hidden_layers
    if limit is not None:
        layers = sum(min(limit, count) for count in s.layers_per_stage)
    return layers * flops * x.tp / x.tokens


def _parallel(x: Shapes, hidden: int, first: Operator, *rest: Operator) -> tuple[Operator, ...]:
    """Wrap operators whose inner dimension is divided over the tensor-parallel ranks."""
    if x.tp == 1:
        return (first, *rest)
    return (*_entrance(x, hidden, first), *rest, _exit(x, hidden))


def _entrance(x: Shapes, hidden: int, product: Operator) -> tuple[Operator, Operator]:
    size = float(x.elements.activation * x.tokens * hidden)
    return op.first_of_region(
        product, size, x.tp, sequence=x.sequence_parallel, overlap=x.tp_overlap
    )


def _exit(x: Shapes, hidden: int) -> Operator:
    size = float(x.elements.activation * x.tokens * hidden)
    return op.leaving_tensor_parallel(size, sequence=x.sequence_parallel)


def _norm(name: str, model: Model, x: Shapes) -> Operator:
    bias = model.norm == "layer_norm"
    return op.norm(name, x.elements, tokens=x.local_tokens, hidden=model.hidden_size, bias=bias)


def _attention(model: Model, x: Shapes) -> tuple[Operator, ...]:
    e, tokens, h, drops = x.elements, x.tokens, model.hidden_size, model.hidden_dropout > 0
    heads = op.Heads(
        batch=x.microbatch_size,
        sequence=x.sequence_length,
        queries=model.num_attention_heads // x.tp,
        keys=model.num_key_value_heads // x.tp,
        dim=model.head_dim,
    )
    bias = model.attention_bias
    query_size = heads.queries * heads.dim
    qkv_size = (heads.queries + 2 * heads.keys) * heads.dim
    rotated = tokens * (heads.queries + heads.keys) * heads.dim
    rotary = op.rotary(e, size=rotated, whole=tokens * qkv_size)
    return (
        _norm("attention norm", model, x),
        *_parallel(
            x, h,
            op.linear("qkv", e, tokens=tokens, inputs=h, outputs=qkv_size, bias=bias),
            *([rotary] if model.position == "rotary" else []),
            *ATTENTION[x.attention](e, heads, model.attention_dropout > 0),
            op.linear("proj", e, tokens=tokens, inputs=query_size, outputs=h, bias=bias),
        ),
        op.residual("attention residual", e, size=x.local_tokens * h, dropout=drops),
    )  # fmt: skip


ATTENTION: Mapping[str, Callable[[op.Elements, op.Heads, bool], tuple[Operator, ...]]] = {
    "flash": lambda e, heads, _dropout: (op.flash_attention(e, heads),),
    "flash2": lambda e, heads, _dropout: (op.flash_attention(e, heads, "flash2"),),
    "unfused": lambda e, heads, dropout: op.unfused_attention(e, heads, dropout=dropout),
}
"""Operators of the attention core by implementation; flash draws its dropout inside the kernel."""


def _mlp(model: Model, x: Shapes) -> tuple[Operator, ...]:
    e, tokens, h, drops = x.elements, x.tokens, model.hidden_size, model.hidden_dropout > 0
    inner = model.intermediate_size // x.tp
    up = (2 if model.gated_mlp else 1) * inner
    return (
        _norm("mlp norm", model, x),
        *_parallel(
            x, h,
            op.linear("fc1", e, tokens=tokens, inputs=h, outputs=up, bias=model.mlp_bias),
            op.activation(model.activation, e, size=tokens * inner, gated=model.gated_mlp),
            op.linear("fc2", e, tokens=tokens, inputs=inner, outputs=h, bias=model.mlp_bias),
        ),
        op.residual("mlp residual", e, size=x.local_tokens * h, dropout=drops),
    )  # fmt: skip


def _vocab_share(model: Model, x: Shapes) -> int:
    """Rows of the embedding on one rank; rounded up when tp does not divide it."""
    return -(-model.vocab_size // x.tp)


def _embedding(model: Model, x: Shapes) -> tuple[Operator, ...]:
    look_up = op.embedding(
        x.elements,
        tokens=x.tokens,
        hidden=model.hidden_size,
        vocab=_vocab_share(model, x),
        positions=model.max_position_embeddings if model.position == "learned" else 0,
        dropped=x.local_tokens if model.embedding_dropout > 0 else 0,
    )
    return (look_up,) if x.tp == 1 else (look_up, _exit(x, model.hidden_size))


def _head(model: Model, x: Shapes) -> tuple[Operator, ...]:
    e, h, share = x.elements, model.hidden_size, _vocab_share(model, x)
    e = replace(e, placeholder=x.megatron_head)
    logits = op.linear("head", e, tokens=x.tokens, inputs=h, outputs=share, bias=False)
    loss = op.cross_entropy(e, tokens=x.tokens, vocab=share)
    if x.tp == 1:
        return (_norm("final norm", model, x), logits, loss)
    # Megatron's vocabulary-parallel loss sums three fp32 numbers a token over the ranks:
    # the maximum, the target's logit and the sum of exponentials.
    number = Operator(name="loss sum", forward=(Flow("all_reduce", float(op.FP32 * x.tokens)),))
    product = _entrance(x, h, logits)
    return (_norm("final norm", model, x), *product, number, number, number, loss)
