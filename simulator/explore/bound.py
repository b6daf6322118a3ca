"""The least memory that plans need, found before any of them is simulated.

Two bounds, each below what a simulation finds: states, buffers and what lies outside the allocator;
and with them the activations of layers of the microbatches that a rank has in flight when it has
most. Neither counts transients, gathered weights, gradients in full, embedding and head.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import accumulate

from simulator.describe.scenario import Scenario
from simulator.hardware.outside import capacity, outside
from simulator.lower.blocks import Block
from simulator.lower.memory import rank_memory
from simulator.lower.passes import block_passes
from simulator.lower.places import layout
from simulator.lower.shapes import shapes
from simulator.lower.stage_buffers import stage_buffer_bytes
from simulator.lower.trainable import tuned
from simulator.schedules import Schedule, Target, lists_of, schedule_of

ENDS = {"F": 1, "B": -1, "I": -1}
"""How an action changes the microbatches in flight; a split backward frees all with its I."""


class Bounds:
    """Bounds of the plans of one space; what plans share is found once."""

    def __init__(self) -> None:
        self._states: dict[object, list[float]] = {}
        self._kept: dict[object, float] = {}

    def excess(self, s: Scenario) -> tuple[float, float]:
        """Return the bytes by which a plan needs more than a device has: for states alone, and with
        activations in flight. Below 0 it may fit, and so may what is not cut into stages yet.
        """
        if s.plan.stage_cut != "uniform" and s.plan.layers_per_stage is None:
            return -math.inf, -math.inf
        states, kept = self._of_states(s), self._of_layer(s)
        flying = in_flight(
            schedule_of(s.plan.schedule), s.plan.pp, s.num_microbatches, s.plan.chunks,
            s.plan.microbatch_group, s.target,
        )  # fmt: skip
        layers, held = s.layers_per_stage, layout(s).stages
        least = [min(layers[stage] for stage in stages) for stages in held]
        busy = [
            size + count * each * kept
            for size, count, each in zip(states, flying, least, strict=True)
        ]
        beside = float(outside(s)[0] - capacity(s)[0])
        reserve = s.run.allocator_reserve
        return max(states) * reserve + beside, max(busy) * reserve + beside

    def _of_states(self, s: Scenario) -> list[float]:
        p = s.plan
        key = (
            s.cluster.num_nodes, p.dp, p.tp, p.pp, p.cp, p.ep, p.zero, p.schedule, p.chunks,
            s.layers_per_stage, p.low_precision_shard, stage_buffer_bytes(s),
        )  # fmt: skip
        if key not in self._states:
            self._states[key] = [held.total for held in rank_memory(s)]
        return self._states[key]

    def _of_layer(self, s: Scenario) -> float:
        """Return the bytes that a layer's forward leaves behind for its backward, at least."""
        if s.plan.offload_activations or s.run.frozen_layers or s.run.lora_rank is not None:
            return 0.0  # not the same in every layer, or not on the device
        key = (shapes(s), s.plan.recompute, s.plan.recompute_modules, layout(s).splits)
        if key not in self._kept:
            every = {id(block): block for block in tuned(s).blocks.layers}.values()
            self._kept[key] = min(_kept(s, block) for block in every)
        return self._kept[key]


def _kept(s: Scenario, block: Block) -> float:
    costs = [x.cost for x in block_passes(s, block, False, s.plan.recompute).forward]
    return max(0.0, sum(cost.alloc.activations - cost.free.activations for cost in costs))


@lru_cache(maxsize=1024)
def in_flight(
    schedule: Schedule, ranks: int, microbatches: int, chunks: int, group: int | None,
    target: Target | None,
) -> tuple[int, ...]:  # fmt: skip
    """Return the most forwards of each rank whose backward has not begun."""
    lists = lists_of(schedule, ranks, microbatches, chunks, group, target)
    return tuple(
        max(accumulate(ENDS.get(action.kind, 0) for action in row), default=0) for row in lists
    )
