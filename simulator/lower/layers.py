"""From a model to blocks of operators: the embedding, its layers, the head with its loss.

Tensor parallelism is Megatron-LM's: attention heads and the MLP's inner dimension are divided over
tp ranks, the vocabulary too; norms, residuals and dropouts are repeated on every rank, or with
sequence parallelism divided along the sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby

from simulator.describe.model import Model, Patches
from simulator.describe.resnet import ResNet
from simulator.describe.scenario import Scenario
from simulator.lower import convolution
from simulator.lower import operators as op
from simulator.lower.attention import ATTENTION, Heads
from simulator.lower.latest import for_latest
from simulator.lower.operators import Operator
from simulator.lower.places import layout
from simulator.lower.quantised import gathered_in_fp8, in_fp8, weights_cast_in_forward
from simulator.lower.recompute import Sizes, by_operator
from simulator.lower.resnet import resnet
from simulator.program import Flow, Kernel

IMAGE_SIZE = 224
"""Pixels along each side where it does not matter, as to parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """What the operators of a model depend on, besides the model itself."""

    microbatch_size: int
    sequence_length: int
    tp: int
    elements: op.Elements
    attention: str
    sequence_parallel: bool = False
    tp_overlap: str = "none"
    compiled: bool = False
    loss_in_place: bool = True
    megatron_head: bool = False
    """Whether the head's product is Megatron-LM's own, with its placeholder for the gradient."""
    image_size: int = IMAGE_SIZE
    """Pixels along each side, where samples are images."""

    @property
    def tokens(self) -> int:
        """Tokens of one microbatch."""
        return self.microbatch_size * self.sequence_length

    @property
    def divided(self) -> int:
        """Ranks that gather each other's part of the sequence."""
        return self.tp if self.sequence_parallel else 1

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
    def trained(self) -> int:
        """Parameters of one rank that are trained."""
        return sum(o.trained for o in self.operators)

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
    """The blocks of a model, in forward order; layers that are alike are one object."""

    embedding: Block
    layers: tuple[Block, ...]
    head: Block

    @property
    def layer(self) -> Block:
        """The layer of a model whose layers are all alike: a transformer's."""
        return self.layers[0]

    def runs(self, count: int) -> list[tuple[Block, range]]:
        """Return the first `count` layers: blocks, and the numbers of those in a row that are one.

        Where layers are alike these are any `count` of them.
        """
        runs = (list(run) for _, run in groupby(range(count), lambda i: id(self.layers[i])))
        return [(self.layers[run[0]], range(run[0], run[-1] + 1)) for run in runs]


@for_latest
def shapes(s: Scenario) -> Shapes:
    """Return what the operators of a scenario depend on."""
    p = s.precision
    accumulation = "fused" if s.run.fused_accumulation else "separate"
    alone = s.num_microbatches == 1 or layout(s).updates
    if alone or (s.plan.zero > 1 and s.plan.shards > 1):
        accumulation = "none"  # shards are added, which takes next to nothing
    return Shapes(
        microbatch_size=s.plan.microbatch_size,
        sequence_length=s.sequence_length,
        tp=s.plan.tp,
        elements=_casting(
            op.Elements(
                p.activation, p.weight, p.gradient, p.matmul, accumulation,
                placeholder=s.run.linear_layers == "megatron",
            ),
            s,
        ),
        attention=s.run.attention,
        sequence_parallel=s.plan.sequence_parallel,
        tp_overlap=s.plan.tp_overlap,
        compiled=s.run.compiled,
        loss_in_place=s.run.loss_in_place,
        megatron_head=s.run.linear_layers != "torch",
        image_size=s.run.image_size or IMAGE_SIZE,
    )  # fmt: skip


def _casting(e: op.Elements, s: Scenario) -> op.Elements:
    """Return elements with what casting them to fp8 moves: read, written, written transposed."""
    if s.precision.linear != "fp8":
        return e
    reads = 1 if s.run.fp8_scaling == "delayed" or s.run.compiled else 2
    return replace(
        e,
        cast=reads * e.activation + 1,
        transposed=int(s.cluster.node.device.architecture != "blackwell"),
        cast_weights=s.plan.zero == 3 and s.plan.shards > 1,
    )


