"""Bodies: the ops that one action of one stage performs, as small columns.

A body is a main chain of segments (compute, tensor-parallel collectives), each after the one
before, with side branches (gradient buckets on the dp stream) hanging off it. A collective that
runs beside the next segment is waited for by the one after that.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple

import numpy as np

from simulator.describe.scenario import Scenario
from simulator.lower import buffers, offload, sharding
from simulator.lower.blocks import Block, Blocks
from simulator.lower.clipping import before_update
from simulator.lower.optimizers import update_work
from simulator.lower.passes import Passes, block_passes, present
from simulator.lower.places import is_summed, layout
from simulator.lower.quantised import own_weight_cast, weight_cast
from simulator.lower.segments import (
    AHEAD,
    CHAIN,
    COMPUTE,
    DP,
    TIED,
    TP,
    Segment,
    coarse,
    has_flows,
    is_plain,
    joined,
    moving,
)
from simulator.lower.shapes import shapes
from simulator.lower.trainable import (
    Stage,
    Tuning,
    embedding_weight,
    low_weights,
    repeated_parameters,
    shares_embedding,
    stage_tensors,
    stages,
    tuned,
    weight_bytes,
)
from simulator.program import NONE, ONE_SIDED, Cost, Flow, Int16, Int32, Kernel, Memory, Work

SCOPES = (
    "alone", "tp", "dp", "tied", "unshard", "reduce", "shards", "pipeline", "cp", "ep", "etp",
    "edp", "pp", "one_sided", "storage", "world",
)  # fmt: skip
"""Which ranks a joint op joins: none, those along an axis, the tied ends, three times those of a
shard group, all of a pipeline, those along cp and along three axes of experts, two neighbours,
itself, itself with storage, everybody.

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


class Half(NamedTuple):
    """The second action of a pair, within the body of both."""

    of: Int16
    """0 or 1 by op: which action it is of."""
    exit: int
    entry: int
    tail: int


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
    tail: int = 0
    """Index of its last op."""
    second: Half | None = None
    """Of a pair of actions: the other half of it."""

    def __len__(self) -> int:
        return len(self.cost)


def body(
    segments: Iterable[Segment],
    table: CostTable,
    buckets: Sequence[float] = (),
    exchange: Exchange | None = None,
    expert_exchange: Exchange | None = None,
) -> Body:
    """Return the body of a chain of segments, with what they place beside and ahead of it.

    With `buckets`, gradients are exchanged over dp beside the chain, in buckets of at least those
    sizes, the last for all that follow, each as soon as its last gradient is complete; the rest
    goes in a last bucket. What `exchange` returns for a bucket comes one after the other. Those of
    experts have buckets of their own, and `expert_exchange`.
    """
    rows: list[tuple[int, int, int, int]] = []
    first = previous = NONE  # index of the first and the last op of the chain
    fresh = due = NONE  # flows beside the chain: the last one, and one to be waited for now
    full = [0.0, 0.0]  # bytes waiting in the bucket, and in that of experts
    left = [list(buckets), list(buckets)]  # sizes of it and those to come
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
        done = len(rows) - 1
        full = [full[0] + segment.gradient_bytes, full[1] + segment.expert_bytes]
        for k, sums in enumerate((exchange, expert_exchange)):
            if not (sums and full[k] and (full[k] >= left[k][0] or i == len(ends) - 1)):
                continue
            behind = done
            for row in sums(full[k]):  # what is on one stream is in order already
                need = len(rows) - behind if row.stream != rows[behind][1] else 0
                behind = len(rows)
                add(row._replace(layer=segment.layer), need)
            full[k], left[k] = 0.0, left[k][1:] or left[k]
    columns = np.array(rows, np.int32).reshape(-1, 4).T
    cost, layer = np.ascontiguousarray(columns[0]), np.ascontiguousarray(columns[2])
    stream, need_column = columns[1].astype(np.int16), columns[3].astype(np.int16)
    tail = max(len(rows) - 1, 0)
    return Body(cost, stream, layer, need_column, max(previous, 0), max(first, 0), tail)


class StageBodies(NamedTuple):
    """Bodies of a stage on a rank by action kind.

    `first` is a step's first forward, `last` its last backward, which also reduces gradients.
    """

    forward: Body
    backward: Body
    last: Body
    reduce: Body
    optimizer: Body
    first: Body
    input_grad: Body | None = None
    """None where no backward is split."""
    weight_grad: Body | None = None
    last_weight_grad: Body | None = None
    begin: Body | None = None
    """A step's first backward, where it is not the last one and differs from others."""


