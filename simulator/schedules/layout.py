"""What follows from the lists of a schedule in one size: which stages lie where, what they need."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

from simulator.program import NONE
from simulator.schedules.action import Action, Actions
from simulator.schedules.passes import stages_of_ranks
from simulator.schedules.schedule import Schedule
from simulator.schedules.table import lists_of
from simulator.schedules.times import Target


@dataclass(frozen=True)
class Layout:
    """Where stages lie, and how their passes are cut."""

    stages: tuple[tuple[int, ...], ...]
    """Stages that each rank holds, in ascending order; one may lie on several ranks."""
    splits: bool
    """Whether some backward is cut into the gradient of the input and that of the weights."""
    pairs: bool
    """Whether some forward runs together with a backward."""
    updates: bool
    """Whether weights are updated after every microbatch, and steps follow without a flush."""
    versions: tuple[int, ...]
    """Versions of its weights that each rank keeps: where they are updated so, one for each
    microbatch between its forward and its backward."""

    @cached_property
    def copies(self) -> int:
        """Most ranks that hold one stage."""
        held = [stage for stages in self.stages for stage in stages]
        return max(held.count(stage) for stage in set(held))

    @cached_property
    def ranks_of(self) -> dict[int, tuple[int, ...]]:
        """Ranks that hold each stage."""
        found: dict[int, tuple[int, ...]] = {}
        for rank, stages in enumerate(self.stages):
            for stage in stages:
                found[stage] = (*found.get(stage, ()), rank)
        return found


@lru_cache(maxsize=256)
def layout_of(
    schedule: Schedule, ranks: int, microbatches: int, chunks: int,
    group: int | None = None, target: Target | None = None,
) -> Layout:  # fmt: skip
    """Return the layout of a schedule in a size that it takes."""
    actions = lists_of(schedule, ranks, microbatches, chunks, group, target)
    kinds = {(a.kind, a.paired) for row in actions for a in row}
    updates = any(a.kind == "OPT" and a.microbatch != NONE for row in actions for a in row)
    return Layout(
        stages=stages_of_ranks(actions),
        splits=any(kind in ("I", "W") for kind, _ in kinds),
        pairs=any(paired for _, paired in kinds),
        updates=updates,
        versions=tuple(_in_flight(row) if updates else 1 for row in actions),
    )


def _in_flight(row: tuple[Action, ...]) -> int:
    """Return the most forwards of a list whose backward is not done."""
    change = {"F": 1, "B": -1, "W": -1}
    return max(accumulate(change.get(action.kind, 0) for action in row), default=0)


def cut_after(actions: Actions, microbatch: int) -> Actions:
    """Return lists that end when their ranks have updated weights with a microbatch."""

    def length(row: tuple[Action, ...]) -> int:
        ends = (i for i, a in enumerate(row) if a.kind == "OPT" and a.microbatch == microbatch)
        return max(ends, default=len(row) - 1) + 1

    return tuple(row[: length(row)] for row in actions)