@lru_cache(maxsize=256)
def blocks(model: Model | ResNet, x: Shapes) -> Blocks:
    """Return the blocks of a model as one rank of a tensor-parallel group computes them."""
    if isinstance(model, ResNet):
        return _convolutional(model, x)
    stream = float(x.elements.activation * x.local_tokens * model.hidden_size)
    branches = (*_attention(model, x), *_mlp(model, x))
    layer = tuple(replace(operator, stream_bytes=stream) for operator in branches)
    if x.elements.cast_weights:
        layer = tuple(weights_cast_in_forward(o, x.elements) for o in layer)
    if x.attention != "unfused":
        layer = by_operator(layer, x.elements, _sizes(model, x))
    if x.compiled:
        layer = _compiled(layer, model, x)
    return Blocks(
        embedding=Block(name="embedding", operators=_embedding(model, x)),
        layers=(Block(name="layer", operators=layer),) * model.num_hidden_layers,
        head=Block(name="head", operators=_head(model, x)),
    )


def _sizes(model: Model, x: Shapes) -> Sizes:
    per_head = x.tokens * model.head_dim // x.tp
    return Sizes(
        hidden=x.tokens * model.hidden_size,
        local_hidden=x.local_tokens * model.hidden_size,
        queries=model.num_attention_heads * per_head,
        keys=model.num_key_value_heads * per_head,
        inner=x.tokens * model.intermediate_size // x.tp,
        gated=model.gated_mlp,
        scattered=x.tp > 1 and x.sequence_parallel,
        compiled=x.compiled,
    )


def _compiled(layer: tuple[Operator, ...], model: Model, x: Shapes) -> tuple[Operator, ...]:
    """Return a layer whose residual sum and the norm after it are one kernel."""
    at = [o.name for o in layer].index("attention residual")
    moved = float(x.elements.activation * x.local_tokens * model.hidden_size)
    one = op.fused(layer[at], layer[at + 1], moved)
    if x.attention != "unfused":
        one = replace(one, again=one.forward)
    return (*layer[:at], one, *layer[at + 2 :])


def _convolutional(model: ResNet, x: Shapes) -> Blocks:
    parts = resnet(
        model, x.elements, batch=x.microbatch_size, image=x.image_size, in_place=x.loss_in_place
    )
    made = {id(one): Block(name="layer", operators=one) for one in parts.blocks}
    return Blocks(
        embedding=Block(name="embedding", operators=parts.stem),
        layers=tuple(made[id(one)] for one in parts.blocks),
        head=Block(name="head", operators=parts.head),
    )


def num_parameters(model: Model | ResNet) -> int:
    """Return the parameters of a whole model, a tied embedding counted once."""
    x = Shapes(
        microbatch_size=1, sequence_length=1, tp=1, attention="flash",
        elements=op.Elements(2, 2, 2, "bf16"),
    )  # fmt: skip
    parts = blocks(model, x)
    layers = sum(len(run) * layer.params for layer, run in parts.runs(len(parts.layers)))
    total = parts.embedding.params + layers + parts.head.params
    if isinstance(model, Model) and model.tie_word_embeddings:
        total -= model.vocab_size * model.hidden_size
    return total


def model_flops_per_token(s: Scenario) -> float:
    """Return the FLOPs that training one token takes by the MFU convention.

    Three times the forward matrix products (forward, input gradient, weight gradient) with
    attention counted in full: 6 FLOPs a weight and 12 x layers x hidden x sequence, as PaLM
    (Chowdhery et al., 2022, appendix B), nanoGPT and Megatron-LM count.
    """
    x = shapes(s)
    parts = blocks(s.model, Shapes(
        microbatch_size=1, sequence_length=x.sequence_length, tp=1, elements=x.elements,
        attention=x.attention, image_size=x.image_size,
    ))  # fmt: skip
    layers = sum(len(run) * layer.model_flops for layer, run in parts.runs(len(parts.layers)))
    forward = layers + parts.head.model_flops + parts.embedding.model_flops
    return 3 * forward / x.sequence_length


def recomputed_flops_per_token(s: Scenario) -> float:
    """Return the forward matrix FLOPs of one token that backward computes again."""
    x, parts, mode = shapes(s), blocks(s.model, shapes(s)), s.plan.recompute
    if mode == "none":
        return 0.0
    limit = s.plan.recompute_layers
    flops = sum(
        len(run) * sum(_again(o, mode) for o in layer.operators)
        for count in s.layers_per_stage
        for layer, run in parts.runs(count if limit is None else min(limit, count))
    )
    return flops * x.tp / x.tokens


