"""Sharded data parallelism: what ZeRO's stages add to bodies, and what gathers wait for.

Rajbhandari et al., 2020 (arXiv 1910.02054): stage 1 divides optimizer states over the ranks of a
shard group, stage 2 gradients too, stage 3 weights too. Sums over a group become a reduce-scatter,
and where there are several replicas of the shards (HSDP) an all-reduce of a shard over them.

Stages 1 and 2 gather the updated weights after the optimizer. Stage 3 gathers each block's before
it computes, as torch's FSDP2 does: on a stream of their own, ahead of the block that computes, and
a block's gradients are reduced before the block after the next one begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from simulator.describe.model import Model
from simulator.describe.plan import Plan
from simulator.describe.scenario import Scenario
from simulator.lower.operators import streaming
from simulator.lower.places import layout
from simulator.lower.segments import (
    AHEAD,
    BRANCH,
    COMPUTE,
    DP,
    EDP,
    REDUCE,
    UNSHARD,
    Segment,
    moving,
)
from simulator.lower.shard_copies import after_backward, after_gather, before_reduction
from simulator.lower.tensors import Tensors
from simulator.program import (
    ACTION_CODE,
    NONE,
    NOTHING,
    Flow,
    Int8,
    Int16,
    Int32,
    Int64,
    Kernel,
    Memory,
    Work,
)
from simulator.schedules import Action, Schedule, Target, lists_of, schedule_of

BY_USE, BY_MICROBATCH, BY_STEP = range(3)
"""How long a block's gathered weights stay: for a forward or a backward; from the forward of a
microbatch to its backward, which follows at once; from a step's first forward to its last backward.
"""


class Passes(NamedTuple):
    """Segments of the passes through one block."""

    first: list[Segment]
    """The step's first forward."""
    forward: list[Segment]
    begin: list[Segment]
    """The step's first backward."""
    backward: list[Segment]
    last: list[Segment]
    """The step's last backward."""


class Held(NamedTuple):
    """Bytes of a parameter that lie on the ranks of a shard group, beside optimizer states."""

    weight: int
    gradient: int
    master: int
    """The fp32 copy that the optimizer updates; 0 where the weight itself is fp32."""


def is_gathering(s: Scenario) -> bool:
    """Return whether blocks gather their weights."""
    return s.plan.zero == 3 and s.plan.shards > 1


def held_bytes(s: Scenario) -> Held:
    """Return what a parameter takes; torch's FSDP holds fp32 shards only, and gradients as them.

    With the optimizer on the host the master copy is there, and weights are as they compute.
    """
    p = s.precision
    if not is_gathering(s) or s.plan.low_precision_shard or s.plan.offload_optimizer:
        return Held(p.weight, p.gradient, p.master)
    word = p.master or p.weight
    return Held(word, word, 0)


def key(s: Scenario) -> tuple[object, ...]:
    """Return what the bodies of a sharded plan depend on, besides the model and the precision."""
    plan = s.plan
    return (
        plan.zero, plan.shards, plan.replicas, plan.reshard_after_forward, plan.sharding_library,
        plan.no_sync and s.num_microbatches > 1, plan.root_holds_ends, _turns_around(s),
        s.precision.gradient, s.run.fused_accumulation,
    )  # fmt: skip


def _turns_around(s: Scenario) -> bool:
    """Return whether the last stage follows each forward directly by that one's backward."""
    plan = s.plan
    schedule = schedule_of(plan.schedule)
    return _turns(
        schedule, plan.pp, s.num_microbatches, plan.chunks, plan.microbatch_group, s.target
    )


@lru_cache(maxsize=256)
def _turns(
    schedule: Schedule, ranks: int, microbatches: int, chunks: int,
    group: int | None, target: Target | None,
) -> bool:  # fmt: skip
    actions = lists_of(schedule, ranks, microbatches, chunks, group, target)
    stage = max(a.stage for row in actions for a in row)
    return all(
        following == Action(stage, "B", action.microbatch)
        for row in actions
        for action, following in pairwise(row)
        if action.stage == stage and action.kind == "F"
    )


