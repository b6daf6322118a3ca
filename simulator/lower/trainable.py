"""Which parameters are trained: frozen layers, adapters, and what both spare and add.

A frozen parameter has no gradient, no master copy and no optimizer state. Backward goes down to the
first layer that is trained, whose input's gradient it still computes, and no further.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

from simulator.describe.layer_list import LayerList
from simulator.describe.model import Model
from simulator.describe.resnet import ResNet
from simulator.describe.run import Run
from simulator.describe.scenario import Scenario
from simulator.lower import layers
from simulator.lower import operators as op
from simulator.lower.blocks import Block, Blocks
from simulator.lower.context import ALONE
from simulator.lower.latest import for_latest
from simulator.lower.operators import Operator
from simulator.lower.places import layout
from simulator.lower.quantised import FP8, fp8_weights
from simulator.lower.quantization import fake_quantized
from simulator.lower.shapes import Shapes, shapes
from simulator.lower.tensors import Tensors, tensors_of
from simulator.program import Kernel
from simulator.schedules import Action, Actions, cells

STORED = {"int8": 1.0, "nf4": 0.5 + 0.127 / 8}
"""Bytes a weight as it lies in memory: one, scales of rows left out (Dettmers et al., 2022, arXiv
2208.07339); four bits and doubly quantised scales of 0.127 bits (QLoRA, section 3)."""


class Tuning(NamedTuple):
    """What of a run decides which parameters are trained, and in what products compute."""

    embedding_frozen: bool
    lora_rank: int | None
    lora_targets: tuple[str, ...]
    base_weights: str | None
    fake_quantization: bool

    @classmethod
    def of(cls, run: Run) -> Tuning:
        """Return the tuning of a run."""
        return cls(
            not run.trains_all, run.lora_rank, run.lora_targets, run.base_weights,
            run.fake_quantization,
        )  # fmt: skip


class Tuned(NamedTuple):
    """Blocks of a scenario: layers as they are trained, and as they are where they are frozen."""

    blocks: Blocks
    still: Block
    """A frozen layer; only models whose layers are all alike have some."""


@for_latest
def tuned(s: Scenario) -> Tuned:
    """Return the blocks of a scenario as one rank of a tensor-parallel group computes them."""
    return _tuned(s.model, shapes(s), Tuning.of(s.run))


@lru_cache(maxsize=256)
def _tuned(model: Model | ResNet | LayerList, x: Shapes, tuning: Tuning) -> Tuned:
    parts, e = layers.blocks(model, x), x.elements
    plain = isinstance(model, Model) and not model.num_experts
    if not plain or parts.further or len(set(parts.kinds)) > 1:
        return Tuned(parts, _frozen(parts.layer))  # these are trained whole
    embedding, layer, head = parts.embedding, parts.layer, parts.head
    if tuning.fake_quantization:
        layer, head = (_each(b, partial(_rounded, e=e)) for b in (layer, head))
    still = layer
    if tuning.lora_rank is not None:
        alone = tuning._replace(lora_targets=())
        still = _each(layer, partial(_adapted, e=e, tuning=alone))
        layer = _each(layer, partial(_adapted, e=e, tuning=tuning))
        head = _each(head, partial(_weight_frozen, e=e))
    elif tuning.embedding_frozen and model.tie_word_embeddings:
        head = _each(head, lambda o: _weight_frozen(o, e) if o.tied else o)
    if tuning.embedding_frozen:
        embedding = _frozen(embedding)
    every = (layer,) * len(parts.layers)
    return Tuned(Blocks(embedding=embedding, layers=every, head=head), _frozen(still))


def _each(block: Block, change: Callable[[Operator], Operator]) -> Block:
    return replace(block, operators=tuple(change(o) for o in block.operators))


def _is_product(o: Operator) -> bool:
    """Return whether an operator multiplies with a weight."""
    return bool(o.matrices) and bool(o.input_grad)


def _rounded(o: Operator, e: op.Elements) -> Operator:
    return fake_quantized(o, e) if _is_product(o) else o


def _frozen(block: Block) -> Block:
    """Return a block that computes forward only and keeps nothing."""

    def one(o: Operator) -> Operator:
        inner = None if o.core_input_bytes is None else 0.0
        return replace(
            o, input_grad=(), weight_grad=(), kept_bytes=0.0, core_input_bytes=inner, matrices=(),
            frozen=o.params,
        )  # fmt: skip

    return _each(block, one)


def _sides(o: Operator) -> tuple[int, int, int]:
    """Return the tokens, inputs and outputs of a product."""
    matmuls = (part.matmul for part in o.forward if isinstance(part, Kernel) and part.matmul)
    _, tokens, outputs, inputs = next(matmuls)
    return tokens, inputs, outputs


def _weight_frozen(o: Operator, e: op.Elements) -> Operator:
    """Return an operator that passes gradients on to its input only.

    A product keeps its input for its weight's gradient alone; other operators need what they keep.
    """
    if not o.params:
        return o
    kept = o.kept_bytes
    if _is_product(o):
        tokens, inputs, _ = _sides(o)
        kept = max(0.0, kept - e.activation * tokens * inputs)  # less where the sequence is divided
    return replace(o, weight_grad=(), kept_bytes=kept, matrices=(), frozen=o.params)


def _adapted(o: Operator, e: op.Elements, tuning: Tuning) -> Operator:
    """Return an operator of a layer under adapters.

    y = x W + (x A) B, with A of inputs x rank and B of rank x outputs (Hu et al., 2021, section
    4.1), in kernels of their own, as PEFT computes it; the dropout of x is left out. Kept are x for
    A's gradient and x A for B's. A quantised W is copied out before each product (as bitsandbytes'
    `MatMul4Bit`), and again in backward.
    """
    base = _weight_frozen(o, e)
    if not _is_product(o):
        return base
    if tuning.base_weights:
        base = _copied_out(base, o.matrices[0], e, STORED[tuning.base_weights])
    if o.name not in tuning.lora_targets:
        return base
    rank, (tokens, inputs, outputs) = tuning.lora_rank, _sides(o)
    assert rank is not None
    down = op.linear(f"{o.name} A", e, tokens=tokens, inputs=inputs, outputs=rank, bias=False)
    up = op.linear(f"{o.name} B", e, tokens=tokens, inputs=rank, outputs=outputs, bias=False)
    return replace(
        base,
        forward=(*base.forward, *down.forward, *up.forward, _sum(o.name, e, tokens * outputs)),
        input_grad=(
            *base.input_grad, *up.input_grad, *down.input_grad,
            _sum(f"{o.name} dgrad", e, tokens * inputs),
        ),
        weight_grad=up.weight_grad + down.weight_grad,
        kept_bytes=down.kept_bytes + up.kept_bytes,
        output_grad_bytes=up.output_grad_bytes + down.output_grad_bytes,
        params=o.params + down.params + up.params,
        matrices=down.matrices + up.matrices,
        model_flops=o.model_flops + down.model_flops + up.model_flops,
    )  # fmt: skip


def _sum(name: str, e: op.Elements, size: int) -> Kernel:
    """Return the kernel that adds what an adapter gives: two arrays read, one written."""
    return Kernel(f"{name} adapter sum", float(size), 3.0 * e.activation * size, "fp32")


def _copied_out(o: Operator, shape: tuple[int, int], e: op.Elements, stored: float) -> Operator:
    """Return a product whose weight is copied out of fewer bytes before each use."""
    size = shape[0] * shape[1]
    copy = Kernel(f"{o.name} dequantise", float(size), (stored + e.weight) * size, "fp32")
    return replace(
        o, forward=(copy, *o.forward), input_grad=(copy, *o.input_grad), quantized=size
    )  # fmt: skip


class Stage(NamedTuple):
    """What a stage holds."""

    layers: tuple[int, ...]
    """For each of its layers the model's first one like it."""
    is_first: bool
    is_last: bool
    num_frozen: int
    """Layers, its first ones, that are not trained."""
    has_both_ends: bool
    """Whether its ranks hold the first stage and the last."""

    @property
    def num_layers(self) -> int:
        """Layers of the stage."""
        return len(self.layers)


