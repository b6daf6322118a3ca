"""Memory and links over time as columns for a page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from simulator.program import Int64
from simulator.report import palette
from simulator.report.html.ops import Columns
from simulator.report.memory_plot import MEMORY_PARTS, memory_parts
from simulator.report.network_plots import link_shares
from simulator.units import format_bytes, format_rate

if TYPE_CHECKING:
    from simulator.report.result import Result

MOST_SAMPLES = 2000
"""Moments that memory of a rank is shown at."""

MOST_LINKS = 40
"""Rows of links that a page shows, the busiest; links that are used alike share one."""


def memory_of(result: Result) -> tuple[list[dict[str, Any]], Columns]:
    """Return ranks whose memory a page shows, the fullest first, and their bytes over time."""
    ranks = palette.sample(result.stage_ranks).tolist()
    if result.scenario is not None:
        fullest = result.summary.peak_memory_rank
        ranks = [fullest, *(rank for rank in ranks if rank != fullest)]
    shown: list[dict[str, Any]] = []
    columns: Columns = {}
    for rank in ranks:
        ticks, parts = memory_parts(result, rank)
        if not parts:
            continue
        number = len(shown)
        kept = moments(ticks, sum(parts.values(), np.zeros(len(ticks))))
        columns[f"memory{number}"] = ticks[kept]
        for name, held in parts.items():
            columns[f"memory{number}.{name}"] = np.rint(held[kept]).astype(np.int64)
        peak = float(result.device_memory_bytes[rank])
        shown.append(
            {
                "rank": rank,
                "name": palette.rank_label(result, rank),
                "parts": [name for name in MEMORY_PARTS if name in parts],
                "peak": format_bytes(peak) if result.scenario else f"{peak:.0f}",
                "all": len(kept) == len(ticks),
            }
        )
    return shown, columns


def moments(ticks: Int64, held: np.ndarray[Any, Any]) -> Int64:
    """Return which moments to show: all of few, else of each of equal pieces when it holds most.

    The first and the last are always among them.
    """
    if len(ticks) <= MOST_SAMPLES:
        return np.arange(len(ticks))
    piece = (ticks - ticks[0]) * (MOST_SAMPLES - 2) // max(int(ticks[-1] - ticks[0]) + 1, 1)
    order = np.lexsort((-held, piece))
    first = np.flatnonzero(np.append(True, np.diff(piece[order]) > 0))
    return np.unique(np.concatenate([[0, len(ticks) - 1], order[first]]))


def links_of(result: Result) -> tuple[dict[str, Any] | None, Columns]:
    """Return the busiest links and their use over time; nothing where flows share no links."""
    if result.moves is None:
        return None, {}
    use = result.links
    busy = np.flatnonzero(use.bytes >= 1)
    share = np.rint(2 * link_shares(use)[busy]).clip(0, 255).astype(np.uint8)  # of 200
    distinct, first, count = np.unique(share, axis=0, return_index=True, return_counts=True)
    order = np.argsort(-use.utilisation[busy[first]], kind="stable")[:MOST_LINKS]
    rows = busy[first[order]]
    alike = [f" +{n - 1} alike" if n > 1 else "" for n in count[order].tolist()]
    names = [use.traffic.names[link] for link in rows.tolist()]
    shown = f"{len(rows)} busiest" if len(rows) < len(distinct) else "All"
    about = {
        "names": [f"{name}{more}" for name, more in zip(names, alike, strict=True)],
        "capacity": [format_rate(c, "B") for c in use.traffic.capacity[rows].tolist()],
        "bytes": [format_bytes(b) for b in use.bytes[rows].tolist()],
        "mean": use.utilisation[rows].tolist(),
        "peak": use.peak[rows].tolist(),
        "bins": use.by_bin.shape[1],
        "note": f"{shown} of {len(busy):,} links in use, {len(use.traffic.names):,} in all; links "
        f"used alike share a row. The step is cut into {use.by_bin.shape[1]} pieces.",
    }
    return about, {"links": distinct[order]}
