"""Closed forms of schedules, as text and as functions of times and sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Case(NamedTuple):
    """Sizes of a pipeline, and seconds of one microbatch on one stage, all stages alike."""

    p: int
    """Ranks."""
    m: int
    """Microbatches."""
    v: int = 1
    """Stages of a rank."""
    f: float = 1.0
    """Forward."""
    i: float = 1.0
    """Gradient of the input."""
    w: float = 1.0
    """Gradients of the weights."""
    fb: float | None = None
    """A forward and a backward that run together; one after the other when absent."""

    @property
    def b(self) -> float:
        """A whole backward."""
        return self.i + self.w

    @property
    def pair(self) -> float:
        """A forward and a backward that run together."""
        return self.f + self.b if self.fb is None else self.fb


def _always(case: Case) -> bool:
    return True


@dataclass(frozen=True, eq=False)
class Formula(Generic[T]):
    """A closed form, and the cases that it holds for."""

    text: str
    """In p ranks, m microbatches, v stages of a rank, r the rank; F, I, W and B = I + W seconds."""
    value: Callable[[Case], T]
    where: str = ""
    """The cases that it holds for, in words; all when empty."""
    holds: Callable[[Case], bool] = _always
    to_the_end: bool = False
    """Whether idle time is counted until the last rank ends, not until the rank itself does."""

    def __str__(self) -> str:
        return f"{self.text}{f' for {self.where}' if self.where else ''}"


Bubble = Formula[float]
"""Idle seconds of the rank that idles most."""

Kept = Formula[tuple[int, ...]]
"""Most stage activations that each rank keeps, each from its forward to its backward."""

DRAINED = Bubble("(p-1)(F+B)", lambda c: (c.p - 1) * (c.f + c.b))


def by_rank(text: str, value: Callable[[Case, int], int], where: str = "",
            holds: Callable[[Case], bool] = _always) -> Kept:  # fmt: skip
    """Return what each rank keeps, from a function of the case and the rank."""
    return Kept(text, lambda c: tuple(value(c, r) for r in range(c.p)), where, holds)
