"""Bodies: the ops that one action of one stage performs, as small columns.

A body is a main chain of segments (compute, tensor-parallel collectives), each after the one
before, with side branches (gradient buckets on the dp stream) hanging off it. A collective that
runs beside the next segment is waited for by the one after that.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from simulator.describe.run import OPTIMIZERS
from simulator.describe.scenario import Scenario
from simulator.lower import sharding
from simulator.lower.layers import Block, Blocks, blocks, shapes
from simulator.lower.operators import FP32, Operator
from simulator.lower.segments import (
    AHEAD,
    BACKWARD,
    CHAIN,
    COMPUTE,
    DP,
    FORWARD,
    RECOMPUTE,
    TIED,
    Holding,
    Segment,
    joined,
    segments,
)
from simulator.program import NONE, ONE_SIDED, Cost, Flow, Int16, Int32, Kernel, Work

SCOPES = ("alone", "tp", "dp", "tied", "unshard", "reduce", "pp", "one_sided")
"""Which ranks a joint op joins: none, those along an axis, the tied ends, twice those of a shard
group, two neighbours, itself.

The first ones carry the numbers of their streams.
"""


Exchange = Callable[[float], list[Segment]]
"""How a number of bytes of gradients is summed over dp."""


class CostTable:
    """Costs by number; equal costs share one."""

    def __init__(self) -> None:
        self.costs: list[Cost] = []
        self._number: dict[Cost, int] = {}
        self._seen: dict[int, tuple[int, Cost]] = {}  # by identity: layers share their costs

    def number(self, cost: Cost) -> int:
        """Return the number of a cost, a new one if it was not there."""
        seen = self._seen.get(id(cost))
        if seen is None:
            number = self._number.setdefault(cost, len(self.costs))
            if number == len(self.costs):
                self.costs.append(cost)
            seen = self._seen[id(cost)] = (number, cost)
        return seen[0]


@dataclass(frozen=True, slots=True)
class Body:
    """Ops of one action, in order."""

    cost: Int32
    stream: Int16
    layer: Int32
    need: Int16
    """How many ops back the predecessor within the body is; 0 for none but the stream's."""
    exit: int
    """Index of the last op of the main chain: what consumers of the action wait for."""
    entry: int = 0
    """Index of its first op: what waits for the action's inputs."""

    def __len__(self) -> int:
        return len(self.cost)


def body(
    segments: Iterable[Segment],
    table: CostTable,
    bucket_bytes: float = 0.0,
    exchange: Exchange | None = None,
) -> Body:
    """Return the body of a chain of segments, with what they place beside and ahead of it.

    With `bucket_bytes`, gradients are exchanged over dp beside the chain, in buckets of at least
    that size, each as soon as its last gradient is complete; the rest goes in a last bucket.
    What `exchange` returns for a bucket comes one after the other.
    """
    rows: list[tuple[int, int, int, int]] = []
    first = previous = NONE  # index of the first and the last op of the chain
    fresh = due = NONE  # flows beside the chain: the last one, and one to be waited for now
    full = 0.0  # bytes waiting in the bucket
    ends = list(segments)

    def add(segment: Segment, need: int) -> None:
        rows.append((table.number(segment.cost), segment.stream, segment.layer, need))

    for i, segment in enumerate(ends):
        if segment.place != CHAIN:
            add(segment, 0 if segment.place == AHEAD else 1)
            continue
        waited = previous
        first = len(rows) if first == NONE else first
        if segment.beside:
            due, fresh = fresh, len(rows)
        else:
            if not segment.aside:
                due, fresh = (due if fresh == NONE else fresh), NONE
            if segment.stream == COMPUTE and due != NONE:
                waited = due
            previous, due = len(rows), NONE
        moves = waited != NONE and rows[waited][1] != segment.stream
        need = len(rows) - waited if moves else 0
        add(segment, need)
        full += segment.gradient_bytes
        if exchange and full and (full >= bucket_bytes or i == len(ends) - 1):
            for row in exchange(full):  # what is on one stream is in order already
                add(row._replace(layer=segment.layer), int(row.stream != rows[-1][1]))
            full = 0.0
    columns = np.array(rows, np.int32).reshape(-1, 4).T
    cost, layer = np.ascontiguousarray(columns[0]), np.ascontiguousarray(columns[2])
    stream, need_column = columns[1].astype(np.int16), columns[3].astype(np.int16)
    return Body(cost, stream, layer, need_column, max(previous, 0), max(first, 0))


class StageBodies(NamedTuple):
    """Bodies of one stage by action kind.

    `first` is a step's first forward, `last` its last backward, which also reduces gradients.
    """

    forward: Body
    backward: Body
    last: Body
    reduce: Body
    optimizer: Body
    first: Body


class Bodies(NamedTuple):
    """Bodies by stage, and the costs that they number."""

    stages: tuple[StageBodies, ...]
    costs: tuple[Cost, ...]


_CACHE: OrderedDict[tuple[object, ...], Bodies] = OrderedDict()
_CACHE_SIZE = 256


