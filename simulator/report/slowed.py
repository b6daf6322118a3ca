"""How much longer work takes because of flows beside it."""

from __future__ import annotations

import numpy as np

from simulator.program import Int64, Program
from simulator.timeline import Timeline
from simulator.units import TICKS_PER_SECOND


def slowed_seconds(program: Program, ticks: Int64, timeline: Timeline) -> float:
    """Return the seconds by which the work of the last step takes longer, mean over ranks.

    Args:
        program: what has run.
        ticks: what its ops take alone, (rows, tiles or 1) or by op id.
        timeline: its times.
    """
    start, end = timeline.columns
    work = ~program.is_flow & (program.stream == program.streams.index("compute"))
    rows = np.flatnonzero(work & (program.step == program.step.max(initial=0)))
    alone = ticks.reshape(len(program.rank), -1)
    if alone.shape[1] > 1 and timeline.column_of_tile is not None:
        alone = alone[:, np.unique(timeline.column_of_tile, return_index=True)[1]]
    longer = (end[rows] - start[rows] - alone[rows]).sum(axis=0)
    tiles = np.ones(1, np.int64)
    if timeline.column_of_tile is not None:
        tiles = np.bincount(timeline.column_of_tile, minlength=len(longer))
    return float(longer @ tiles) / program.num_ranks / TICKS_PER_SECOND
