"""Stage cuts: which layers go to which stage, so that the largest stage is as small as can be.

A cut leaves layers in order, so it is a partition of a row into runs. The smallest largest run is
found by a dynamic programme over (stages, layers); of all cuts that reach it the most even one is
taken, by the sum of squares. What a run costs may differ by stage: the first one also holds the
embedding, the last one the head, and devices may differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from simulator.describe.network import Network
from simulator.describe.placement import kind_of_ranks
from simulator.describe.scenario import Scenario
from simulator.errors import DescriptionError
from simulator.lower.mesh import Mesh
from simulator.lower.places import layout
from simulator.lower.trainable import Stage, stage_params, tuned
from simulator.program import ACTION_CODE, NONE, Int64
from simulator.report.result import Result

CHAIN = ("compute", "tp", "cp", "ep", "etp")
"""Streams of what a pass waits for in turn; others run beside it."""

OF_SCHEDULES = ("microbatch_group", "schedule_times", "schedule_memory", "schedule_kept")
"""Fields of a plan that GPipe has no use for."""


def resolved(s: Scenario) -> Scenario:
    """Return a scenario whose plan lists its layers, where `plan.stage_cut` leaves them to a cut.

    Raises:
        DescriptionError: when a list is there too and is another than the cut.
    """
    if s.plan.stage_cut == "uniform":
        return s
    given = s.plan.layers_per_stage
    if given is None:
        return _with(s, _cut(s))
    found = _cut(_with(s, None))
    if given != found:
        raise DescriptionError(
            f"plan.layers_per_stage {list(given)} is not what plan.stage_cut {s.plan.stage_cut!r} "
            f"finds, {list(found)}; leave one of them out"
        )
    return s


def _with(s: Scenario, layers: tuple[int, ...] | None) -> Scenario:
    return replace(s, plan=replace(s.plan, layers_per_stage=layers))


@lru_cache(maxsize=256)
def _cut(s: Scenario) -> tuple[int, ...]:
    """Return the layers of each stage by the scenario's way to cut."""
    stages = range(s.plan.num_stages)
    if s.plan.stage_cut == "parameters":
        runs = _parameters(s)
        return balanced([runs.of(stage, len(stages)) for stage in stages])
    by_kind = [_times(replace(s, cluster=s.cluster.only(k))) for k in range(len(s.cluster.kinds))]
    costs = []
    for stage, kinds in zip(stages, _kinds(s), strict=True):
        each = [by_kind[kind].of(stage, len(stages)) for kind in kinds]
        costs.append(np.max(each, axis=0))
    return balanced(costs)


def _kinds(s: Scenario) -> list[set[int]]:
    """Return the kinds of node on which the ranks of each stage lie; the slowest of them counts."""
    if not s.cluster.is_mixed:
        return [{0}] * s.plan.num_stages
    mesh, kind = Mesh.of(s.plan), kind_of_ranks(s.plan, s.cluster)
    kinds: list[set[int]] = [set() for _ in range(s.plan.num_stages)]
    for place, stages in enumerate(layout(s).stages):
        ranks = mesh.ranks_of_tiles(np.arange(mesh.tiles), place).tolist()
        for stage in stages:
            kinds[stage].update(kind[rank] for rank in ranks)
    return kinds


def balanced(costs: Sequence[Int64]) -> tuple[int, ...]:
    """Return how many layers each stage has in the cut whose largest cost is least.

    Of several such cuts it is the one with the least sum of squared costs. Stages between the first
    and the last have a layer at least.

    Args:
        costs: by stage, (layers + 1, layers + 1): at [i, j] that of the layers i to j - 1.
    """
    first, *middle = costs
    size = len(first)
    if not middle:
        return (size - 1,)
    runs = np.tri(size, dtype=bool, k=-1).T  # of a layer at least
    every = [runs & (np.arange(size) == 0)[:, None], *[runs] * len(middle)]
    every[0][0, 0] = True  # the embedding alone
    every[-1] = every[-1] | np.eye(size, dtype=bool)  # the head alone
    table = [np.where(may, cost, np.inf) for may, cost in zip(every, costs, strict=True)]
    largest = np.full(size, np.inf)
    largest[0] = 0
    for cost in table:
        largest = np.maximum(largest[:, None], cost).min(axis=0)
    squares, came_from = np.full(size, np.inf), []
    squares[0] = 0
    for cost in table:
        sums = squares[:, None] + np.where(cost <= largest[-1], cost**2, np.inf)
        came_from.append(sums.argmin(axis=0))
        squares = sums.min(axis=0)
    ends = [size - 1]
    for origin in reversed(came_from):
        ends.append(int(origin[ends[-1]]))
    return tuple(np.diff(ends[::-1]).tolist())