def _again(o: Operator, mode: str) -> float:
    """Return the forward matrix FLOPs of an operator of a layer that backward computes again."""
    if mode == "selective-op":
        products = [p for p in o.again if isinstance(p, Kernel) and p.matmul is not None]
        return sum(p.flops for p in products)
    return o.model_flops if mode == "full" or o.core_input_bytes is not None else 0.0


def _parallel(x: Shapes, hidden: int, first: Operator, *rest: Operator) -> tuple[Operator, ...]:
    """Wrap operators whose inner dimension is divided over the tensor-parallel ranks."""
    if x.tp == 1:
        return (first, *rest)
    enter, first = _entrance(x, hidden, first)
    leave = _exit(x, hidden)
    if x.elements.cast:
        enter, first, leave = (gathered_in_fp8(o, x.elements) for o in (enter, first, leave))
    if x.tp_overlap == "all":
        enter, first = op.beside(enter, first)
        leave, last = op.beside(leave, rest[-1])
        rest = (*rest[:-1], last)
    return (enter, first, *rest, leave)


def _linear(
    name: str, x: Shapes, *, inputs: int, outputs: int, bias: bool, divided: tuple[int, int]
) -> Operator:
    """Return a linear operator of a layer; `divided` are those of `quantised.in_fp8`."""
    e = x.elements
    o = op.linear(name, e, tokens=x.tokens, inputs=inputs, outputs=outputs, bias=bias)
    return in_fp8(o, e, divided=divided) if e.cast else o


def _entrance(
    x: Shapes, hidden: int, product: Operator, tokens: int | None = None
) -> tuple[Operator, Operator]:
    size = float(x.elements.activation * (tokens or x.tokens) * hidden)
    return op.first_of_region(
        product, size, x.tp, sequence=x.sequence_parallel, overlap=x.tp_overlap != "none"
    )


def _exit(x: Shapes, hidden: int) -> Operator:
    size = float(x.elements.activation * x.tokens * hidden)
    return op.leaving_tensor_parallel(size, sequence=x.sequence_parallel)


def _norm(name: str, model: Model, x: Shapes) -> Operator:
    bias = model.norm == "layer_norm"
    return op.norm(name, x.elements, tokens=x.local_tokens, hidden=model.hidden_size, bias=bias)


def _attention(model: Model, x: Shapes) -> tuple[Operator, ...]:
    e, tokens, h, drops = x.elements, x.tokens, model.hidden_size, model.hidden_dropout > 0
    heads = Heads(
        batch=x.microbatch_size,
        sequence=x.sequence_length,
        queries=model.num_attention_heads // x.tp,
        keys=model.num_key_value_heads // x.tp,
        dim=model.head_dim,
        causal=model.causal,
        alibi=model.position == "alibi",
    )
    bias = model.attention_bias
    output_bias = bias if model.output_bias is None else model.output_bias
    query_size = heads.queries * heads.dim
    qkv_size = (heads.queries + 2 * heads.keys) * heads.dim
    rotated = tokens * (heads.queries + heads.keys) * heads.dim
    rotary = op.rotary(e, size=rotated, whole=tokens * qkv_size)
    return (
        _norm("attention norm", model, x),
        *_parallel(
            x, h,
            _linear("qkv", x, inputs=h, outputs=qkv_size, bias=bias, divided=(x.divided, 1)),
            *([op.head_norm(e, size=rotated, dim=heads.dim)] if model.qk_norm else []),
            *([rotary] if model.position == "rotary" else []),
            *_core(x, heads, model.attention_dropout > 0),
            _linear(
                "proj", x, inputs=query_size, outputs=h, bias=output_bias, divided=(1, x.divided)
            ),
        ),
        op.residual("attention residual", e, size=x.local_tokens * h, dropout=drops),
    )  # fmt: skip


def _core(x: Shapes, heads: Heads, dropout: bool) -> tuple[Operator, ...]:
    """Return the attention core; fused, it keeps its result where the next product has a copy."""
    core = ATTENTION[x.attention](x.elements, heads, dropout)
    if not x.elements.cast or x.attention == "unfused":
        return core
    size = x.elements.activation * x.tokens * heads.queries * heads.dim
    return tuple(replace(o, kept_bytes=o.kept_bytes + size) for o in core)


