"""What follows from the lists of a schedule in one size: which stages lie where, what they need."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from simulator.schedules.passes import stages_of_ranks
from simulator.schedules.schedule import Schedule
from simulator.schedules.table import lists_of
from simulator.schedules.times import Target


class Layout(NamedTuple):
    """Where stages lie, and how their passes are cut."""

    stages: tuple[tuple[int, ...], ...]
    """Stages that each rank holds, in ascending order; one may lie on several ranks."""
    splits: bool
    """Whether some backward is cut into the gradient of the input and that of the weights."""
    pairs: bool
    """Whether some forward runs together with a backward."""
    updates: bool
    """Whether weights are updated after every microbatch."""

    @property
    def copies(self) -> int:
        """Most ranks that hold one stage."""
        held = [stage for stages in self.stages for stage in stages]
        return max(held.count(stage) for stage in set(held))

    @property
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
    return Layout(
        stages=stages_of_ranks(actions),
        splits=any(kind in ("I", "W") for kind, _ in kinds),
        pairs=any(paired for _, paired in kinds),
        updates=("OPT", False) in kinds,
    )
