"""From a Scenario to a Program: a short, visible list of passes."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from simulator.budget import require
from simulator.describe.plan import Plan
from simulator.describe.scenario import Scenario
from simulator.errors import DeadlockError
from simulator.lower import blocking, clipping, offload, sharding
from simulator.lower.between import log, with_evaluations
from simulator.lower.bodies import CostTable, StageBodies, body, stage_bodies
from simulator.lower.check import check
from simulator.lower.data import load
from simulator.lower.grid import Grid, to_grid
from simulator.lower.memory import more_buffer_bytes, rank_memory
from simulator.lower.mesh import Mesh
from simulator.lower.pairs import pair_takes
from simulator.lower.pipeline import expand, repeat_steps, without_flush
from simulator.lower.places import layout, microbatches_begun
from simulator.lower.replicate import replicate
from simulator.lower.restore import restore
from simulator.lower.save import save_state
from simulator.lower.segments import COMPUTE, Segment
from simulator.lower.shapes import shapes
from simulator.lower.staleness import CLOCK, bound_staleness
from simulator.lower.trainable import first_trained_stage, without_backward
from simulator.lower.warm_up import warm_up
from simulator.program import Cost, Flow, Memory, Program, Work
from simulator.schedules import (
    Action,
    Actions,
    Schedule,
    Target,
    add_optimizer,
    add_reduce_grad,
    add_send_recv,
    check_actions,
    lists_of,
    schedule_of,
)
from simulator.schedules.layout import cut_after

__all__ = ["Action", "Actions", "check", "lower", "lower_schedule"]


def lower(s: Scenario) -> Program:
    """Return the checked Program of a scenario."""
    world = s.plan.world_size
    require(400.0 * world, f"{world:,} ranks", "describe a smaller cluster")
    found = layout(s)
    grid = _complete_grid(
        schedule_of(s.plan.schedule), s.plan.pp,
        microbatches_begun(s) if found.updates else s.num_microbatches, s.plan.chunks,
        s.plan.microbatch_group, s.target, first_trained_stage(s), found.updates,
    )  # fmt: skip
    bodies = stage_bodies(s)
    x, parts = shapes(s), s.plan.tp if s.plan.scatter_gather else 1
    boundary = s.precision.activation * x.local_tokens * s.model.hidden_size / parts
    message = Flow("send_recv", boundary)
    costs: tuple[Cost, ...] = (*bodies.costs, message)
    replica = expand(grid, bodies.places, len(bodies.costs))
    static = np.array([held.total for held in rank_memory(s)])
    if s.evaluation is not None:
        steps, costs = with_evaluations(replica, s, bodies.places, costs)
    elif found.updates:
        steps = without_flush(replica, grid, s.num_microbatches)
    else:
        steps = repeat_steps(replica, s.run.num_steps)
    if s.plan.staleness is not None:
        steps, costs = bound_staleness(steps, costs, s.plan.staleness), (*costs, CLOCK)
    more = [steps.more]
    if s.plan.shards > 1:
        more.append(sharding.waits(steps.rank, steps.stream, steps.action, s.plan))
    if s.plan.offload_activations:
        more.append(offload.waits(steps, s))
    if not s.plan.p2p_overlap:
        eager = s.plan.p2p_protocol == "eager"
        more.append(blocking.messages(steps, in_one_go=_goes_round(grid), eager=eager))
    if not s.plan.grad_overlap:
        more.append(blocking.gradients(steps))
    several = any(len(stages) > 1 for stages in found.stages)
    if several and (s.run.clip_grad or s.run.scales_loss):
        more.append(clipping.waits(steps.rank, steps.stream, steps.action, steps.step))
    steps = replace(steps, more=np.concatenate(more))
    steps, costs = log(steps, s, costs)
    steps, costs = warm_up(steps, s, costs)
    steps, costs = restore(steps, s, costs)
    steps, costs = save_state(steps, s, costs)
    steps, costs = load(steps, s, costs)
    program = replicate(steps, Mesh.of(s.plan), costs, static)
    if s.cluster.is_mixed:
        own = program.static_bytes + more_buffer_bytes(s)
        program = replace(program, static_bytes=own)
    try:
        return check(program)
    except DeadlockError as error:
        if s.plan.p2p_overlap:
            raise
        raise DeadlockError(f"{error}\n{BLOCKED}") from None


BLOCKED = (
    "with plan.p2p_overlap = false a rank computes on when all that it sends has been received, "
    "and receives when it has computed; plan.p2p_overlap = true posts receives ahead, and "
    'plan.p2p_protocol = "eager" sends to ranks that have not got there'
)


@lru_cache(maxsize=256)
def _complete_grid(
    schedule: Schedule, ranks: int, microbatches: int, chunks: int, group: int | None,
    target: Target | None, first_trained: int, cut: bool,
) -> Grid:  # fmt: skip
    """Return a schedule with messages, reductions and updates; plans of a sweep share it.

    `cut` ends it where the last `ranks` microbatches are still in flight.
    """
    actions = lists_of(schedule, ranks, microbatches, chunks, group, target)
    if cut:
        actions = cut_after(actions, microbatches - ranks - 1)
    actions = add_send_recv(actions)
    return to_grid(add_optimizer(add_reduce_grad(without_backward(actions, first_trained))))


def _goes_round(grid: Grid) -> bool:
    """Return whether stages lie on several ranks by turns, as in Megatron-LM's interleaved 1F1B."""
    turns = np.arange(grid.num_stages) % max(grid.num_ranks, 1)
    return grid.num_stages > grid.num_ranks and bool((grid.home == turns[:, None]).all())