def _mlp(model: Model, x: Shapes) -> tuple[Operator, ...]:
    e, tokens, h, drops = x.elements, x.tokens, model.hidden_size, model.hidden_dropout > 0
    inner = model.intermediate_size // x.tp
    up = (2 if model.gated_mlp else 1) * inner
    return (
        _norm("mlp norm", model, x),
        *_parallel(
            x, h,
            _linear("fc1", x, inputs=h, outputs=up, bias=model.mlp_bias, divided=(x.divided, 1)),
            op.activation(model.activation, e, size=tokens * inner, gated=model.gated_mlp),
            _linear("fc2", x, inputs=inner, outputs=h, bias=model.mlp_bias, divided=(1, x.divided)),
        ),
        op.residual("mlp residual", e, size=x.local_tokens * h, dropout=drops),
    )  # fmt: skip


def _vocab_share(model: Model, x: Shapes) -> int:
    """Rows of the embedding on one rank; rounded up when tp does not divide it."""
    return -(-model.vocab_size // x.tp)


def _embedding(model: Model, x: Shapes) -> tuple[Operator, ...]:
    if model.patches:
        return _patches(model, model.patches, x)
    learned = model.max_position_embeddings if model.position == "learned" else 0
    look_up = op.embedding(
        x.elements,
        tokens=x.tokens,
        hidden=model.hidden_size,
        vocab=_vocab_share(model, x),
        positions=learned + model.token_types,
        dropped=x.local_tokens if model.embedding_dropout > 0 else 0,
    )
    norm = (_norm("embedding norm", model, x),) if model.embedding_norm else ()
    return (look_up, *norm) if x.tp == 1 else (look_up, _exit(x, model.hidden_size), *norm)


def _patches(model: Model, patches: Patches, x: Shapes) -> tuple[Operator, ...]:
    """Return the embedding of an image: a convolution of a patch each, class token, positions."""
    e, h, size = x.elements, model.hidden_size, patches.patch_size
    image = convolution.Maps(x.microbatch_size, patches.num_channels, patches.image_size)
    grid = convolution.below(image, h, size, size, 0)
    cut = convolution.convolution("patches", e, image, grid, kernel=size, bias=True)
    placed = op.positions(
        e, tokens=x.tokens, hidden=h, rows=1 + patches.tokens,
        dropped=x.tokens if model.embedding_dropout > 0 else 0,
    )  # fmt: skip
    return (convolution.of_images(cut), placed)


def _head(model: Model, x: Shapes) -> tuple[Operator, ...]:
    e, h, share = x.elements, model.hidden_size, _vocab_share(model, x)
    rows = x.microbatch_size if model.patches else x.tokens  # the class token's alone
    before = (
        _norm("final norm", model, x),
        *(_transform(model, x) if model.head_transform else ()),
    )
    own = replace(e, placeholder=x.megatron_head)
    logits = op.linear("head", own, tokens=rows, inputs=h, outputs=share, bias=False)
    bias = (op.bias("head bias", e, tokens=rows, outputs=share),) if model.head_bias else ()
    loss = op.cross_entropy(e, tokens=rows, vocab=share, in_place=x.loss_in_place)
    after = _pooler(model, x) if model.pooler else ()
    if x.tp == 1:
        return (*before, logits, *bias, loss, *after)
    # Megatron's vocabulary-parallel loss sums three fp32 numbers a token over the ranks:
    # the maximum, the target's logit and the sum of exponentials.
    number = Operator(name="loss sum", forward=(Flow("all_reduce", float(op.FP32 * rows)),))
    product = _entrance(x, h, logits, rows)
    return (*before, *product, *bias, number, number, number, loss, *after)


def _transform(model: Model, x: Shapes) -> tuple[Operator, ...]:
    """Return what precedes BERT's masked-token head, on every rank in full."""
    e, tokens, h = x.elements, x.local_tokens, model.hidden_size
    return (
        op.linear("transform", e, tokens=tokens, inputs=h, outputs=h, bias=True),
        op.activation(model.activation, e, size=tokens * h, gated=False),
        _norm("transform norm", model, x),
    )


def _pooler(model: Model, x: Shapes) -> tuple[Operator, ...]:
    """Return BERT's loss on whether the second sentence follows, from each first token."""
    e, batch, h = x.elements, x.microbatch_size, model.hidden_size
    return (
        op.linear("pooler", e, tokens=batch, inputs=h, outputs=h, bias=True),
        op.activation("tanh", e, size=batch * h, gated=False),
        op.linear("next sentence", e, tokens=batch, inputs=h, outputs=2, bias=True),
        op.cross_entropy(e, tokens=batch, vocab=2, in_place=x.loss_in_place),
    )
