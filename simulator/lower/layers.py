"""From a model to blocks of operators: the embedding, its layers, the head with its loss.

Tensor parallelism is Megatron-LM's: attention heads and the MLP's inner dimension are divided over
tp ranks, the vocabulary too; norms, residuals and dropouts are repeated on every rank, or with
sequence parallelism divided along the sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate

from simulator.describe.layer_list import LayerList
from simulator.describe.model import LayerKind, Model, Patches
from simulator.describe.plan import Plan
from simulator.describe.resnet import ResNet
from simulator.describe.scenario import Scenario
from simulator.lower import convolution
from simulator.lower import operators as op
from simulator.lower.blocks import Block, Blocks
from simulator.lower.branches import branches
from simulator.lower.layer_list import listed
from simulator.lower.operators import Operator
from simulator.lower.parallel import entrance, leaving, linear, norm, opened
from simulator.lower.plain import Written, as_written, eager_norm
from simulator.lower.quantised import weights_cast_in_forward, weights_turned_in_backward
from simulator.lower.recompute import Sizes, by_operator, lightly
from simulator.lower.resnet import resnet
from simulator.lower.shapes import Shapes, shapes
from simulator.program import Flow, Kernel


@lru_cache(maxsize=256)
def blocks(model: Model | ResNet | LayerList, x: Shapes) -> Blocks:
    """Return the blocks of a model as one rank of a tensor-parallel group computes them."""
    if isinstance(model, LayerList):
        return listed(model, x)
    if isinstance(model, ResNet):
        return _convolutional(model, x)
    kinds = model.layer_kinds
    made = {kind: Block(name="layer", operators=_layer(model, x, kind)) for kind in set(kinds)}
    every = tuple(made[kind] for kind in kinds)
    further = zip(every[model.num_hidden_layers :], range(len(kinds)), strict=False)
    first = (*_embedding(model, x), *_relative_positions(model, x))
    return Blocks(
        embedding=Block(name="embedding", operators=first),
        layers=every[: model.num_hidden_layers],
        bridge=Block(name="bridge", operators=_bridge(model, x)),
        head=Block(name="head", operators=_head(model, x.decoded)),
        further=tuple(b for layer, depth in further for b in _further(model, x, layer, depth)),
    )


def _layer(model: Model, x: Shapes, kind: LayerKind) -> tuple[Operator, ...]:
    """Return the operators of one layer.

    While a decoder's computes backward, the gradient of what its encoder has made waits too.
    """
    waiting = x.local_tokens + (x.decoded.local_tokens if kind.crosses else 0)
    stream = float(x.elements.activation * waiting * model.hidden_size)
    layer = tuple(replace(operator, stream_bytes=stream) for operator in branches(model, x, kind))
    if x.elements.cast_weights:
        layer = tuple(weights_cast_in_forward(o, x.elements) for o in layer)
    if x.elements.turns_weights:
        layer = tuple(map(weights_turned_in_backward, layer))
    if x.plain:
        layer = as_written(layer, x.elements, _written(model, x))
    if x.attention != "unfused" and not (kind.has_experts or kind.crosses or model.is_latent):
        layer = by_operator(layer, x.elements, _sizes(model, x))
    return _compiled(layer, model, x.decoded if kind.crosses else x) if x.compiled else layer


def _written(model: Model, x: Shapes) -> Written:
    inner = model.intermediate_size // x.tp
    queries = model.num_attention_heads * model.head_dim // x.tp
    keys = model.num_key_value_heads * model.head_dim // x.tp
    return Written(
        columns={
            "qkv": {"q": queries, "k": keys, "v": keys},
            "fc1": {"gate": inner, "up": inner},
        },
        compiled=x.compiled,
        tp=x.tp,
        pipelined=x.tp > 1 and x.tp_overlap == "all",
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
    """Return a layer whose residual sums and the norms after them are one kernel each."""
    moved = float(x.elements.activation * x.local_tokens * model.hidden_size)
    for name in ("attention residual", "cross residual"):
        at = next((i for i, o in enumerate(layer) if o.name == name), None)
        if at is None:
            continue
        one = op.fused(layer[at], layer[at + 1], moved)
        if layer[at].again:
            one = replace(one, again=one.forward)
        layer = (*layer[:at], one, *layer[at + 2 :])
    return layer


def _convolutional(model: ResNet, x: Shapes) -> Blocks:
    parts = resnet(model, x.elements, batch=x.microbatch_size, image=x.image_size, loss=x.loss)
    made = {id(one): Block(name="layer", operators=one) for one in parts.blocks}
    return Blocks(
        embedding=Block(name="embedding", operators=parts.stem),
        layers=tuple(made[id(one)] for one in parts.blocks),
        head=Block(name="head", operators=parts.head),
    )


def num_parameters(model: Model | ResNet | LayerList) -> int:
    """Return the parameters of a whole model, a shared embedding counted once."""
    return _parameters(model, lambda o: o.params)


def active_parameters(model: Model | ResNet | LayerList) -> int:
    """Return the parameters that one token meets: of the experts of a layer those it goes to."""
    if not isinstance(model, Model) or model.num_experts is None:
        return num_parameters(model)
    count, of = model.experts_per_token, model.num_experts
    return _parameters(model, lambda o: o.params * count // of if o.expert else o.params)


def _parameters(model: Model | ResNet | LayerList, held: Callable[[Operator], int]) -> int:
    x = Shapes(
        microbatch_size=1, sequence_length=1, tp=1, attention="flash",
        elements=op.Elements(2, 2, 2, "bf16"),
    )  # fmt: skip
    parts = blocks(model, x)
    every = (*parts.layers, *parts.others)
    by_block = {id(block): sum(map(held, block.operators)) for block in every}
    total = sum(by_block[id(block)] for block in every)
    if isinstance(model, Model) and model.shares_embedding:
        total -= model.vocab_size * model.hidden_size
    return total


def model_flops_per_token(s: Scenario) -> float:
    """Return the FLOPs that training one token takes by the MFU convention.

    Three times the forward matrix products (forward, input gradient, weight gradient) with
    attention counted in full: 6 FLOPs a weight and 12 x layers x hidden x sequence, as PaLM
    (Chowdhery et al., 2022, appendix B), nanoGPT and Megatron-LM count. Of experts those that a
    token goes to count, dropped or not. Each token of an encoder and a decoder meets the weights of
    its own stack, and an encoder's those that make keys and values of it for the decoder.
    """
    x = shapes(s)
    parts = blocks(s.model, Shapes(
        microbatch_size=1, sequence_length=x.sequence_length, tp=1, elements=x.elements,
        attention=x.attention, image_size=x.image_size,
        decoder_sequence_length=x.decoder_sequence_length,
    ))  # fmt: skip
    layers = sum(len(r) * layer.model_flops for layer, r in parts.runs(range(len(parts.layers))))
    others = sum(block.model_flops for block in parts.others)
    return 3 * (layers + others) / s.tokens_per_sample


def recomputed_flops_per_token(s: Scenario) -> float:
    """Return the forward matrix FLOPs of one token that backward computes again."""
    x, parts = shapes(s), blocks(s.model, shapes(s))
    if s.plan.recompute == "none":
        return 0.0
    limit = s.plan.recompute_layers
    counts = s.layers_per_stage
    flops = sum(
        len(run) * _again(layer, s.plan)
        for first, count in zip(accumulate((0, *counts)), counts, strict=False)
        for layer, run in parts.runs(
            range(first, first + (count if limit is None else min(limit, count)))
        )
    )
    if limit is None:
        flops += sum(_again(block, s.plan) for block in parts.further[::2])
    tokens = x.tokens + (x.decoded.tokens if x.decoder_sequence_length else 0)
    return flops * x.tp / tokens


def _again(layer: Block, plan: Plan) -> float:
    """Return the forward matrix FLOPs of a layer that backward computes again."""
    mode, operators = plan.recompute, layer.operators
    if mode in ("selective-op", "light"):
        if mode == "light":
            operators = lightly(operators, plan.recompute_modules)
        parts = [p for o in operators for p in o.again]
        products = (p for p in parts if isinstance(p, Kernel) and p.matmul is not None)
        return sum(p.flops * p.count for p in products)
    return sum(o.model_flops for o in operators if mode == "full" or o.core_input_bytes is not None)


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
    normed = (norm("embedding norm", model, x),) if model.embedding_norm else ()
    return (look_up, *normed) if x.tp == 1 else (look_up, leaving(x, model.hidden_size), *normed)


def _relative_positions(model: Model, x: Shapes) -> tuple[Operator, ...]:
    """Return what makes the bias of all scores of a stack, where positions are relative."""
    buckets = model.relative_attention_num_buckets
    if not buckets:
        return ()
    heads, length = model.num_attention_heads // x.tp, x.sequence_length
    return (op.relative_positions(x.elements, heads=heads, length=length, buckets=buckets),)


def _bridge(model: Model, x: Shapes) -> tuple[Operator, ...]:
    """Return what lies between an encoder and its decoder; nothing in a model of one stack.

    The encoder's last norm, whose result all layers of the decoder read, and the embedding of the
    decoder's tokens, from the encoder's matrix.
    """
    if not model.num_decoder_layers:
        return ()
    e, own, size = x.elements, x.decoded, x.local_tokens * model.hidden_size
    normed = (norm("encoder norm", model, x), *_dropped("encoder dropout", model, x))
    made = float(e.activation * size)
    last = replace(normed[-1], kept_bytes=normed[-1].kept_bytes + made)
    embedded, *rest = _embedding(model, own)
    embedded = replace(
        embedded, name="decoder embedding", tied=True, params=0, matrices=(), output_grad_bytes=0.0
    )
    own_ones = (embedded, *rest, *_relative_positions(model, own))
    return (*normed[:-1], last, *(replace(o, stream_bytes=made) for o in own_ones))


def _dropped(name: str, model: Model, x: Shapes) -> tuple[Operator, ...]:
    """Return the dropout after the last norm of a stack, where the model has it."""
    size = x.local_tokens * model.hidden_size
    return (op.dropout(name, x.elements, size=size),) if model.inner_dropout > 0 else ()


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
    # the gradient of its output is that of the positions', but for the class token
    return (replace(convolution.of_images(cut), output_grad_bytes=0.0), placed)


def _head(model: Model, x: Shapes) -> tuple[Operator, ...]:
    e, h, share = x.elements, model.hidden_size, _vocab_share(model, x)
    rows = x.microbatch_size if model.patches else x.tokens  # the class token's alone
    normed = norm("final norm", model, x)
    before = (
        eager_norm(normed, e) if x.plain else normed,  # outside what is compiled
        *_dropped("final dropout", model, x),
        *(_transform(model, x) if model.head_transform else ()),
    )
    own = replace(e, placeholder=x.megatron_head)
    logits = op.linear("head", own, tokens=rows, inputs=h, outputs=share, bias=False)
    logits = replace(logits, tied=model.tie_word_embeddings)
    bias = (op.bias("head bias", e, tokens=rows, outputs=share),) if model.head_bias else ()
    loss = op.cross_entropy(e, tokens=rows, vocab=share, kind=x.loss, parallel=x.tp > 1)
    after = _pooler(model, x) if model.pooler else ()
    if x.tp == 1:
        return (*before, logits, *bias, loss, *after)
    # Megatron's vocabulary-parallel loss sums three fp32 numbers a token over the ranks:
    # the maximum, the target's logit and the sum of exponentials. Transformer Engine gathers them.
    number = Operator(name="loss sum", forward=(Flow("all_reduce", float(op.FP32 * rows)),))
    sums: tuple[Operator, ...] = (number, number, number)
    if x.loss == "transformer_engine":
        numbers = Flow("all_gather", float(3 * op.FP32 * rows * x.tp))
        sums = (Operator(name="loss gather", forward=(numbers,)),)
    product = entrance(x, h, logits, rows)
    return (*before, *product, *bias, *sums, loss, *after)


def _further(model: Model, x: Shapes, layer: Block, depth: int) -> tuple[Block, Block]:
    """Return a layer that predicts one token further ahead, and its head.

    The state before it and the next token's embedding are normed, laid side by side and multiplied
    down to one state (DeepSeek-V3, arXiv 2412.19437, section 2.2). The embedding is the model's,
    of which the last stage has a copy where it is not the first; the head's matrix is the head's.
    """
    e, h, size = x.elements, model.hidden_size, x.local_tokens * model.hidden_size
    embedded, *rest = _embedding(model, x)
    embedded = replace(embedded, name="further embedding", tied=True, output_grad_bytes=0.0)
    if depth:  # one copy serves all
        embedded = replace(embedded, params=0, matrices=())
    down = linear(
        "further projection", x, inputs=2 * h, outputs=h // x.tp, bias=False,
        divided=(x.divided, 1),
    )  # fmt: skip
    entrance = (
        embedded,
        *rest,
        norm("further embedding norm", model, x),
        norm("further state norm", model, x),
        op.pointwise(
            "side by side", e, reads=2 * size, writes=2 * size, grad_reads=2 * size,
            grad_writes=2 * size, kept_bytes=0.0, passing=(4 * size, 4 * size),
        ),
        *opened(x, 2 * h, down),
        *_columns_gathered(x, h),
    )  # fmt: skip
    head = tuple(
        replace(o, params=0, matrices=()) if o.name == "head" else o for o in _head(model, x)
    )
    return (
        Block(name="layer", operators=(*entrance, *layer.operators)),
        Block(name="head", operators=head),
    )


def _columns_gathered(x: Shapes, hidden: int) -> tuple[Operator, ...]:
    """Return how tp ranks put their columns of a state together; each then takes its own tokens."""
    if x.tp == 1:
        return ()
    gather = (Flow("all_gather", float(x.elements.activation * x.tokens * hidden)),)
    again = gather if x.sequence_parallel else ()
    return (Operator(name="gather columns", forward=gather, input_grad=again),)


def _transform(model: Model, x: Shapes) -> tuple[Operator, ...]:
    """Return what precedes BERT's masked-token head, on every rank in full."""
    e, tokens, h = x.elements, x.local_tokens, model.hidden_size
    return (
        op.linear("transform", e, tokens=tokens, inputs=h, outputs=h, bias=True),
        op.activation(model.activation, e, size=tokens * h, gated=False),
        norm("transform norm", model, x),
    )


def _pooler(model: Model, x: Shapes) -> tuple[Operator, ...]:
    """Return BERT's loss on whether the second sentence follows, from each first token."""
    e, batch, h = x.elements, x.microbatch_size, model.hidden_size
    return (
        op.linear("pooler", e, tokens=batch, inputs=h, outputs=h, bias=True),
        op.activation("tanh", e, size=batch * h, gated=False),
        op.linear("next sentence", e, tokens=batch, inputs=h, outputs=2, bias=True),
        op.cross_entropy(e, tokens=batch, vocab=2, kind=x.loss),
    )
