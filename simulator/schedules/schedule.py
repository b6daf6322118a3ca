"""What is known of a schedule besides its lists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from simulator.schedules.action import Actions
from simulator.schedules.formulas import Bubble, Kept


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """What is known of a schedule: its function, the sizes it takes, and its closed forms."""

    make: Callable[..., Actions]
    """Function of (ranks, microbatches), then chunks where they vary, then `takes` by keyword."""
    chunks: tuple[int, int | None] = (1, 1)
    """Fewest and most stages of a rank; None for no most."""
    copies: int = 1
    """Ranks that hold each stage; 2 where microbatches enter from both ends."""
    takes: tuple[str, ...] = ()
    """Options of the function: `group` (microbatches of a round), `target` (a `Target`)."""
    complaint: Callable[[int, int, int, int | None], str | None] | None = None
    """Why (ranks, microbatches, chunks, group) cannot be made, or None where it can."""
    bubble: Bubble | None = None
    """Idle seconds of the rank that idles most, for equal stages and free messages: between its own
    first and last action, or until the last rank ends where the formula is `to_the_end`."""
    kept: Kept | None = None
    """Most stage activations that each rank keeps."""
    note: str = ""
    """What a reader of its results must know."""
    size: tuple[int, int] | None = None
    """Ranks and microbatches of lists that are of one size only."""
    foreign: bool = False
    """Whether its lists come from outside this package: then they are run without a clock first, so
    that a deadlock is explained."""