class Runs(NamedTuple):
    """What runs of layers cost, and what the ends of the model add."""

    layers: Int64
    embedding: int
    head: int
    between: int = 0
    """What a stage between the two ends adds: putting together what it receives."""
    more: Int64 | None = None
    """What the first `limit` layers of a stage cost more."""
    limit: int = 0

    def of(self, stage: int, stages: int) -> Int64:
        """Return (layers + 1, layers + 1) costs of the runs of a stage, as `balanced` takes."""
        added = self.between if 0 < stage < stages - 1 else 0
        added += self.embedding * (stage == 0) + self.head * (stage == stages - 1)
        sums = np.append(0, np.cumsum(self.layers))
        costs: Int64 = sums[None, :] - sums[:, None] + added
        if self.more is not None:
            sums, at = np.append(0, np.cumsum(self.more)), np.arange(len(costs))
            costs += sums[np.minimum(at[None, :], at[:, None] + self.limit)] - sums[:, None]
        return costs


def _parameters(s: Scenario) -> Runs:
    """Return the parameters of each block on one rank.

    A tied head holds the embedding again, but where its own rank has it.
    """
    parts, ranks_of = tuned(s), layout(s).ranks_of
    every, frozen = parts.blocks.layers, s.run.frozen_layers
    layers = np.array([parts.still.params] * frozen + [x.params for x in every[frozen:]], np.int64)
    whole = ranks_of[0] == ranks_of[s.plan.num_stages - 1]
    end = Stage((), is_first=False, is_last=True, num_frozen=0, has_both_ends=whole)
    return Runs(layers, parts.blocks.embedding.params, stage_params(s, end))


def _times(s: Scenario) -> Runs:
    """Return the ticks of forward and backward of each block, as a run of the pipeline has them."""
    if s.plan.recompute_again:
        raise DescriptionError(
            "plan.stage_cut 'time' with plan.recompute_again: what is computed twice more is not "
            'timed; set plan.stage_cut = "parameters", or list plan.layers_per_stage'
        )
    if s.plan.offload_layers is not None:
        raise DescriptionError(
            "plan.stage_cut 'time' with plan.offload_layers: which layers copy hangs on the cut; "
            'leave plan.offload_layers out, set plan.stage_cut = "parameters", or list '
            "plan.layers_per_stage"
        )
    if s.plan.recompute_layers is None:
        return _measured(s)
    again = _measured(replace(s, plan=replace(s.plan, recompute_layers=None)))
    plain = _measured(replace(s, plan=replace(s.plan, recompute="none", recompute_layers=None)))
    return plain._replace(more=again.layers - plain.layers, limit=s.plan.recompute_layers)


def _measured(s: Scenario) -> Runs:
    """Return the ticks of each block in a short run of the same plan.

    It runs two microbatches (one where there is no other) under GPipe, with every flow alone, so
    that what a layer waits for within a stage counts: tensor-parallel collectives, weights that are
    gathered too late. Of forward the last microbatch counts, of backward the first.
    """
    from simulator.api import simulate

    plan = s.plan
    plain: dict[str, Any] = dict.fromkeys(OF_SCHEDULES)
    if layout(s).copies > 1:  # GPipe has every stage once: what divides its copies does not apply
        plain |= {"grad_overlap": True, "first_bucket_size": None, "zero": 0, "dp_shard": None}
    each = min(2, s.num_microbatches)
    layers, stages = s.model.num_hidden_layers, plan.pp
    ends = max(0, stages - layers)  # stages that hold an end of the model alone
    count, rest = divmod(layers, stages - ends)
    even = [count + (i < rest) for i in range(stages - ends)]
    probe = (*[0] * (ends > 1), *even, *[0] * (ends > 0))
    short = replace(
        s,
        plan=replace(
            plan, schedule="GPipe", chunks=1, stage_cut="uniform", layers_per_stage=probe, **plain
        ),
        run=replace(
            s.run, detail="layer", network="alpha-beta", overlap_slowdown=0.0, num_steps=1,
            warm_up=0.0, log_time=0.0, log_every=None,
            global_batch_size=each * plan.microbatch_size * plan.dp,
        ),
        cluster=replace(s.cluster, network=Network()),
        data=None,
        checkpoint=None,
        evaluation=None,
        jitter=None,
        operations=None,
    )  # fmt: skip
    return _by_block(simulate(short), short, each - 1)


def _by_block(result: Result, s: Scenario, last: int) -> Runs:
    """Return what blocks take of a run, on whichever replica is slowest."""
    p, (start, end) = result.tiled, result.times.columns
    chain = np.append([name in CHAIN for name in p.streams], False)[p.stream]  # NONE is the last
    layers, others = np.zeros(s.model.num_hidden_layers, np.int64), [0] * s.plan.num_stages
    for action, microbatch in (("F", last), ("B", 0)):
        mine = chain & (p.action == ACTION_CODE[action]) & (p.microbatch == microbatch)
        for stage in range(s.plan.num_stages):
            rows = np.flatnonzero(mine & (p.stage == stage))
            reached = np.maximum.accumulate(end[rows], axis=0)
            spent = np.diff(reached, axis=0, prepend=start[rows[:1]]).max(axis=1, initial=0)
            labels = p.layer[rows]
            inner = (labels != NONE) & (labels < len(layers))  # what predicts further is the head's
            np.add.at(layers, labels[inner], spent[inner])
            others[stage] += int(spent[~inner].sum())
    return Runs(layers, others[0], others[-1], max(others[1:-1], default=0))
