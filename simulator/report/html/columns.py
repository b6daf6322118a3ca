"""Columns of numbers as compact text inside a page: bytes in planes, deflated, in base64.

A plane holds one byte of every number, so that alike bytes lie side by side and deflate well.
Browsers undo it with `atob` and `DecompressionStream`; `assets/columns.js` is the other half.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.errors import DescriptionError

Column = npt.NDArray[Any]

LARGEST = 2**53
"""Whole numbers from here on are not exact in a browser."""


class Packed(NamedTuple):
    """Columns as a page holds them."""

    head: list[dict[str, Any]]
    """Of each column its name, its length, bytes a number, what 0 stands for, and its kind."""
    text: str
    """Planes of all columns, one after the other, deflated, in base64."""


def packed(columns: Mapping[str, Column]) -> Packed:
    """Return columns of whole numbers (exact) and of real ones (as 32-bit floats).

    Raises:
        DescriptionError: when a whole number is too large for a browser.
    """
    head, planes = [], []
    for name, values in columns.items():
        kind = "real" if values.dtype.kind == "f" else "int"
        base, width = 0, 4
        flat = np.ascontiguousarray(values).reshape(-1)
        if kind == "int":
            low, high = (int(flat.min()), int(flat.max())) if len(flat) else (0, 0)
            if (most := max(-low, high, high - low)) >= LARGEST:
                raise DescriptionError(
                    f"a page cannot show {name} of {most:,}: browsers count exactly up to "
                    f"{LARGEST:,} picoseconds, 2.5 hours"
                )
            base, width = low, max(1, (int(high - low).bit_length() + 7) // 8)
            codes = (flat.astype(np.int64) - low).astype("<u8").view(np.uint8).reshape(-1, 8)
        else:
            codes = flat.astype("<f4").view(np.uint8).reshape(-1, 4)
        planes.append(np.ascontiguousarray(codes[:, :width].T).tobytes())
        head.append({"name": name, "length": len(flat), "width": width, "base": base, "kind": kind})
    data = zlib.compress(b"".join(planes), 9)
    return Packed(head, base64.b64encode(data).decode("ascii"))