def stays(s: Scenario, block: str, *, is_first: bool, is_last: bool) -> int:
    """Return how long the gathered weights of a block stay on a rank of a stage.

    A head keeps its weights where its own backward comes next (torch does so for the root). An
    embedding that shares its weight with the head of its own stage keeps it for the head, one that
    serves a decoder too for that.
    """
    turns = _turns_around(s)
    shares = s.model.shares_embedding or getattr(s.model, "num_decoder_layers", 0) > 0
    shared = shares and is_first and is_last and block == "embedding"
    shared = shared and s.run.trains_all  # frozen, it is gathered with the head again
    root = s.plan.root_holds_ends and block in ("embedding", "head")
    if shared or root or not s.plan.reshard_after_forward:
        return BY_MICROBATCH if turns and s.plan.pp == 1 else BY_STEP
    return BY_MICROBATCH if block == "head" and turns else BY_USE


def gradient_copies(s: Scenario, name: str) -> int:
    """Return how many tp ranks have a whole gradient each of what they hold a part of, by operator.

    DTensor has no rule by which the gradient of an embedding whose rows are divided is divided too
    (torch/distributed/tensor/_ops/_embedding_ops.py, embedding_dense_backward_strategy); FSDP2 cuts
    it where it is reduced (`FSDPParam._get_grad_inner_tensor`).
    """
    whole = s.run.layer_code == "torchtitan" and name == "embedding"
    return s.plan.tp if whole else 1


def exchange(s: Scenario, size: float, longer: float = 0.0, beside: float = 0.0) -> list[Segment]:
    """Return the sum of `size` bytes of gradients: over the shards, then of a shard over replicas.

    A stage that lies on two ranks has a replica of its shards on each. Where gradients are kept
    sharded (from stage 2 on) those in full are released when it ends.
    `longer` are the bytes by which the copy that is reduced is longer than the gradients, `beside`
    those that are released with it.
    """
    freed = Memory(unreduced=size + beside) if s.plan.zero > 1 else NOTHING
    scatter = Flow("reduce_scatter", size, alloc=Memory(unreduced=longer), free=freed)
    rows = [Segment(scatter, REDUCE, place=BRANCH)]
    if s.plan.shards < s.plan.replicas or layout(s).copies > 1:
        rows.append(Segment(Flow("all_reduce", size / s.plan.shards), DP, place=BRANCH))
    return rows


def holding_gradients(s: Scenario, chain: list[Segment]) -> list[Segment]:
    """Return a chain whose gradients, under stage 2, come alive with the work that completes them.

    Before it they are alive all the time, and stage 3 counts those of a whole block.
    """
    if s.plan.zero != 2 or s.plan.shards == 1:
        return chain
    return [
        moving(x, alloc=Memory(unreduced=x.gradient_bytes)) if x.gradient_bytes else x
        for x in chain
    ]


def gathering(
    s: Scenario,
    forward: list[Segment],
    backward: list[Segment],
    size: float,
    trained: int,
    stay: int,
    copies: int = 1,
) -> Passes:
    """Return the passes of a block under stage 3.

    Args:
        s: the scenario.
        forward: segments of its forward.
        backward: those of its backward; none where it is frozen.
        size: bytes of the weights that are gathered.
        trained: parameters whose gradients are reduced.
        stay: one of `BY_USE`, `BY_MICROBATCH`, `BY_STEP`.
        copies: ranks that have each other's part of the gradients too, until these are reduced.

    `backward` brings the gradients of weights alive, as long as these.
    """
    if not size:
        return Passes(forward, forward, backward, backward, backward)
    p = s.precision
    full, reduced = float(p.weight * trained), float(p.gradient * trained)
    gather = Segment(Flow("all_gather", size, alloc=Memory(gathered=size)), UNSHARD, place=AHEAD)
    copy = after_gather(s, size)

    def one(chain: list[Segment], gathers: bool, frees: bool) -> list[Segment]:
        chain = _on_work(chain, -1, free=Memory(gathered=size)) if frees else chain
        return [gather, *_running(s, chain, first=copy)] if gathers else chain

    if not backward:
        chain = one(forward, True, True)
        return Passes(first=chain, forward=chain, begin=[], backward=[], last=[])
    sums = _sums(s, trained, full, reduced, copies) if trained else (_Sum((), []),) * 3

    def summed(which: int, frees: bool) -> list[Segment]:
        chain = _running(s, one(backward, stay == BY_USE, frees), last=sums[which].kernels)
        return chain + sums[which].then

    return Passes(
        first=one(forward, True, stay == BY_USE),
        forward=one(forward, stay != BY_STEP, stay == BY_USE),
        begin=summed(0, stay != BY_STEP),
        backward=summed(1, stay != BY_STEP),
        last=summed(2, True),
    )


