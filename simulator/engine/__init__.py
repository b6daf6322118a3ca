"""Engines: from a Program and its ticks to a Timeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from simulator.engine import reference
from simulator.program import Int64, Program
from simulator.timeline import Timeline

__all__ = ["ENGINES", "run"]

ENGINES: Mapping[str, Callable[[Program, Int64], Timeline]] = {"reference": reference.run}
"""Engines by name; all give the same ticks."""


def run(program: Program, ticks: Int64, engine: str = "reference") -> Timeline:
    """Return when every op started and ended."""
    return ENGINES[engine](program, ticks)
