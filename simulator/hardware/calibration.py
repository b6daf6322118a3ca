"""Kernels priced from a table that was measured: between its sizes, never beyond them."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.describe.calibration import Timed, same_device
from simulator.describe.cluster import Device
from simulator.program import PRODUCTS, Kernel


class Found(NamedTuple):
    """What a table says of a kernel."""

    seconds: float | None
    """None where it says nothing."""
    why: str
    """Of the table's kind of kernel, or why it says nothing."""


def measured(kernel: Kernel, device: Device) -> Found:
    """Return the measured seconds of a kernel, with the gap to the next one.

    Logarithms of times are interpolated linearly over logarithms of sizes, so that a power of a
    size between two points is exact.
    """
    table = device.calibration
    if table is None:
        return Found(None, "there is no table")
    if not same_device(table.device, device.name):
        return Found(None, f"the table is of {table.device}")
    names = _names(kernel)
    mine = [t for t in table.kernels if t.kernel in names]
    if not mine:
        return Found(None, "not measured")
    longest = max(len(t.kernel) for t in mine)
    mine = [t for t in mine if len(t.kernel) == longest]
    same = [t for t in mine if t.dtype in ("", kernel.dtype)]
    if not same:
        measured_in = ", ".join(sorted({t.dtype for t in mine}))
        return Found(None, f"measured in {measured_in}, not in {kernel.dtype}")
    sizes, times = _sizes(kernel)
    out = Found(None, "")
    for timed in same:
        out = _interpolated(timed, sizes, times)
        if out.seconds is not None:
            break
    return out


def _names(kernel: Kernel) -> set[str]:
    """Return what a kernel may stand under in a table: its name's last words, one or more."""
    if kernel.matmul is not None:
        return {"product" if kernel.algorithm in PRODUCTS else kernel.algorithm}
    words = kernel.name.split(" ")
    return {" ".join(words[i:]) for i in range(len(words))}


def _sizes(kernel: Kernel) -> tuple[dict[str, float], int]:
    """Return the sizes of a kernel by axis, and how many times that it is done."""
    if kernel.matmul is None:
        return {"bytes": kernel.bytes}, 1
    batch, m, n, k = kernel.matmul
    if kernel.algorithm in PRODUCTS:
        return {"m": m, "n": n, "k": k}, batch
    return {"batch": batch, "rows": m, "columns": n, "dim": k}, 1


def _interpolated(timed: Timed, sizes: dict[str, float], times: int) -> Found:
    names = [axis.name for axis in timed.axes]
    if "columns" in sizes and "columns" not in names:  # of attention, square
        if sizes["columns"] != sizes["rows"]:
            return Found(None, f"{sizes['columns']:g} columns beside {sizes['rows']:g} rows")
        sizes = {name: size for name, size in sizes.items() if name != "columns"}
    if set(names) != set(sizes):
        return Found(None, f"measured over {', '.join(names)}")
    for axis in timed.axes:
        size, low, high = sizes[axis.name], axis.at[0], axis.at[-1]
        if not low <= size <= high:
            return Found(None, f"{axis.name} {size:,.0f} is outside {low:,.0f} to {high:,.0f}")
    grid, logs = _grid(timed)
    at = [
        float(np.interp(np.log(sizes[name]), points, np.arange(len(points))))
        for name, points in zip(names, grid, strict=True)
    ]
    total = 0.0
    for corner in product((0, 1), repeat=len(names)):
        steps = list(zip(at, corner, strict=True))
        weight = math.prod(x % 1 if step else 1 - x % 1 for x, step in steps)
        if weight:
            total += weight * float(logs[tuple(int(x) + step for x, step in steps)])
    return Found(times * float(np.exp(total)), timed.kernel)


@lru_cache(maxsize=256)
def _grid(timed: Timed) -> tuple[list[npt.NDArray[np.float64]], npt.NDArray[np.float64]]:
    """Return the logarithms of the sizes along each axis, and of the times on them."""
    at = [np.log(np.array(axis.at)) for axis in timed.axes]
    return at, np.log(np.array(timed.seconds)).reshape([len(x) for x in at])