def _running(
    s: Scenario, chain: list[Segment], *,
    first: Sequence[Kernel] = (), last: Sequence[Kernel] = (),
) -> list[Segment]:  # fmt: skip
    """Return a chain with more kernels before all of its own, and after; joined but by detail."""
    for which, before, after in ((0, first, ()), (-1, (), last)):
        if before or after:
            at = _works_of(chain)[which]
            own, work = chain[at], chain[at].cost
            assert isinstance(work, Work)
            more = replace(work, kernels=(*before, *work.kernels, *after))
            rows = [own._replace(cost=more)]
            if s.run.detail == "kernel":
                rows = [*_works(before), own, *_works(after)]
            chain = [*chain[:at], *rows, *chain[at + 1 :]]
    return chain


def _works(kernels: Sequence[Kernel]) -> list[Segment]:
    return [Segment(Work(kernel.name, (kernel,)), COMPUTE) for kernel in kernels]


class _Sum(NamedTuple):
    """How a backward of a block ends."""

    kernels: tuple[Kernel, ...]
    """What it still computes."""
    then: list[Segment]


def _sums(
    s: Scenario, trained: int, full: float, reduced: float, copies: int
) -> tuple[_Sum, _Sum, _Sum]:
    """Return how the gradients of a block are summed: a step's first ones, those between, the last.

    They are as long as weights, `full` bytes in all, until they are copied in the precision they
    are reduced in, `reduced` bytes. With `plan.no_sync` that copy stays, later ones are added to
    it, and the last backward reduces it. Until then `copies` ranks have each other's part too.
    """
    p, made = s.precision, after_backward(s, trained)
    if not s.plan.no_sync or s.num_microbatches == 1:
        kernels = made + before_reduction(s, trained, p.weight)
        each = _Sum(kernels, exchange(s, reduced, reduced - full, (copies - 1) * full))
        return each, each, each
    full, summed = full * copies, reduced * copies
    name, gone = "gradient accumulation", Memory(unreduced=full)

    def work(moved: float, alloc: Memory, free: Memory) -> list[Segment]:
        kernel = streaming(name, trained * copies, moved)
        return [Segment(Work(name, (kernel,), None, alloc, free), COMPUTE)]

    cast = work(full + summed, Memory(unreduced=summed), gone) if summed != full else []
    added = work(full + 2 * summed, NOTHING, gone)
    ready = added + _works(before_reduction(s, trained, p.gradient))
    reduction = exchange(s, reduced, beside=summed - reduced)
    return _Sum(made, cast), _Sum(made, added), _Sum(made, ready + reduction)


def _on_work(
    chain: list[Segment], which: int, *, alloc: Memory = NOTHING, free: Memory = NOTHING
) -> list[Segment]:
    """Return a chain whose first or last work moves more memory."""
    at = _works_of(chain)[which]
    return [*chain[:at], moving(chain[at], alloc, free), *chain[at + 1 :]]


def _works_of(chain: Sequence[Segment]) -> list[int]:
    """Return where the works of a chain stand that a device computes."""
    return [i for i, x in enumerate(chain) if isinstance(x.cost, Work) and x.stream == COMPUTE]


def updated(s: Scenario, update: Work, trained: Tensors, low: int = 0) -> list[Segment]:
    """Return the segments of an optimizer step, after which `low` weights are in fp8 alone.

    Under stages 1 and 2 each rank updates its shard and gathers the others' weights, with which
    the next forward begins.
    """
    gather = regathered(s, trained, low)
    ready = [Segment(Work("weights ready", seconds=0.0), COMPUTE)] if gather else []
    return [Segment(update, COMPUTE), *gather, *ready]


