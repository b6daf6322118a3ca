"""Work slowed by flows of fixed times: the ticks at which it and they agree.

What flows take of a rank's computing makes work there longer, which moves what follows, flows
too. The times are found by runs: in each, work takes what the flows of the run before leave it,
until nothing changes. What settles is the one timeline in which all work has, at every moment,
what the flows beside it leave: up to the first moment at which two such timelines differ, the same
flows have moved beside the same work, which has therefore got as far. For the same reason each
run is right for longer than the one before, and the runs come to an end. A shift of a whole rank
changes nothing between its flows and its work, so that they are few.
"""

from __future__ import annotations

import numpy as np

from simulator.budget import require
from simulator.engine import Folding, fold, run, run_side_by_side
from simulator.engine.compiled import Pass, classes_of_columns, ticks_of_columns, timeline_of
from simulator.errors import DescriptionError
from simulator.hardware.taken import MOST, WHOLE, Bool, Moving
from simulator.kernels.stretch import stretch
from simulator.program import NONE, Int64, Program
from simulator.timeline import Timeline

RUNS = 1000
"""Most runs after which times must have settled."""


def fold_slowed(program: Program, ticks: Int64, moves: Moving | None) -> Folding:
    """Return the folding of a program whose flows slow work: none where tiles feel it unlike."""
    folding = fold(program, ticks)
    if moves is not None:
        stands_for = folding.tiles[folding.column_of_tile]
        for one in (moves.latency, moves.share):
            if one.shape[1] > 1 and not np.array_equal(one, one[:, stands_for]):
                return Folding.none(program)
    return folding


def run_stretched(
    program: Program, ticks: Int64, moves: Moving | None, engine: str, folding: Folding
) -> Timeline:
    """Return the timeline of a run in which flows of fixed times slow the work beside them.

    Without such flows that is `engine.run`. See there and `stretched` for arguments and errors.
    """
    if moves is None:
        return run(program, ticks, engine, folding)
    is_folded = len(folding.tiles) < program.num_tiles
    least = folding if is_folded else fold_slowed(program, ticks, moves)
    slower, timeline = stretched(program, ticks, moves, least)
    if engine == "compiled" and len(least.tiles) == len(folding.tiles):
        return timeline
    wide = slower if slower.shape[1] == 1 else slower[:, least.column_of_tile]
    return run(program, wide, engine, folding)


def stretched(
    program: Program, ticks: Int64, moves: Moving, folding: Folding
) -> tuple[Int64, Timeline]:
    """Return the ticks of a run in which flows slow work, and its timeline.

    Args:
        program: what to run.
        ticks: what each op takes alone, (rows, tiles or 1) or by op id.
        moves: flows and the work beside them.
        folding: which tiles stand for the others.

    Returns:
        (rows, columns of the folding) ticks, and times.

    Raises:
        DescriptionError: when there is too little memory, or times do not settle.
        DeadlockError: when ops are left that can never start.
    """
    tiles, columns = folding.tiles, len(folding.tiles)
    size = 24 * len(program.rank) * columns
    require(size, f"running {len(program):,} ops", "let ranks fold, or simulate fewer steps")
    taken = ticks_of_columns(ticks.reshape(len(program.rank), -1), folding)
    taken = np.repeat(taken, columns // taken.shape[1], axis=1)
    base = taken[moves.works]
    latency, share = (
        np.ascontiguousarray(one if one.shape[1] == 1 else one[:, tiles])
        for one in (moves.latency, moves.share)
    )
    out, again = np.empty_like(base), _Again(program, folding, moves.works)
    start, end = again.run(taken, None)
    for _ in range(RUNS):
        stretch(
            out.size + 2 * len(moves.flows) * columns, moves.works, moves.work_offset, moves.flows,
            moves.flow_offset, latency, share, start, end, base, WHOLE, round(MOST * WHOLE), out,
        )  # fmt: skip
        changed = (out != taken[moves.works]).any(axis=1)
        if not changed.any():
            return taken, timeline_of(program, folding, start, end)
        taken[moves.works] = out
        start, end = again.run(taken, changed)
    raise DescriptionError(
        f"compute beside communication: times do not settle within {RUNS} runs; set "
        "run.overlap_slowdown = 0"
    )


class _Again:
    """Runs of a program in which some work takes other ticks each time."""

    def __init__(self, program: Program, folding: Folding, works: Int64) -> None:
        self.program, self.folding = program, folding
        queues = len(program.slot) and (program.slot != NONE).any()
        self.whole = None if queues else Pass(program, classes_of_columns(program, folding))
        if self.whole is not None:
            offset, rows = program.units
            unit = np.empty(len(program.rank), np.int64)
            unit[rows] = np.repeat(np.arange(len(offset) - 1), np.diff(offset))
            self.unit = unit[works]

    def run(self, ticks: Int64, changed: Bool | None) -> tuple[Int64, Int64]:
        """Return start and end (rows, columns) when some of the work has other ticks.

        What no work that changed comes before keeps its times; all are new when it is not said.
        """
        if self.whole is None:
            return run_side_by_side(self.program, ticks, self.folding, 1)
        self.whole.run(ticks, 0 if changed is None else int(self.unit[changed].min()))
        return self.whole.start, self.whole.end