class Bodies(NamedTuple):
    """Bodies by place, a stage on a rank, ordered by rank and stage; and the costs they number."""

    places: tuple[StageBodies, ...]
    costs: tuple[Cost, ...]


_CACHE: OrderedDict[tuple[object, ...], Bodies] = OrderedDict()
_CACHE_SIZE = 256


def stage_bodies(s: Scenario) -> Bodies:
    """Return the bodies of every place of a scenario; plans of a sweep that agree share them."""
    key = (
        s.model, shapes(s), s.layers_per_stage, s.run.precision, s.run.optimizer, s.run.detail,
        Tuning.of(s.run), s.run.frozen_layers, s.run.fused_optimizer, s.run.clip_grad,
        s.run.scales_loss, s.run.gradient_passes, s.plan.dp * s.plan.cp > 1, s.plan.pp,
        "bf16" in s.cluster.node.device.peak,
        s.plan.recompute, s.plan.recompute_layers, s.plan.recompute_again, s.plan.scatter_gather,
        s.plan.post_validation, s.run.layer_code, layout(s),
        (s.plan.buckets, tuple(_exchange(s, 0.0))) if is_summed(s) else None,
        (s.plan.buckets, tuple(sharding.expert_exchange(s, 0.0)), sharding.expert_shards(s))
        if sharding.sums_experts(s) else None,
        sharding.key(s) if s.plan.shards > 1 else None,
        s.plan.recompute_modules, s.plan.offload_optimizer, s.plan.offload_activations,
        s.plan.offload_layers, s.run.fp8_weights,
    )  # fmt: skip
    if key not in _CACHE:
        table = CostTable()
        _CACHE[key] = Bodies(tuple(_places(s, table)), tuple(table.costs))
        if len(_CACHE) > _CACHE_SIZE:
            _CACHE.popitem(last=False)
    return _CACHE[key]


def _places(s: Scenario, table: CostTable) -> list[StageBodies]:
    first_layer = np.cumsum((0, *s.layers_per_stage))
    made: dict[tuple[Stage, int], StageBodies] = {}
    one_stage = _one_gathering_stage if sharding.is_gathering(s) else _one_stage
    every, out = stages(s), []
    checks = s.run.clip_grad or s.run.scales_loss or buffers.is_copying(s)
    for held in layout(s).stages:
        # gradients of all that a rank trains are looked at before its first update
        params = (
            sharding.own_share(s, (stage_tensors(s, every[x]) for x in held)) if checks else NONE
        )
        for number in held:
            key = (every[number], params if number == held[0] else NONE)
            if key not in made:  # layers count from 0 here and are shifted below
                made[key] = one_stage(s, *key, table)
            out.append(_shift(made[key], int(first_layer[number])))
    return out


def _shift(bodies: StageBodies, layers: int) -> StageBodies:
    """Return bodies whose layers count from another one; those that are one stay one."""
    made: dict[int, Body] = {}
    for b in bodies:
        if b is not None and id(b) not in made:
            layer = np.where(b.layer == NONE, b.layer, b.layer + layers).astype(np.int32)
            made[id(b)] = replace(b, layer=layer)
    return StageBodies._make(made.get(id(b)) for b in bodies)