def lower_schedule(
    actions: Actions,
    *,
    forward: float = 1.0,
    backward: float = 2.0,
    input_grad: float = 1.0,
    weight_grad: float = 1.0,
    pair: float | None = None,
    held: float = 1.0,
    latency: float = 0.0,
    p2p_overlap: bool = True,
) -> Program:
    """Return the Program of a bare schedule with the same stated times on every stage.

    Args:
        actions: action lists by pipeline rank, as `actions_of` returns them; those that already
            hold sends and receives are taken as they stand: a send waits for the computation
            before it, and receives are posted ahead in their order.
        forward: seconds of one F.
        backward: seconds of one B.
        input_grad: seconds of one I.
        weight_grad: seconds of one W.
        pair: seconds of a forward and a backward that run together, which begin and end at once;
            those of both when absent.
        held: share of what a forward keeps that waits for W where the backward is split.
        latency: seconds of one message between stages.
        p2p_overlap: whether ranks compute on while they send and receive, as in a plan.

    Raises:
        ScheduleError: when the lists are not a legal schedule.
        DeadlockError: when their messages wait for each other.
    """
    check_actions(actions)
    if not any(a.kind.startswith(("SEND", "RECV")) for row in actions for a in row):
        actions = add_send_recv(actions)
    table = CostTable()
    grid = to_grid(actions)
    # One kept activation counts one byte: its memory over time is the microbatches in flight.
    works = {
        "F": Work("F", seconds=forward, alloc=Memory(1.0)),
        "B": Work("B", seconds=backward, free=Memory(1.0)),
        "I": Work("I", seconds=input_grad, free=Memory(1.0 - held)),
        "W": Work("W", seconds=weight_grad, free=Memory(held)),
    }
    f, b, i, w = (body([Segment(work, COMPUTE)], table) for work in works.values())
    nothing = body([], table)
    bodies = (StageBodies(f, b, b, nothing, nothing, f, i, w, w),) * len(grid.places[0])
    message = table.number(Flow("send_recv", 0.0, seconds=latency))
    costs = list(table.costs)
    replica = expand(grid, bodies, message, at_once=True)
    if pair is not None:
        replica, costs = pair_takes(replica, grid, costs, pair)
    if not p2p_overlap:
        waits = blocking.messages(replica, in_one_go=_goes_round(grid), eager=False)
        replica = replace(replica, more=np.concatenate([replica.more, waits]))
    mesh = Mesh.of(Plan(pp=len(actions)))
    return check(replicate(replica, mesh, tuple(costs), np.zeros(len(actions))))
