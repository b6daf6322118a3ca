"""From a Scenario to a Program: a short, visible list of passes."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from simulator.budget import require
from simulator.describe.plan import Plan
from simulator.describe.scenario import Scenario
from simulator.lower import blocking, clipping, offload, sharding
from simulator.lower.bodies import CostTable, StageBodies, body, stage_bodies
from simulator.lower.check import check
from simulator.lower.grid import Grid, to_grid
from simulator.lower.layers import shapes
from simulator.lower.memory import static_memory
from simulator.lower.mesh import Mesh
from simulator.lower.pipeline import expand, repeat_steps
from simulator.lower.replicate import replicate
from simulator.lower.segments import COMPUTE, Segment
from simulator.lower.staleness import CLOCK, bound_staleness
from simulator.lower.trainable import first_trained_stage, without_backward
from simulator.program import Cost, Flow, Memory, Program, Work
from simulator.schedules import (
    Action,
    Actions,
    actions_of,
    add_optimizer,
    add_reduce_grad,
    add_send_recv,
    check_actions,
)

__all__ = ["Action", "Actions", "check", "lower", "lower_schedule"]


def lower(s: Scenario) -> Program:
    """Return the checked Program of a scenario."""
    world = s.plan.world_size
    require(400.0 * world, f"{world:,} ranks", "describe a smaller cluster")
    grid = _complete_grid(
        s.plan.schedule, s.plan.pp, s.num_microbatches, s.plan.chunks, first_trained_stage(s)
    )
    bodies = stage_bodies(s)
    x, parts = shapes(s), s.plan.tp if s.plan.scatter_gather else 1
    boundary = s.precision.activation * x.local_tokens * s.model.hidden_size / parts
    message = Flow("send_recv", boundary)
    costs: tuple[Cost, ...] = (*bodies.costs, message)
    replica = expand(grid, bodies.stages, len(bodies.costs))
    static = np.zeros(s.plan.pp)
    np.add.at(static, grid.home, [stage.total for stage in static_memory(s)])
    steps = repeat_steps(replica, s.run.num_steps)
    if s.plan.staleness is not None:
        steps, costs = bound_staleness(steps, costs, s.plan.staleness), (*costs, CLOCK)
    more = [steps.more]
    if s.plan.shards > 1:
        more.append(sharding.waits(steps.rank, steps.stream, steps.action, s.plan))
    if s.plan.offload_activations:
        more.append(offload.waits(steps))
    if not s.plan.p2p_overlap:
        more.append(blocking.messages(steps, s.plan.chunks))
    if not s.plan.grad_overlap:
        more.append(blocking.gradients(steps))
    if s.plan.chunks > 1 and (s.run.clip_grad or s.run.scales_loss):
        more.append(clipping.waits(steps.rank, steps.stream, steps.action, steps.step))
    steps = replace(steps, more=np.concatenate(more))
    return check(replicate(steps, Mesh.of(s.plan), costs, static))


@lru_cache(maxsize=256)
def _complete_grid(
    schedule: str, ranks: int, microbatches: int, chunks: int, first_trained: int
) -> Grid:
    """Return a schedule with messages, reductions and updates; plans of a sweep share it."""
    actions = add_send_recv(actions_of(schedule, ranks, microbatches, chunks))
    return to_grid(add_optimizer(add_reduce_grad(without_backward(actions, first_trained))))


def lower_schedule(
    actions: Actions, *, forward: float = 1.0, backward: float = 2.0, latency: float = 0.0
) -> Program:
    """Return the Program of a bare schedule with the same stated times on every stage.

    Args:
        actions: action lists by pipeline rank, as `actions_of` returns them; those that already
            hold sends and receives are taken as they stand: a send waits for the computation
            before it, and receives are posted ahead in their order.
        forward: seconds of one F.
        backward: seconds of one B.
        latency: seconds of one message between stages.

    Raises:
        ScheduleError: when the lists are not a legal schedule.
        DeadlockError: when their messages wait for each other.
    """
    check_actions(actions)
    if not any(a.kind.startswith(("SEND", "RECV")) for row in actions for a in row):
        actions = add_send_recv(actions)
    table = CostTable()
    stages = max((a.stage for row in actions for a in row), default=-1) + 1
    # One kept activation counts one byte: its memory over time is the microbatches in flight.
    one_f = body([Segment(Work("F", seconds=forward, alloc=Memory(1.0)), COMPUTE)], table)
    one_b = body([Segment(Work("B", seconds=backward, free=Memory(1.0)), COMPUTE)], table)
    nothing = body([], table)
    bodies = (StageBodies(one_f, one_b, one_b, nothing, nothing, one_f),) * stages
    message = table.number(Flow("send_recv", 0.0, seconds=latency))
    replica = expand(to_grid(actions), bodies, message)
    mesh = Mesh.of(Plan(pp=len(actions)))
    return check(replicate(replica, mesh, tuple(table.costs), np.zeros(len(actions))))