@for_latest
def stages(s: Scenario) -> tuple[Stage, ...]:
    """Return what each stage holds."""
    out, left, last = list[Stage](), s.run.frozen_layers, s.plan.num_stages - 1
    kinds, start = tuned(s).blocks.kinds, 0
    ranks_of = layout(s).ranks_of
    whole = ranks_of[0] == ranks_of[last]
    for number, count in enumerate(s.layers_per_stage):
        is_first, is_last = number == 0, number == last
        both = whole and (is_first or is_last)
        of = kinds[start : start + count]
        out.append(Stage(of, is_first, is_last, min(left, count), both))
        left, start = left - out[-1].num_frozen, start + count
    return tuple(out)


def first_trained_stage(s: Scenario) -> int:
    """Return the first stage that trains something: those before it have no backward."""
    every = stages(s)
    if s.run.trains_all:
        return 0
    return next((i for i, x in enumerate(every) if x.num_frozen < x.num_layers), len(every) - 1)


def without_backward(actions: Actions, stages: int) -> Actions:
    """Return complete action lists without the backward of the first `stages`.

    Nothing in those is trained: the stage after them sends no gradient back.
    """
    if not stages:
        return actions
    passes = ("B", "I", "W", "RECV_B")

    def stays(a: Action) -> bool:
        gone = (a.kind in passes and a.stage < stages) or (a.kind == "SEND_B" and a.stage <= stages)
        return not gone

    return tuple(
        tuple(
            a if all(map(stays, cell)) else a.alone for cell in cells(row) for a in cell if stays(a)
        )
        for row in actions
    )


