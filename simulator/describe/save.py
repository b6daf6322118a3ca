"""Checkpoints in the midst of the steps that are simulated, and a state that is read back first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from simulator.describe.fields import Count, validate
from simulator.errors import suggestion

if TYPE_CHECKING:
    from simulator.describe.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """What is saved between two steps, by whom, and who waits for it.

    Each rank copies its part of the state to its host (the snapshot), and the host writes it.
    """

    storage: str
    """One of `cluster.storage`."""
    asynchronous: bool = False
    """Whether training goes on once the snapshot has been taken; else when all is written."""
    sharded: bool = True
    """Whether ranks that hold the same state write an even part of it each; else the first of
    them writes all, and the others wait."""
    before_step: Count | None = None
    """The step, counted from 0, before which it is taken; the last one when absent."""
    every: Count | None = None
    """Steps from one to the next, the first before this one; in place of `before_step`. One that is
    asynchronous waits until the one before it has been written."""
    barrier: bool = True
    """Whether it is complete when all ranks have met after their writes, as in torch's
    `distributed.checkpoint` and Megatron-LM; else each rank goes by its own write."""
    restore: bool = False
    """Whether ranks begin by reading the state back and copying it to their devices, as after a
    failure; each reads all that it holds."""

    def __post_init__(self) -> None:
        validate(self)


def save_problems(s: Scenario) -> Iterator[str]:
    """Say what of a checkpoint does not fit the rest."""
    save, known, plan = s.checkpoint, s.cluster.storage, s.plan
    if save is None:
        return
    if save.storage not in known:
        there = f"it has {', '.join(known)}" if known else "it has none"
        yield (
            f"checkpoint.storage {save.storage!r} is not one of cluster.storage ({there})"
            f"{suggestion(save.storage, known)}; describe [cluster.storage.{save.storage}]"
        )
    if s.run.num_steps < 2:
        yield (
            "checkpoint: is taken between two steps, and run.num_steps is 1; set run.num_steps = 2"
        )
    elif save.every is not None and save.before_step is not None:
        yield ("checkpoint.before_step and every both say when it is taken; leave one of them out")
    elif save.every is not None and save.every >= s.run.num_steps:
        yield (
            f"checkpoint.every {save.every}: the first one would be before step {save.every}, of "
            f"steps 0 to {s.run.num_steps - 1}; set run.num_steps = {save.every + 1} or more, or "
            "leave it out for one before the last step"
        )
    elif save.before_step is not None and save.before_step >= s.run.num_steps:
        yield (
            f"checkpoint.before_step {save.before_step}: steps are 0 to {s.run.num_steps - 1}; set "
            f"run.num_steps = {save.before_step + 1} or more"
        )
    bare = [node.name for node in s.cluster.kinds if node.host is None]
    if bare:
        yield (
            f"checkpoint: {bare[0]} does not say what its host offers, to which state is copied; "
            "describe cluster.node.host, as the node dgx-a100 does"
        )
    if not save.sharded and plan.zero:
        yield (
            f"checkpoint.sharded is false, but under plan.zero {plan.zero} no rank has all of its "
            "state; set sharded = true"
        )
    if not save.sharded and plan.ep > 1:
        yield (
            f"checkpoint.sharded is false, but with plan.ep {plan.ep} no rank has all experts; set "
            "sharded = true"
        )
    if plan.offload_optimizer:
        yield (
            "checkpoint: with plan.offload_optimizer the state lies on the host already, which is "
            "not modelled; leave one of them out"
        )
    overlapping = plan.staleness is not None or "PipeDream" in str(plan.schedule)
    if overlapping:
        why = "plan.staleness" if plan.staleness is not None else f"plan.schedule {plan.schedule!r}"
        yield f"checkpoint: with {why} no moment lies between two steps of all ranks; leave it out"
