"""Ops summed over pieces of time, for ranks that a page does not show op by op."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from simulator.program import Int64

Float64 = npt.NDArray[np.float64]

BINS = 512
"""Pieces that the time of a run is cut into."""


def density(kind: Int64, kinds: int, start: Int64, end: Int64, until: int) -> Float64:
    """Return (kinds, `BINS`): the share of each piece of the time from 0 that ops of a kind take.

    Ops of one kind that run side by side add up, above 1 where they fill a piece more than once.

    Args:
        kind: of each op.
        kinds: how many there are.
        start: tick of each op's start.
        end: tick of its end.
        until: last tick of the run.
    """
    width, row = max(until, 1) / BINS, kind * (BINS + 1)
    filled = np.zeros(kinds * (BINS + 1))
    for moments, sign in ((start, 1.0), (end, -1.0)):
        at = moments / width
        first = np.minimum(at.astype(np.int64), BINS - 1)
        # An op fills what is left of the piece in which it starts, and all pieces after that.
        part = first + 1 - at
        for where, weight in ((row + first, part), (row + first + 1, 1.0 - part)):
            filled += sign * np.bincount(where, weights=weight, minlength=len(filled))
    return np.cumsum(filled.reshape(kinds, BINS + 1), axis=1)[:, :BINS]
