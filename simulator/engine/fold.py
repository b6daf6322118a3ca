"""Folding: where all tiles along an axis are identical, one of them stands for all.

Tiles differ only in how long their ops take: streams, dependencies and joint ops are the same on
each. When no op takes longer on one coordinate of an axis than on another, renaming the
coordinates changes nothing, so all of them run alike and the members of a joint op along the axis
arrive together. The folded run is then equal to the whole one, to the tick.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simulator.program import Int64, Program


@dataclass(frozen=True, slots=True)
class Folding:
    """Tiles that are run, and the column of the run that each tile's times stand in."""

    tiles: Int64
    column_of_tile: Int64
    reason: str = ""
    """What was folded, in words; empty when nothing was."""

    @classmethod
    def none(cls, program: Program) -> Folding:
        """Return the folding that runs every tile."""
        every = np.arange(program.num_tiles)
        return cls(every, every)


def fold(program: Program, ticks: Int64) -> Folding:
    """Return the folding of a program whose ops take `ticks` (rows, tiles or 1)."""
    if program.tiling is None or not len(program.rank):
        return Folding.none(program)
    axes = program.tiling.axes
    index = np.arange(program.num_tiles).reshape([degree for _, degree in axes])
    wide = ticks.reshape(len(program.rank), -1)
    folded = []
    for axis, (name, degree) in enumerate(axes):
        if degree > 1 and _alike(wide, index, axis):
            index = np.repeat(index.take([0], axis), degree, axis)
            folded.append(f"{name} {degree} -> 1")
    flat = index.ravel()
    tiles, column = np.unique(flat, return_inverse=True)
    reason = f"folded {', '.join(folded)}: ranks identical" if folded else ""
    return Folding(tiles, column.reshape(-1), reason)


def _alike(ticks: Int64, index: Int64, axis: int) -> bool:
    """Return whether tiles that differ along one axis only take the same time for every op."""
    if ticks.shape[1] == 1:
        return True
    by_axis = ticks[:, np.moveaxis(index, axis, 0).reshape(index.shape[axis], -1)]
    return bool((by_axis == by_axis[:, :1]).all())