def stage_bodies(s: Scenario) -> Bodies:
    """Return the bodies of every stage of a scenario; plans of a sweep that agree share them."""
    key = (
        s.model, shapes(s), s.layers_per_stage, s.run.precision, s.run.optimizer, s.run.detail,
        s.plan.recompute, s.plan.recompute_layers,
        (s.plan.bucket_size, tuple(_exchange(s, 0.0))) if s.plan.dp > 1 else None,
        sharding.key(s) if s.plan.shards > 1 else None,
    )  # fmt: skip
    if key not in _CACHE:
        table = CostTable()
        stages = tuple(_stages(s, table))
        _CACHE[key] = Bodies(stages, tuple(table.costs))
        if len(_CACHE) > _CACHE_SIZE:
            _CACHE.popitem(last=False)
    return _CACHE[key]


def _stages(s: Scenario, table: CostTable) -> list[StageBodies]:
    parts = blocks(s.model, shapes(s))
    first_layer = np.cumsum((0, *s.layers_per_stage))
    made: dict[tuple[int, bool, bool], StageBodies] = {}
    one_stage = _one_gathering_stage if sharding.is_gathering(s) else _one_stage
    out = []
    for stage in range(s.plan.num_stages):
        ends = (stage == 0, stage == s.plan.num_stages - 1)
        key = (s.layers_per_stage[stage], *ends)
        if key not in made:  # layers count from 0 here and are shifted below
            made[key] = one_stage(s, parts, key, table)
        shifted = [_shift(b, int(first_layer[stage])) for b in made[key]]
        out.append(StageBodies(*shifted))
    return out


def _shift(b: Body, layers: int) -> Body:
    layer = np.where(b.layer == NONE, b.layer, b.layer + layers).astype(np.int32)
    return replace(b, layer=layer)


def _one_stage(
    s: Scenario, parts: Blocks, key: tuple[int, bool, bool], table: CostTable
) -> StageBodies:
    _, is_first, is_last = key
    forward: list[Segment] = []
    backward: list[Segment] = []
    for block in _present(parts, is_first, is_last):
        for layer, (f, b) in _copies(s, block, key):
            forward += [seg._replace(layer=layer) for seg in f]
            backward += [seg._replace(layer=layer) for seg in reversed(b)]
    backward.reverse()
    bucket = s.plan.bucket_size if s.plan.dp > 1 else 0.0
    last = backward
    if s.run.detail == "stage" and not any(segment.beside for segment in backward):
        last = joined(backward, bucket)
        forward, backward = joined(forward, 0.0), joined(backward, 0.0)
    plain, opening = body(backward, table), body(forward, table)
    closing = body(last, table, bucket, partial(_exchange, s)) if bucket else plain
    every = s.plan.shards > 1 and s.plan.zero > 1  # gradients are never held in full
    return StageBodies(
        forward=opening,
        backward=closing if every else plain,
        last=closing,
        reduce=body(_tied_reduction(s, parts, is_first, is_last), table),
        optimizer=body(_update(s, stage_params(s, parts, *key)), table),
        first=opening,
    )


def _one_gathering_stage(
    s: Scenario, parts: Blocks, key: tuple[int, bool, bool], table: CostTable
) -> StageBodies:
    """Return the bodies of a stage whose blocks gather their weights (ZeRO's stage 3)."""
    _, is_first, is_last = key
    chains = sharding.Passes([], [], [], [])  # the backward ones from their ends
    for block in _present(parts, is_first, is_last):
        tied = _shares(s, is_first, is_last) and block is parts.head
        params = block.params - tied * _embedding_weight(parts)
        stay = sharding.stays(s, block.name, is_first=is_first, is_last=is_last)
        made: dict[int, sharding.Passes] = {}
        for layer, pair in _copies(s, block, key):
            if id(pair) not in made:
                f, b = map(_coarse, pair) if s.run.detail == "stage" else pair
                made[id(pair)] = sharding.gathering(s, f, b, params, stay)
            first, forward, backward, last = made[id(pair)]
            for chain, one in zip(
                chains, (first, forward, backward[::-1], last[::-1]), strict=True
            ):
                chain += [segment._replace(layer=layer) for segment in one]
    first, forward, backward, last = chains
    opening, between = body(first, table), body(forward, table)
    return StageBodies(
        forward=between,
        backward=body(backward[::-1], table),
        last=body(last[::-1], table),
        reduce=body(_tied_reduction(s, parts, is_first, is_last), table),
        optimizer=body(_update(s, stage_params(s, parts, *key)), table),
        first=opening,
    )


def _present(parts: Blocks, is_first: bool, is_last: bool) -> list[Block]:
    """Return the kinds of block of a stage, in forward order."""
    present = {"embedding": is_first, "layer": True, "head": is_last}
    return [b for b in (parts.embedding, parts.layer, parts.head) if present[b.name]]


def _shares(s: Scenario, is_first: bool, is_last: bool) -> bool:
    """Return whether the head shares the embedding of its own stage: it has no gradient then."""
    return s.model.tie_word_embeddings and is_first and is_last


