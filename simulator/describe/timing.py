"""Times that a schedule is made for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeAlias

from simulator.describe.fields import Range, validate
from simulator.schedules.times import Times

Duration: TypeAlias = Annotated[float, Range(0)]
PerStage: TypeAlias = Duration | tuple[Duration, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleTimes:
    """Time of a microbatch on a stage, in one unit of any kind: a number for all stages, or one for
    each.
    """

    forward: PerStage
    input_grad: PerStage
    """Of the gradient of a stage's input, for which the stage before it waits."""
    weight_grad: PerStage
    """Of the gradients of its weights, for which nobody waits."""
    message: Duration = 0.0
    """Time of a message between stages."""

    def __post_init__(self) -> None:
        validate(self)

    @property
    def times(self) -> Times:
        """These times, as schedulers take them."""
        return Times(self.forward, self.input_grad, self.weight_grad, self.message)