def _one_stage(s: Scenario, stage: Stage, checked: int, table: CostTable) -> StageBodies:
    parts = tuned(s)
    forward, backward, inputs, weights = chains = Passes([], [], [], [])  # but the first, from ends
    for block, numbers in present(parts, stage):
        for layer, passes in _copies(s, block, numbers, stage):
            forward += [seg._replace(layer=layer) for seg in passes.forward]
            for chain, one in zip(chains[1:], passes[1:], strict=True):
                chain += [seg._replace(layer=layer) for seg in reversed(one)]
    for chain in chains[1:]:
        chain.reverse()
    if inputs and stage.is_first:
        _wait_for_weights(inputs, parts.blocks.embedding)
    dense, experts = is_summed(s), sharding.sums_experts(s)
    buckets = s.plan.buckets if dense or experts else ()
    dense_sum = buffers.checking(s, partial(_exchange, s))
    expert_sum = buffers.checking(s, partial(sharding.expert_exchange, s))
    every = s.plan.shards > 1 and s.plan.zero > 1  # gradients are never held in full
    ahead, behind = _arrival(s, not stage.is_first), _arrival(s, not stage.is_last)
    is_coarse = (
        s.run.detail == "stage" and not every and not layout(s).pairs
        and is_plain([*forward, *backward])
    )  # fmt: skip

    def made(chain: list[Segment], before: Sequence[Segment] = ()) -> Body:
        return body([*before, *(joined(chain) if is_coarse else chain)], table)

    def closing(chain: list[Segment], before: Sequence[Segment] = ()) -> Body:
        if not buckets:
            return made(chain, before)
        # Buckets of experts are filled between those of the others; and a bucket slows the work
        # beside it, so that work and flows keep their order.
        if is_coarse and not experts and not has_flows(chain):
            chain = joined(chain, buckets)
        return body(
            [*before, *chain], table, buckets, dense_sum if dense else None,
            expert_sum if experts else None,
        )  # fmt: skip

    opening, last = made(forward, ahead), closing(backward, behind)
    return StageBodies(
        forward=opening,
        backward=last if every or not buckets else made(backward, behind),
        last=last,
        reduce=body(_tied_reduction(s, parts.blocks, stage), table),
        optimizer=body(_update(s, stage, checked), table),
        first=opening,
        input_grad=made(inputs, behind) if inputs else None,
        weight_grad=made(weights) if weights else None,
        last_weight_grad=closing(weights) if weights else None,
    )


def _wait_for_weights(inputs: list[Segment], embedding: Block) -> None:
    """Let the gradient of the embedding's output, made last, wait for the weight's."""
    at = max(i for i, x in enumerate(inputs) if isinstance(x.cost, Work))
    late = sum(o.output_grad_bytes for o in embedding.operators if o.weight_grad)
    inputs[at] = moving(inputs[at], alloc=Memory(late))


def _one_gathering_stage(s: Scenario, stage: Stage, checked: int, table: CostTable) -> StageBodies:
    """Return the bodies of a stage whose blocks gather their weights (ZeRO's stage 3)."""
    parts = tuned(s)
    chains = sharding.Passes([], [], [], [], [])  # the backward ones from their ends
    for block, numbers in present(parts, stage):
        tied = shares_embedding(s, stage) and block.name == "head" and s.run.trains_all
        held = tied * embedding_weight(parts.blocks)  # and gathered for the embedding
        stay = sharding.stays(s, block.name, is_first=stage.is_first, is_last=stage.is_last)
        made: dict[int, sharding.Passes] = {}
        for layer, pair in _copies(s, block, numbers, stage):
            if id(pair) not in made:
                f, b = pair[:2]
                # Gathers slow the work beside them, so that work and flows keep their order.
                if s.run.detail == "stage" and not has_flows([*f, *b]):
                    f, b = coarse(f), coarse(b)
                size = weight_bytes(s, block) - held * s.precision.weight
                trained, copies = block.trained - held, sharding.gradient_copies(s, block.name)
                made[id(pair)] = sharding.gathering(s, f, b, size, trained, stay, copies)
            for at, (chain, one) in enumerate(zip(chains, made[id(pair)], strict=True)):
                way = 1 if at < 2 else -1
                chain += [segment._replace(layer=layer) for segment in one[::way]]
    first, forward, begin, backward, last = chains
    ahead, behind = _arrival(s, not stage.is_first), _arrival(s, not stage.is_last)
    opening, between = body(ahead + first, table), body(ahead + forward, table)
    later = body(behind + backward[::-1], table)
    return StageBodies(
        forward=between,
        backward=later,
        last=body(behind + last[::-1], table),
        reduce=body(_tied_reduction(s, parts.blocks, stage), table),
        optimizer=body(_update(s, stage, checked), table),
        first=opening,
        begin=body(behind + begin[::-1], table) if s.plan.no_sync else None,
    )


def _arrival(s: Scenario, receives: bool) -> list[Segment]:
    """Return how a stage puts together what its tp ranks have received a part each of.

    The gather is issued from the stream of the kernels, as Megatron-LM does: after what they do.
    """
    if not (receives and s.plan.scatter_gather):
        return []
    size = s.precision.activation * shapes(s).tokens * s.model.hidden_size
    return [
        Segment(Work("parts received", seconds=0.0), COMPUTE),
        Segment(Flow("all_gather", float(size)), TP),
    ]


