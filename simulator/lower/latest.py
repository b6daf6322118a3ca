"""Remembering what was found of the scenario that was asked about last."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from simulator.describe.scenario import Scenario

T = TypeVar("T")


def for_latest(function: Callable[[Scenario], T]) -> Callable[[Scenario], T]:
    """Return a function of a scenario that is called once where one is asked about in a row.

    Scenarios are frozen, so that the same object has the same answer; hashing one takes longer.
    """
    latest: list[tuple[Scenario, T]] = []

    @wraps(function)
    def remembered(s: Scenario) -> T:
        for known, answer in latest:
            if known is s:
                return answer
        found = function(s)
        latest[:] = [(s, found)]
        return found

    return remembered
