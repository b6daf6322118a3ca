"""Seconds of a matrix product from its shape: tiles, waves, depth, alignment.

A library computes m x n results tile by tile, one tile a compute unit (SM) at a time: tiles come in
waves, the last of which may be almost empty (NVIDIA, Matrix Multiplication Background User's Guide,
sections 3.1 and 3.2). A tile's main loop runs over k; then its results are written, partly beside
the loops of others. Small tiles waste less of the edges and of
the last wave, but load more bytes a product, so they run below the rate of large ones. Where tiles
are fewer than units, k is split over several of them and partial results are added. The library's
heuristics find about the best of these, so the least time counts.
"""

from __future__ import annotations

import math
from functools import lru_cache

TILES = {
    (256, 128): 1.0,
    (128, 256): 1.0,
    (128, 128): 0.93,
    (128, 64): 0.78,
    (64, 128): 0.78,
    (64, 64): 0.6,
}
"""Rows and columns of a tile, and the share of a unit's best rate at which its main loop runs.

ASSUMED: NVIDIA's guide, section 2.3, orders them so (larger tiles run more efficiently) without a
table of numbers.
"""

EXPOSED = 0.6
"""Share of the time of writing a tile's results (and reading what they are added to) that no main
loop hides, where units share the memory bandwidth evenly.

Fitted on the fit half of `topologies/measured/kernels.csv`: products and grouped products whose
results are 2, 4 and 8 bytes each, on A100 and B200; nothing is left for filling a loop's pipeline.
"""

SPLITS = (1, 2, 4, 8, 16)
"""Parts that k is divided into."""

ALIGNED, MISALIGNED = 16, 0.5
"""Bytes to which rows must align for loads of full width, and the share of the rate left otherwise.

NVIDIA's guide, section 2.2: products run best where dimensions are multiples of 16 bytes; about
half the rate is left where they are not.
"""


@lru_cache(maxsize=65536)
def gemm_slots(shape: tuple[int, int, int, int], units: int, written: float = 0.0) -> float:
    """Return how long a batched product takes, in multiply-adds of one unit at its best rate.

    Args:
        shape: (batch, m, n, k).
        units: compute units of the device.
        written: what a tile's results cost, as much more of k.
    """
    batch, m, n, k = shape
    best = math.inf
    for (rows, columns), rate in TILES.items():
        tiles = batch * math.ceil(m / rows) * math.ceil(n / columns)
        for parts in SPLITS:
            if parts > 1 and (tiles * parts > 2 * units or k < 256 * parts):
                break
            waves = math.ceil(tiles * parts / units)
            best = min(best, waves * rows * columns * (k / parts + written) / rate)
    return best


def written(moved: float, rate: float, bandwidth: float) -> float:
    """Return how much more of k writing a tile's results costs.

    Args:
        moved: bytes of one result, read and written.
        rate: FLOP/s of all units.
        bandwidth: bytes/s that they share.
    """
    return EXPOSED * moved * rate / (2 * bandwidth)


def alignment(shape: tuple[int, int, int, int], element: int, *, wgrad: bool = False) -> float:
    """Return the share of the rate that is left by how the rows of a product lie in memory.

    Args:
        shape: (batch, m, n, k).
        element: bytes of one element.
        wgrad: whether it is the gradient of a weight, whose operands' rows are m and n long; else
            they are n and k.
    """
    rows = shape[1:3] if wgrad else shape[2:]
    return 1.0 if all(d * element % ALIGNED == 0 for d in rows) else MISALIGNED
