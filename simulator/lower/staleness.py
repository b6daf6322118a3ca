"""Bounded staleness: ranks that push and pull for themselves, and whom a pull still waits for.

Stale synchronous parallel (Ho et al., More Effective Distributed ML via a Stale Synchronous
Parallel Parameter Server, NIPS 2013): what a rank reads holds every gradient that is more than
`staleness` steps older than its own. A *clock* is a meeting of the dp group that costs nothing, for
it travels with the pushes: it ends when all have pushed a bucket, and a later pull waits for it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from simulator.lower.bodies import SCOPES
from simulator.lower.pipeline import Template
from simulator.program import ONE_SIDED, Cost, Flow, Int64

CLOCK = Flow("barrier", 0.0, seconds=0.0)
ALONG_DP, OWN = SCOPES.index("dp"), SCOPES.index("one_sided")


def bound_staleness(steps: Template, costs: tuple[Cost, ...], staleness: int) -> Template:
    """Return the steps with pushes and pulls of one rank each, and clocks between them.

    A clock counts to the step whose pull waits for it, so that none is later than its step.

    Args:
        steps: whole steps, in which the pull of a bucket stands right behind its push.
        costs: their costs, to which the caller adds `CLOCK`.
        staleness: how many steps older the pushes are that a pull waits for.
    """
    pushes, pulls = (_rows(steps, costs, name) for name in ONE_SIDED)
    scope = steps.joint_scope.copy()
    scope[steps.joint[np.concatenate([pushes, pulls])]] = OWN
    num_steps = int(steps.step.max(initial=0)) + 1
    waiting = pulls[steps.step[pulls] >= staleness]
    count, ops, joints = len(waiting), len(steps), len(scope)
    pred = steps.pred.copy()
    pred[waiting] = np.arange(ops, ops + count)
    same = ("rank", "action", "stage", "microbatch", "layer", "step")
    ranks = steps.rank[waiting]
    columns: dict[str, Any] = {name: getattr(steps, name)[waiting] for name in same}
    columns |= {
        "stream": np.full(count, len(steps.streams), np.int16),
        "cost": np.full(count, len(costs), np.int32),
        "joint": np.arange(joints, joints + count, dtype=np.int32),
        "pred": (waiting - 1 - staleness * (ops // num_steps)).astype(np.int32),
    }
    whole = replace(steps, pred=pred)
    longer: dict[str, Any] = {
        name: np.concatenate([getattr(whole, name), new]) for name, new in columns.items()
    }
    return replace(
        whole,
        **longer,
        joint_scope=np.concatenate([scope, np.full(count, ALONG_DP, np.int8)]),
        joint_ranks=np.concatenate([steps.joint_ranks, np.stack([ranks, ranks], axis=1)]),
        streams=(*steps.streams, "dp clock"),
    )


def _rows(steps: Template, costs: tuple[Cost, ...], name: str) -> Int64:
    """Return the rows of the flows of a name."""
    named = np.array([isinstance(cost, Flow) and cost.name == name for cost in costs], bool)
    return np.flatnonzero(named[steps.cost])
