"""Passes through a block: forward, backward, and backward's halves where a schedule splits it.

Where backward recomputes, so does the half that comes first, and what it has computed again stays
until the other half has used it; with `plan.recompute_again` only what a layer keeps anyhow stays,
and both halves compute the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from simulator.describe.scenario import Scenario
from simulator.lower.blocks import Block
from simulator.lower.operators import Operator
from simulator.lower.places import layout
from simulator.lower.recompute import lightly, stopping
from simulator.lower.segments import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    INPUT_GRAD,
    RECOMPUTE,
    WEIGHT_GRAD,
    Holding,
    Pass,
    Segment,
    moving,
    recomputing,
    segments,
)
from simulator.lower.sharding import gradient_copies, is_gathering
from simulator.lower.trainable import Stage, Tuned, layer_runs
from simulator.program import NONE, Memory


class Passes(NamedTuple):
    """Segments of the passes through a block or a stage; halves are empty where none is split."""

    forward: list[Segment]
    backward: list[Segment]
    input_grad: list[Segment]
    weight_grad: list[Segment]


def present(parts: Tuned, stage: Stage) -> list[tuple[Block, Sequence[int]]]:
    """Return the kinds of block of a stage in forward order, and the numbers of those in a row.

    Layers that predict further ahead count on from the last one.
    """
    runs: list[tuple[Block, Sequence[int]]] = []
    for block, numbers in layer_runs(parts, stage):
        if block is parts.blocks.decoder_layer:
            runs.append((parts.blocks.bridge, (NONE,)))
        runs.append((block, numbers))
    if stage.is_first:
        runs.insert(0, (parts.blocks.embedding, (NONE,)))
    if stage.is_last:
        runs.append((parts.blocks.head, (NONE,)))
        for i, block in enumerate(parts.blocks.further):
            runs.append((block, (NONE if i % 2 else stage.num_layers + i // 2,)))
    return runs


def block_passes(s: Scenario, block: Block, shared: bool, recompute: str) -> Passes:
    """Return the passes of a block.

    Args:
        s: the scenario.
        block: its operators.
        shared: whether the head's weight is the embedding's, and its gradient complete with that.
        recompute: what of it backward computes again, as `plan.recompute`.
    """
    detail, size, splits = s.run.detail, s.precision.gradient, layout(s).splits

    def gradient(_index: int, o: Operator) -> float:
        return 0.0 if shared and o.tied else float(o.trained * size)

    def unreduced(index: int, o: Operator) -> float:
        if not is_gathering(s):
            return 0.0
        return gradient(index, o) * s.precision.weight / size * gradient_copies(s, o.name)

    def everything(_index: int, o: Operator) -> float:
        return o.kept_bytes

    def first(index: int, o: Operator) -> float:
        if recompute == "full":  # the first operator keeps the layer's input
            return min(o.kept_bytes, o.stream_bytes or o.kept_bytes) if index == 0 else 0.0
        return o.kept_bytes if o.core_input_bytes is None else o.core_input_bytes

    def rest(index: int, o: Operator) -> float:
        return o.kept_bytes - first(index, o)

    def run(part: Block, which: Pass, kept: Callable[[int, Operator], float]) -> list[Segment]:
        return segments(part, which, detail, Holding(kept, gradient, unreduced))

    def both(backward: Callable[[Pass], list[Segment]], forward: list[Segment]) -> Passes:
        if not splits:
            return Passes(forward, backward(BACKWARD), [], [])
        weights = run(block, WEIGHT_GRAD, everything)
        return Passes(forward, backward(BACKWARD), backward(INPUT_GRAD), weights)

    if recompute == "none":
        return both(lambda half: run(block, half, everything), run(block, FORWARD, everything))
    if recompute == "light":
        block = replace(block, operators=lightly(block.operators, s.plan.recompute_modules))
    if recompute in ("selective-op", "light"):
        forward, once_more = recomputing(block, detail, Holding(everything, gradient))
        return both(lambda half: once_more + run(block, half, everything), forward)
    forward = run(block, FORWARD, first)
    if recompute == "full":
        if s.run.layer_code == "torchtitan":
            again = _stopping(block, detail)
        else:
            again = run(block, RECOMPUTE, rest)
        passes = both(lambda half: again + run(block, half, everything), forward)
        return _twice(passes, block, run) if splits and s.plan.recompute_again else passes
    parts = block.split(lambda o: o.core_input_bytes is not None)[::-1]

    def core_again(half: Pass) -> list[Segment]:
        passes = ((run(part, RECOMPUTE, rest) if core else [], part) for core, part in parts)
        return [seg for again, part in passes for seg in again + run(part, half, everything)]

    return both(core_again, forward)


def _stopping(block: Block, detail: str) -> list[Segment]:
    """Return a full recomputation that stops before the last product; all comes alive as it begins.

    What the layer keeps anyhow is its input.
    """
    layer = stopping(block.operators)
    more = block.kept_bytes - min(layer[0].kept_bytes, layer[0].stream_bytes)
    again = RECOMPUTE._replace(parts=lambda o: o.again)
    regained = Holding(lambda index, _o: 0.0 if index else more, lambda _index, _o: 0.0)
    return segments(replace(block, operators=layer), again, detail, regained)


def _twice(
    passes: Passes, block: Block,
    run: Callable[[Block, Pass, Callable[[int, Operator], float]], list[Segment]],
) -> Passes:  # fmt: skip
    """Return passes both of whose halves compute a layer again from its input."""

    def regained(index: int, o: Operator) -> float:
        return o.kept_bytes if index else 0.0

    def needed(index: int, o: Operator) -> float:
        return regained(index, o) - o.input_kept_bytes if o.weight_grad else 0.0

    inputs = INPUT_GRAD._replace(frees=lambda _, kept: kept)
    weights = WEIGHT_GRAD._replace(frees=lambda o, kept: kept + o.output_grad_bytes)
    last = run(block, weights, needed)
    at = max(i for i, x in enumerate(last) if x.stream == COMPUTE)
    last[at] = moving(last[at], free=Memory(block.operators[0].kept_bytes))
    return passes._replace(
        input_grad=run(block, RECOMPUTE, regained) + run(block, inputs, regained),
        weight_grad=run(block, RECOMPUTE, needed) + last,
    )
