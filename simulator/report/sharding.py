"""What sharded data parallelism moves, and the bandwidth that would hide it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from simulator.describe.plan import Plan, ShardingLibrary
from simulator.hardware.nccl import bus_factor
from simulator.program import NONE, Flow
from simulator.report.breakdown import stream_category
from simulator.units import TICKS_PER_SECOND, format_bytes

if TYPE_CHECKING:
    from simulator.report.result import Result

KINDS = ("unshard", "reduce", "dp", "edp")
"""Streams of sharded data parallelism: gathers, reduce-scatters, all-reduces over replicas; and of
experts all of them."""


class ShardingTraffic(NamedTuple):
    """What the busiest pipeline rank sends for data parallelism in the last step."""

    sent_bytes: dict[str, float]
    """By stream, one of `KINDS`."""
    hiding_bytes_per_s: float
    """Bus bandwidth at which it would take as long as the rank's forward and backward work."""


def sharding_traffic(result: Result) -> ShardingTraffic:
    """Return what data parallelism sends, on the rank of a pipeline that sends most."""
    program = result.tiled
    last = int(program.step.max(initial=0))
    category = np.array([stream_category(name) == "dp" for name in program.streams])
    rows = (program.joint != NONE) & (program.step == last) & category[program.stream]
    sent = np.zeros((len(program.streams), len(program.tile_ranks)))
    for row in np.flatnonzero(rows).tolist():
        cost = program.costs[program.cost[row]]
        assert isinstance(cost, Flow)  # a joint row is a flow: `check`
        ranks = len(program.groups[int(program.joint_group[program.joint[row]])])
        size = cost.count * cost.bytes * bus_factor(cost.name, ranks)
        sent[program.stream[row], program.rank[row]] += size
    busiest = int(sent.sum(axis=0).argmax())
    ranks = program.tile_ranks[busiest]
    work = float(result.breakdown.of("forward", "backward")[ranks].mean()) / TICKS_PER_SECOND
    by_stream = {kind: float(sent[program.streams.index(kind), busiest]) for kind in KINDS}
    return ShardingTraffic(by_stream, sum(by_stream.values()) / work if work else math.inf)


def sharding_name(plan: Plan) -> str:
    """Return how a plan shards, in a few words."""
    replicas = plan.replicas // plan.shards
    return f"ZeRO-{plan.zero} over {plan.shards}" + (f" x {replicas} replicas" * (replicas > 1))


def sharding_memory(plan: Plan, parts: tuple[float, float, float]) -> str:
    """Return what a sharded plan holds: bytes of a parameter's weight, gradient and optimizer."""
    names = ("weight", "gradient", "optimizer")
    share = ", ".join(f"{name} {size:.4g}" for name, size in zip(names, parts, strict=True))
    passing = {
        1: "",
        2: "; gradients until they are reduced come and go, as activations",
        3: "; gathered weights, and gradients until they are reduced, come and go, as activations",
    }[plan.zero]
    return f"{sharding_name(plan)}: bytes of a parameter on a rank: {share}{passing}"


def sharding_lines(result: Result, plan: Plan) -> list[str]:
    """Return the line of the report that says what sharding costs, if there is any."""
    if plan.shards == 1:
        return []
    traffic = sharding_traffic(result)
    words = {
        "unshard": "gathers", "reduce": "reduce-scatters", "dp": "all-reduces",
        "edp": "gathers and reduce-scatters of experts",
    }  # fmt: skip
    sent = ", ".join(
        f"{format_bytes(size)} in {words[kind]}"
        for kind, size in traffic.sent_bytes.items()
        if size
    )
    hiding = format_bytes(traffic.hiding_bytes_per_s)
    return [f"  sharding    a rank sends {sent} a step; {hiding}/s would hide it behind its work"]


COPIES: Mapping[ShardingLibrary, str] = {
    "fsdp2": "FSDP2 copies weights out of what was gathered, and gradients into what is summed",
    "fsdp1": "FSDP1 puts the gradients of a block together, casts and divides them before they are "
    "summed",
    "megatron_fsdp": "Megatron-FSDP copies gradients into what is summed where products do not add "
    "to them",
    "deepspeed": "DeepSpeed puts together the weights that were gathered, and twice gradients, "
    "which it divides, before they are summed",
}
"""What each library copies, as `lower.shard_copies` has it."""


def sharding_assumptions(plan: Plan, gradient: int) -> list[str]:
    """Return what was assumed of a sharded plan, whose gradients have `gradient` bytes."""
    when: str = {
        1: "during the last backward, in buckets",
        2: "during every backward, in buckets; at most two buckets are in full",
        3: "during every backward, block by block; at most two blocks of them are in full",
    }[plan.zero]
    if plan.no_sync:
        when = "in a step's last backward; until then each rank adds them up in full"
    sums = "reduce-scattered"
    if plan.shards < plan.replicas:
        sums += f" over {plan.shards} ranks, and the shards all-reduced over the replicas,"
    out = [f"gradients are {sums} in {gradient}-byte numbers {when}"]
    if plan.zero < 3:
        return [
            *out,
            "updated weights are gathered after the optimizer and before the next forward, beside "
            "nothing",
        ]
    kept = "the head keeps them where its backward follows its forward"
    if plan.root_holds_ends:
        kept = "embedding and head keep them until their backward"
    if not plan.reshard_after_forward:
        kept = "they stay until their backward, in a pipeline until the last one of the step"
    return [
        *out,
        f"embedding, each layer and head gather their weights as a block each, {plan.prefetch} "
        f"block(s) ahead; {kept}",
        f"{COPIES[plan.sharding_library]} (plan.sharding_library); casts of shards take no time",
    ]