def shares_embedding(s: Scenario, stage: Stage) -> bool:
    """Return whether a stage uses the embedding's matrix where its own rank holds it.

    What does so has no gradient of its own then.
    """
    return s.model.shares_embedding and stage.is_last and stage.has_both_ends


def layer_runs(parts: Tuned, stage: Stage) -> list[tuple[Block, range]]:
    """Return the layers of a stage: blocks, and the numbers of those in a row that are one."""
    if not stage.num_frozen:
        return parts.blocks.runs(stage.layers)
    frozen, trained = range(stage.num_frozen), range(stage.num_frozen, stage.num_layers)
    runs = [(parts.still, frozen), (parts.blocks.layer, trained)]
    return [(block, numbers) for block, numbers in runs if numbers]


def _held(parts: Tuned, stage: Stage) -> list[tuple[Block, int]]:
    """Return the kinds of block of a stage, and how many of each there are."""
    return [
        (parts.blocks.embedding, int(stage.is_first)),
        (parts.blocks.bridge, int(stage.is_first)),  # one stage holds all of a model that has one
        *((block, len(numbers)) for block, numbers in layer_runs(parts, stage)),
        *((block, int(stage.is_last)) for block in parts.blocks.ends),
    ]


def embedding_weight(parts: Blocks) -> int:
    """Return the parameters of the embedding's matrix that the end of the model uses too."""
    return sum(o.params for block in parts.ends for o in block.operators if o.tied)


def stage_params(s: Scenario, stage: Stage) -> int:
    """Return the parameters that one rank of a stage holds; a tied head shares the embedding."""
    parts = tuned(s)
    params = sum(count * block.params for block, count in _held(parts, stage))
    return params - shares_embedding(s, stage) * embedding_weight(parts.blocks)


def stage_tensors(s: Scenario, stage: Stage) -> Tensors:
    """Return what one rank of a stage trains."""
    held = [(block, count) for block, count in _held(tuned(s), stage) if count]
    return tensors_of(held, shares_embedding(s, stage))