def _copies(
    s: Scenario, block: Block, key: tuple[int, bool, bool]
) -> Iterator[tuple[int, tuple[list[Segment], list[Segment]]]]:
    """Yield each layer of a stage that a block makes, and its passes, shared by those alike."""
    num_layers, is_first, is_last = key
    shared, limit = _shares(s, is_first, is_last), s.plan.recompute_layers

    def passes(recompute: str) -> tuple[list[Segment], list[Segment]]:
        f, b = _passes(s, block, shared, recompute)
        return f, sharding.holding_gradients(s, b)

    kept = passes("none")
    if block.name != "layer":
        yield NONE, kept
        return
    again = passes(s.plan.recompute)
    for layer in range(num_layers):
        yield layer, again if limit is None or layer < limit else kept


def _coarse(chain: list[Segment]) -> list[Segment]:
    """Return a chain as a few segments, unless some of them run side by side."""
    return chain if any(segment.beside for segment in chain) else joined(chain, 0.0)


def _exchange(s: Scenario, size: float) -> list[Segment]:
    """Return the flows by which a bucket of gradients is summed over dp."""
    if s.plan.shards > 1:
        return sharding.exchange(s, size)
    servers = s.plan.num_servers
    names: tuple[str, ...] = ("all_reduce",)
    if servers:
        names = ("push_pull",) if s.plan.staleness is None else ONE_SIDED
    return [Segment(Flow(name, size, servers=servers), DP) for name in names]


def _update(s: Scenario, params: int) -> list[Segment]:
    """Return the optimizer step of a stage's parameters; each rank updates its shard of them."""
    return sharding.updated(s, optimizer_work(s, -(-params // s.plan.shards)), params)


def _passes(
    s: Scenario, block: Block, shared: bool, recompute: str
) -> tuple[list[Segment], list[Segment]]:
    """Return the forward and the backward segments of a block, with what backward recomputes."""
    detail, size = s.run.detail, s.precision.gradient

    def gradient(_index: int, o: Operator) -> float:
        return 0.0 if shared and o.name == "head" else float(o.params * size)

    def everything(_index: int, o: Operator) -> float:
        return o.kept_bytes

    def first(index: int, o: Operator) -> float:
        if recompute == "full":  # the first operator keeps the layer's input
            return o.kept_bytes if index == 0 else 0.0
        return o.kept_bytes if o.core_input_bytes is None else o.core_input_bytes

    def rest(index: int, o: Operator) -> float:
        return o.kept_bytes - first(index, o)

    def backward(part: Block) -> list[Segment]:
        return segments(part, BACKWARD, detail, Holding(everything, gradient))

    if recompute == "none":
        return segments(block, FORWARD, detail, Holding(everything, gradient)), backward(block)
    forward = segments(block, FORWARD, detail, Holding(first, gradient))
    if recompute == "full":
        return forward, segments(block, RECOMPUTE, detail, Holding(rest, gradient)) + backward(
            block
        )
    before, core, after = block.around(lambda o: o.core_input_bytes is not None)
    once_more = segments(core, RECOMPUTE, detail, Holding(rest, gradient))
    return forward, backward(after) + once_more + backward(core) + backward(before)


def stage_params(s: Scenario, parts: Blocks, num_layers: int, is_first: bool, is_last: bool) -> int:
    """Return the parameters that one rank of a stage holds; a tied head shares the embedding."""
    params = num_layers * parts.layer.params
    if is_first:
        params += parts.embedding.params
    if is_last:
        params += parts.head.params
        if s.model.tie_word_embeddings and is_first:
            params -= _embedding_weight(parts)
    return params


def _embedding_weight(parts: Blocks) -> int:
    """Return the parameters of the matrix that a tied embedding and head share."""
    return next(o.params for o in parts.head.operators if o.name == "head")


def _tied_reduction(s: Scenario, parts: Blocks, is_first: bool, is_last: bool) -> Sequence[Segment]:
    """Sum the gradients of the tied embedding over the first and the last stage."""
    if not s.model.tie_word_embeddings or s.plan.pp == 1 or not (is_first or is_last):
        return ()
    size = _embedding_weight(parts) * s.precision.gradient / s.plan.shards  # of their own shards
    return (Segment(Flow("all_reduce", size), TIED),)


@lru_cache(maxsize=1024)
def _optimizer_work(params: int, optimizer: str, weight: int, gradient: int, master: int) -> Work:
    rule = OPTIMIZERS[optimizer]
    state = FP32 * rule.states + (master or weight)
    moved = gradient + 2 * state + (weight if master else 0)
    kernel = Kernel(optimizer, float(rule.flops * params), float(moved * params), "fp32")
    return Work("OPT", (kernel,))


def optimizer_work(s: Scenario, params: int) -> Work:
    """Return the update of `params` parameters by one fused kernel.

    It reads the gradient, reads and writes the fp32 weight and the states, and writes the
    low-precision weight where there is one.
    """
    held = sharding.held_bytes(s)
    return _optimizer_work(params, s.run.optimizer, held.weight, held.gradient, held.master)
