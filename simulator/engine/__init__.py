"""Engines: from a Program and its ticks to a Timeline."""

from __future__ import annotations

from importlib import import_module

import numpy as np

from simulator.engine.fold import Folding, fold
from simulator.errors import ProgramError
from simulator.program import Int64, Program
from simulator.timeline import Timeline

__all__ = ["ENGINES", "Folding", "fold", "run"]

ENGINES = ("compiled", "events", "reference")
"""Engines by name, each a module with a `run`; all give the same ticks.

`compiled` takes one pass where that is exact and events elsewhere; `events` always takes events;
`reference` is SimPy, the definition.
"""


def run(
    program: Program, ticks: Int64, engine: str = "compiled", folding: Folding | None = None
) -> Timeline:
    """Return when every op started and ended; an engine's libraries load at first use.

    Args:
        program: what to run.
        ticks: how long each op holds, by op id, or for a tiled program (rows, tiles or 1).
        engine: one of `ENGINES`.
        folding: which tiles stand for the others; all tiles run when absent.

    Raises:
        DeadlockError: when ops are left that can never start.
        ProgramError: when the ticks do not belong to the program.
    """
    wide = ticks.reshape(len(program.rank), -1) if len(ticks) else np.zeros((0, 1), np.int64)
    if wide.shape[1] not in (1, program.num_tiles) or (wide < 0).any():
        raise ProgramError(f"{ticks.shape} ticks do not fit {len(program)} ops, or are negative")
    chosen = folding or Folding.none(program)
    module = import_module(f"simulator.engine.{engine}")
    timeline: Timeline = module.run(program, wide, chosen)
    return timeline