def regathered(s: Scenario, trained: Tensors, low: int = 0) -> list[Segment]:
    """Return how ranks get the weights that others have updated, where they hold them in full.

    Of them `low` move in fp8, those of experts among them.
    """
    if s.plan.zero == 3:
        return []
    experts = min(low, trained.experts)
    held = (
        (trained.params - trained.experts, low - experts, s.plan.shards, UNSHARD),
        (trained.experts, experts, expert_shards(s), EDP),
    )
    size = s.precision.weight
    return [
        Segment(Flow("all_gather", float(size * params - (size - 1) * short)), stream)
        for params, short, shards, stream in held
        if params and shards > 1
    ]


def expert_replicas(s: Scenario) -> int:
    """Return the ranks that hold the same part of the same experts, wherever their stage lies."""
    has = isinstance(s.model, Model) and s.model.num_experts is not None
    return s.plan.edp * layout(s).copies if has else 1


def sums_experts(s: Scenario) -> bool:
    """Return whether gradients of experts are summed over several ranks."""
    return expert_replicas(s) > 1


def expert_shards(s: Scenario) -> int:
    """Return the ranks that divide the states of experts; under stage 1 all that hold them."""
    return expert_replicas(s) if s.plan.zero else 1


def own_share(s: Scenario, trained: Iterable[Tensors]) -> int:
    """Return how many of the parameters that a rank trains it updates."""
    every = [*trained]
    experts = sum(t.experts for t in every)
    dense = sum(t.params for t in every) - experts
    return -(-dense // s.plan.shards) - (-experts // expert_shards(s))


def expert_exchange(s: Scenario, size: float) -> list[Segment]:
    """Return the sum of `size` bytes of gradients of experts over those that hold them."""
    name = "reduce_scatter" if expert_shards(s) > 1 else "all_reduce"
    return [Segment(Flow(name, size), EDP, place=BRANCH)]


def waits(rank: Int32, stream: Int16, action: Int8, plan: Plan) -> Int32:
    """Return (pairs, 2): an op of a pipeline replica, and what it waits for because of sharding.

    - A block's first work waits for its gather.
    - A gather waits until all blocks but the `prefetch` before its own have been computed, and for
      the update of the weights before it.
    - Work waits for the last but one reduce-scatter before it, so that at most two blocks (under
      stage 2 buckets) of gradients are alive in full.
    """
    order = np.argsort(rank, kind="stable")
    rank, stream, action = rank[order], stream[order], action[order]
    works = np.flatnonzero(stream == COMPUTE)
    update = action == ACTION_CODE["OPT"]
    pairs = [np.zeros((0, 2), np.int64)]
    if plan.zero == 3:
        gathers = np.flatnonzero(stream == UNSHARD)
        ahead = gathers[np.maximum(np.arange(len(gathers)) - plan.prefetch, 0)]
        ahead[: plan.prefetch] = 0  # what is before the first op: nothing
        updates = works[update[works]]
        pairs += [
            pair(following(works, gathers), gathers),
            pair(gathers, np.maximum(before(works, ahead), before(updates, gathers))),
        ]
    if plan.zero > 1:
        reductions = np.flatnonzero(stream == REDUCE)
        pairs.append(pair(following(works, reductions)[1:], reductions[:-1]))
    found = np.concatenate(pairs)
    found = found[(found != NONE).all(axis=1)]
    found = found[rank[found[:, 0]] == rank[found[:, 1]]]
    rows: Int32 = order[found].astype(np.int32)
    return rows


def pair(op: Int64, pred: Int64) -> Int64:
    """Return (pairs, 2): ops and what they wait for."""
    return np.stack([op, pred], axis=1)


def before(ops: Int64, at: Int64) -> Int64:
    """Return the last of sorted `ops` before each position, or NONE."""
    return np.append(ops, NONE)[np.searchsorted(ops, at) - 1]


def following(ops: Int64, at: Int64) -> Int64:
    """Return the first of sorted `ops` after each position, or NONE."""
    return np.append(ops, NONE)[np.searchsorted(ops, at)]
