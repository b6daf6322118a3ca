"""Between steps: evaluations, which are passes forward alone, and hosts that log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from simulator.describe.between import due
from simulator.describe.scenario import Scenario
from simulator.lower.bodies import StageBodies
from simulator.lower.grid import to_grid
from simulator.lower.pipeline import Template, expand
from simulator.lower.places import layout
from simulator.lower.save import added
from simulator.lower.segments import COMPUTE
from simulator.program import NONE, NOTHING, Cost, Work
from simulator.schedules import Action, Actions, add_send_recv

LOG = "log"


def forward_only(stages: Sequence[Sequence[int]], microbatches: int) -> Actions:
    """Return lists in which each rank runs forwards only, in rounds of as many as there are ranks.

    Of a round a rank with several stages runs the first one of them for all, then the next.
    """
    ranks = len(stages)
    rounds = [range(first, min(first + ranks, microbatches))
              for first in range(0, microbatches, ranks)]  # fmt: skip
    return tuple(
        tuple(Action(stage, "F", m) for one in rounds for stage in held for m in one)
        for held in stages
    )


def with_evaluations(
    step: Template, s: Scenario, places: tuple[StageBodies, ...], costs: tuple[Cost, ...]
) -> tuple[Template, tuple[Cost, ...]]:
    """Return all steps of a run with evaluations before some of them, and the costs of all.

    Nothing is kept for a backward; their microbatches are numbered after those of a step.
    """
    assert s.evaluation is not None  # callers ask where there is one
    grid = to_grid(add_send_recv(forward_only(layout(s).stages, s.evaluation.batches)))
    one = expand(grid, places, len(costs) - 1)
    used, number = np.unique(one.cost, return_inverse=True)
    more = tuple(replace(costs[k], alloc=NOTHING, free=NOTHING) for k in used.tolist())
    one = replace(
        one,
        cost=(len(costs) + number.reshape(-1)).astype(np.int32),
        microbatch=(one.microbatch + s.num_microbatches).astype(np.int32),
    )
    before, parts = due(s.evaluation.every, s.run.num_steps), list[tuple[Template, int]]()
    actions = int(one.listed.max(initial=-1)) + 1
    after = replace(step, listed=step.listed + np.int32(actions))
    for k in range(s.run.num_steps):
        parts += [(one, k), (after, k)] if k in before else [(step, k)]
    return _in_order(parts), (*costs, *more)


def _in_order(parts: list[tuple[Template, int]]) -> Template:
    """Return ops one after the other in every stream, each of a step."""
    streams = tuple(dict.fromkeys(name for part, _ in parts for name in part.streams))
    ops = np.cumsum([0, *(len(part) for part, _ in parts)])
    joints = np.cumsum([0, *(len(part.joint_scope) for part, _ in parts)])

    def moved(name: str, by: Any) -> Any:
        columns = [getattr(part, name) for part, _ in parts]
        return np.concatenate([
            np.where(x == NONE, NONE, x + first) for x, first in zip(columns, by, strict=False)
        ]).astype(np.int32)  # fmt: skip

    same = ("rank", "action", "stage", "microbatch", "layer", "cost", "listed", "joint_scope",
            "joint_ranks")  # fmt: skip
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part, _ in parts]) for name in same
    }
    lanes = [np.array([streams.index(n) for n in part.streams]) for part, _ in parts]
    return replace(
        parts[0][0],
        **columns,
        stream=np.concatenate([
            np.where(part.stream == NONE, NONE, lane[part.stream])
            for (part, _), lane in zip(parts, lanes, strict=True)
        ]).astype(np.int16),
        step=np.concatenate([np.full(len(part), k, np.int32) for part, k in parts]),
        pred=moved("pred", ops), joint=moved("joint", joints), more=moved("more", ops),
        streams=streams,
    )  # fmt: skip


def log(t: Template, s: Scenario, costs: tuple[Cost, ...]) -> tuple[Template, tuple[Cost, ...]]:
    """Return the ops of a run whose hosts log between some steps, and the costs of all.

    A host logs when its rank has computed all of a step, and launches the next one then.
    """
    if not s.run.log_time:
        return t, costs
    works = np.flatnonzero(t.stream == COMPUTE)
    own = [works[t.rank[works] == rank] for rank in range(t.num_ranks)]
    steps = due(s.run.log_every or 1, s.run.num_steps)
    at = np.array([[np.searchsorted(t.step[mine], k) for mine in own] for k in steps])
    before, begins = (
        np.array([[mine[i - b] for mine, i in zip(own, row, strict=True)] for row in at])
        for b in (1, 0)
    )
    rows = (len(t) + np.arange(begins.size)).reshape(begins.shape)
    whole = added(
        t, (LOG,), rows=rows.size, waits=[(rows, before), (begins, rows)],
        rank=np.tile(np.arange(t.num_ranks), len(steps)),
        stream=np.full(rows.size, len(t.streams)), step=np.repeat(steps, t.num_ranks),
        cost=np.full(rows.size, len(costs)), listed=t.listed[begins.ravel()],
    )  # fmt: skip
    return whole, (*costs, Work(LOG, seconds=s.run.log_time))