def _copies(
    s: Scenario, block: Block, numbers: Sequence[int], stage: Stage
) -> Iterator[tuple[int, Passes]]:
    """Yield each layer of a stage that a block makes, and its passes, shared by those alike."""
    shared, is_layer = shares_embedding(s, stage), block.name == "layer"
    trains = is_layer and numbers[0] >= stage.num_frozen
    again = s.plan.recompute if trains else "none"
    offloads = s.plan.offload_activations and is_layer

    @cache
    def made(recompute: str, away: bool) -> Passes:
        passes = block_passes(s, block, shared, recompute)
        f, b = passes[:2]
        if offloads and s.run.detail == "stage":
            f, b = coarse(f), coarse(b)
        if away:
            f, b = offload.activations(f, b)
        return passes._replace(forward=f, backward=sharding.holding_gradients(s, b))

    def among(layer: int, limit: int | None) -> bool:
        return limit is None or layer < limit

    for layer in numbers:
        recompute = again if among(layer, s.plan.recompute_layers) else "none"
        yield layer, made(recompute, offloads and among(layer, s.plan.offload_layers))


def _exchange(s: Scenario, size: float) -> list[Segment]:
    """Return the flows by which a bucket of gradients is summed over dp."""
    if s.plan.shards > 1:
        return sharding.exchange(s, size)
    servers = s.plan.num_servers
    names: tuple[str, ...] = ("all_reduce",)
    if servers:
        names = ("push_pull",) if s.plan.staleness is None else ONE_SIDED
    return [Segment(Flow(name, size, servers=servers), DP) for name in names]


def _update(s: Scenario, stage: Stage, checked: int) -> list[Segment]:
    """Return the optimizer step of a stage's parameters; each rank updates its shard of them.

    Before it, where so many gradients are `checked`, comes what looks at them.
    Weights in fp8 that are held in full are cast then, for all microbatches of the next step.
    """
    trained = stage_tensors(s, stage)
    copies, held = buffers.copied(s, max(checked, 0), used=trained.params > 0)
    rows = [*buffers.checked_alone(s, trained), *_sums_over_tp(s, stage), *copies]
    rows += [] if checked == NONE else before_update(s, checked)
    if trained.params:
        work = update_work(s, trained)
        low, casts = low_weights(s, stage), _weight_casts(s, stage)
        if s.plan.offload_optimizer:
            rows += offload.updated(s, work, trained, casts)
        else:
            low = low if s.run.fp8_weights and not shapes(s).elements.directed else 0
            work = replace(work, kernels=work.kernels + casts, free=held)
            rows += sharding.updated(s, work, trained, low)
    return [*rows, *buffers.cleared(s, trained)]


def _weight_casts(s: Scenario, stage: Stage) -> tuple[Kernel, ...]:
    """Return what casts weights to fp8 once a step: a rank's own where they then move so."""
    low, e = low_weights(s, stage), shapes(s).elements
    if not low or (sharding.is_gathering(s) and not s.run.fp8_weights):
        return ()
    if sharding.is_gathering(s):
        return (own_weight_cast(e, low, s.plan.shards),)
    if not s.run.fp8_weights or e.directed:
        return (weight_cast(e, low),)
    experts = min(low, stage_tensors(s, stage).experts)
    own = (low - experts) / s.plan.shards + experts / sharding.expert_shards(s)
    return (weight_cast(e, low, low / own),)


def _sums_over_tp(s: Scenario, stage: Stage) -> list[Segment]:
    """Return the sum over tp of gradients of what each of its ranks holds whole, where it divides
    tokens (Megatron-LM's finalize_model_grads): after all backwards, and sums over dp.
    """
    repeated = repeated_parameters(tuned(s), stage) if s.plan.sequence_parallel else 0
    if not repeated:
        return []
    return [Segment(Flow("all_reduce", float(repeated * s.precision.gradient)), TP)]


def _tied_reduction(s: Scenario, parts: Blocks, stage: Stage) -> Sequence[Segment]:
    """Sum the gradients of the tied embedding over the first and the last stage.

    On a rank that holds both they are one.
    """
    ends = stage.is_first or stage.is_last
    if not (s.model.shares_embedding and ends and s.run.trains_all) or stage.has_both_ends:
        return ()
    size = embedding_weight(parts) * s.precision.gradient / s.plan.shards  # of their own shards
    return (Segment(Flow("all_reduce", size), TIED),)