def spared_weight_bytes(s: Scenario, stage: Stage) -> float:
    """Return how much less the weights of a stage take for lying in `run.base_weights`."""
    return sum(count * _spared_bytes(s, block) for block, count in _held(tuned(s), stage))


def _spared_bytes(s: Scenario, block: Block) -> float:
    if s.run.base_weights is None:
        return 0.0
    spared = s.precision.weight - STORED[s.run.base_weights]
    return sum(o.quantized for o in block.operators) * spared


def low_weights(s: Scenario, stage: Stage) -> int:
    """Return the parameters of a stage that forward multiplies with in fp8."""
    if s.precision.linear != FP8:
        return 0
    held = _held(tuned(s), stage)
    return sum(count * fp8_weights(block.operators) for block, count in held if count)


def repeated_parameters(parts: Tuned, stage: Stage) -> int:
    """Return the parameters of a stage that every tp rank holds whole: of norms, and matrices."""
    held = _held(parts, stage)
    return sum(n * o.trained for block, n in held if n for o in block.operators if o.repeated)


def weight_bytes(s: Scenario, block: Block) -> float:
    """Return what the weights of a block take where they compute, or are gathered to compute.

    Some may be in `run.base_weights`, or in fp8.
    """
    size, short = float(s.precision.weight), 0.0
    if s.run.fp8_weights:
        short = (size - shapes(s).elements.low) * fp8_weights(block.operators)
    return size * block.params - _spared_bytes(s, block) - short


def _whole(s: Scenario) -> Tuned:
    """Return the blocks that one rank alone would compute, of one sample."""
    x = replace(
        shapes(s), microbatch_size=1, tp=1, sequence_parallel=False, tp_overlap="none",
        context=ALONE,
    )  # fmt: skip
    return _tuned(s.model, x, Tuning.of(s.run))


class Counts(NamedTuple):
    """Parameters of a whole model, adapters with them."""

    total: int
    trained: int


def parameters(s: Scenario) -> Counts:
    """Return the parameters of a scenario's model, and those that are trained."""
    total = layers.num_parameters(s.model)
    if s.run.trains_all:
        return Counts(total, total)
    parts, still = _whole(s), s.run.frozen_layers
    trained = s.model.num_hidden_layers - still
    adapters = trained * (parts.blocks.layer.params - parts.still.params)
    return Counts(
        total + adapters, trained * parts.blocks.layer.trained + parts.blocks.head.trained
    )


def model_flops_per_token(s: Scenario) -> float:
    """Return the FLOPs that training one token needs by the MFU convention.

    As `layers.model_flops_per_token`, without the gradients of what is not trained and without the
    backward of frozen layers, and with the products of adapters.
    """
    if s.run.trains_all:
        return layers.model_flops_per_token(s)
    parts, still = _whole(s), s.run.frozen_layers
    trained = s.model.num_hidden_layers - still
    flops = parts.blocks.embedding.model_flops + still * parts.still.model_flops
    flops += trained * _training_flops(parts.blocks.layer) + _training_flops(parts.blocks.head)
    return flops / s.sequence_length


def _training_flops(block: Block) -> float:
    """Return matrix FLOPs forward and backward: backward's are twice forward's where all trains."""
    total = 0.0
    for o in block.operators:
        products = [part for part in o.backward if isinstance(part, Kernel) and part.matmul]
        backward = sum(part.flops for part in products) if o.frozen else 2 * o.model_flops
        total += o.model_flops + backward
    return total


def recomputed_flops_per_token(s: Scenario) -> float:
    """Return the forward matrix FLOPs of one token that backward computes again, adapters' apart.

    Frozen layers compute nothing again.
    """
    flops = layers.recomputed_flops_per_token(s)
    if not s.run.frozen_layers:
        return flops
    limit = s.plan.recompute_layers
    again = [(x.num_layers if limit is None else min(limit, x.num_layers), x) for x in stages(s)]
    trained = sum(max(0, count - x.num_frozen) for count, x in again)
    return flops * trained / sum(count for count, _ in again)
