"""Engines: from a Program and its ticks to a Timeline."""

from __future__ import annotations

from importlib import import_module

from simulator.program import Int64, Program
from simulator.timeline import Timeline

__all__ = ["ENGINES", "run"]

ENGINES = ("reference",)
"""Engines by name, each a module with a `run`; all give the same ticks."""


def run(program: Program, ticks: Int64, engine: str = "reference") -> Timeline:
    """Return when every op started and ended; the engine's libraries load at first use."""
    timeline: Timeline = import_module(f"simulator.engine.{engine}").run(program, ticks)
    return timeline
