"""Engines: from a Program and its ticks to a Timeline."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

import numpy as np

from simulator.budget import require
from simulator.engine import compiled
from simulator.engine.compiled import run_side_by_side
from simulator.engine.fold import Folding, fold
from simulator.errors import DescriptionError, ProgramError, suggestion
from simulator.pauses import Pauses
from simulator.program import Int64, Program
from simulator.timeline import Timeline
from simulator.traffic import Traffic

__all__ = ["ENGINES", "Folding", "fold", "run", "run_many", "run_side_by_side"]

ENGINES = ("compiled", "events", "reference")
"""Engines by name, each a module with a `run`; all give the same ticks.

`compiled` takes one pass where that is exact and events elsewhere; `events` always takes events;
`reference` is SimPy, the definition.
"""


def run(
    program: Program,
    ticks: Int64,
    engine: str = "compiled",
    folding: Folding | None = None,
    traffic: Traffic | None = None,
    pauses: Pauses | None = None,
) -> Timeline:
    """Return when every op started and ended; an engine's libraries load at first use.

    Args:
        program: what to run.
        ticks: how long each op holds, by op id, or for a tiled program (rows, tiles or 1).
        engine: one of `ENGINES`.
        folding: which tiles stand for the others; all tiles run when absent.
        traffic: what flows put on links that they share; ticks are then how long a flow takes
            before it enters them. Without it flows take fixed times.
        pauses: when ranks stand still; with it nothing is folded.

    Raises:
        DescriptionError: when there is no such engine, or too little memory.
        DeadlockError: when ops are left that can never start.
        ProgramError: when the ticks do not belong to the program.
    """
    if engine not in ENGINES:
        known = ", ".join(ENGINES)
        raise DescriptionError(
            f"engine {engine!r} is not one of {known}{suggestion(engine, ENGINES)}"
        )
    wide = ticks.reshape(len(program.rank), -1) if len(ticks) else np.zeros((0, 1), np.int64)
    if wide.shape[1] not in (1, program.num_tiles) or (wide < 0).any():
        raise ProgramError(f"{ticks.shape} ticks do not fit {len(program)} ops, or are negative")
    if traffic is not None and folding is not None and len(folding.tiles) < program.num_tiles:
        raise ProgramError(
            "flows that share links cannot be folded: they meet those of other tiles"
        )
    if pauses is not None and pauses.phase.shape != program.tile_ranks.shape:
        raise ProgramError(f"pauses of {pauses.phase.shape} ranks do not fit the program")
    if pauses is not None and folding is not None and len(folding.tiles) < program.num_tiles:
        raise ProgramError("ranks that stand still at times of their own cannot be folded")
    joints = len(program.joint_group)
    if traffic is not None and len(traffic.demand) not in (0, joints):
        raise ProgramError(f"traffic of {len(traffic.demand)} joint ops does not fit the program")
    chosen = folding or Folding.none(program)
    size = 16 * len(program.rank) * len(chosen.tiles)
    require(size, f"running {len(program):,} ops", "let ranks fold, or simulate fewer steps")
    module = import_module(f"simulator.engine.{engine}")
    timeline: Timeline = module.run(program, wide, chosen, traffic, pauses)
    return timeline


SAMPLE_CELLS = 20_000_000
"""Ops of all samples that run side by side (each holds 24 bytes)."""


def run_many(program: Program, ticks: Int64) -> Iterator[Timeline]:
    """Yield the timeline of each of several sets of durations, in order, without rebuilding.

    Args:
        program: what to run.
        ticks: (sets, ops), or (sets, rows, tiles or 1) for a tiled program; where a set has one
            column, all tiles take the same, and one of them stands for all.

    Raises:
        DeadlockError: when ops are left that can never start.
        ProgramError: when the ticks do not belong to the program.
    """
    rows = len(program.rank)
    fits = ticks.ndim >= 2 and ticks[:1].size in (rows, rows * program.num_tiles)
    if not fits or (ticks < 0).any():
        raise ProgramError(f"{ticks.shape} ticks do not fit sets of {len(program)} ops, or are < 0")
    wide = ticks.reshape(len(ticks), rows, -1)
    one = Folding(np.zeros(1, np.int64), np.zeros(program.num_tiles, np.int64))
    folding = one if wide.shape[2] == 1 else Folding.none(program)
    columns = len(folding.tiles)
    batch = max(1, SAMPLE_CELLS // max(1, rows * columns))
    for first in range(0, len(wide), batch):
        some = wide[first : first + batch]
        side_by_side = np.ascontiguousarray(some.transpose(1, 0, 2).reshape(rows, -1))
        times = compiled.run_sets(program, side_by_side, folding, len(some))
        for start, end in times:
            yield compiled.timeline_of(program, folding, start, end)
