"""Moments in which ranks stand still: what hosts take from them at regular times.

Hoefler, Schneider and Lumsdaine (SC 2010) call one a detour: an operating system or a daemon holds
a process for a while, again and again, and work that was under way goes on where it stopped.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simulator.program import NONE, Int64, Program


@dataclass(frozen=True, eq=False)
class Pauses:
    """Every `period` ticks a rank's work stands still for `duration`; flows go on, and so does what
    hosts do beside steps.
    """

    period: int
    duration: int
    """Above 0 and below `period`."""
    phase: Int64
    """(ranks of a tile, tiles): tick from 0 to `period` - 1 at which a rank's first pause begins,
    or NONE for a rank without any. Before it lie earlier ones: a run begins in the midst."""

    def of_rows(self, program: Program) -> Int64:
        """Return the rank, within its tile, of each row that pauses; NONE of all others."""
        goes_on = program.is_flow | program.is_beside
        rows: Int64 = np.where(goes_on, NONE, program.rank).astype(np.int64)
        return rows


def as_arguments(
    pauses: Pauses | None, program: Program, columns: int
) -> tuple[Int64, Int64, int, int]:
    """Return pauses as kernels take them: the rank of each row, phases, period, duration."""
    if pauses is None:
        return np.full(len(program.rank), NONE, np.int64), np.zeros((0, columns), np.int64), 1, 0
    return pauses.of_rows(program), pauses.phase, pauses.period, pauses.duration
