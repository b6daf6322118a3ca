"""What lies in the memory of hosts: offloaded state, batches on their way, caches, checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from simulator.describe.data import sample_of
from simulator.describe.scenario import Scenario
from simulator.hardware.placement import devices
from simulator.lower.memory import rank_memory
from simulator.lower.restore import held_state
from simulator.lower.save import parts_of
from simulator.program import STORED, Int64, Program
from simulator.report.offload import activations_on_host, offloads
from simulator.units import format_bytes

if TYPE_CHECKING:
    from simulator.report.result import Result

Float64 = npt.NDArray[np.float64]

PARTS = ("optimizer", "activations", "batches", "page cache", "checkpoint")


def host_memory(result: Result, s: Scenario) -> dict[str, float]:
    """Return bytes on the host of the fullest node by part; empty where nothing is known of any.

    That is the sum over its ranks of what each has there when it has most, whenever that is.
    """
    uses = offloads(s.plan) or s.data is not None or s.checkpoint is not None
    if not uses or s.cluster.is_mixed:
        return {}
    p = result.tiled
    held = np.zeros((len(PARTS), p.num_ranks))
    for at, ranks in enumerate(p.tile_ranks):
        if offloads(s.plan):
            held[0, ranks] = rank_memory(s)[at].host
            held[1, ranks] = activations_on_host(result, at)
        if s.data is not None:
            held[2, ranks] = _batches(result, s, at)
        if s.checkpoint is not None:
            held[4, ranks] = _checkpoint(result, s, at)
    node = devices(s.plan, s.cluster) // s.cluster.ranks_per_node
    by_node = np.array([np.bincount(node, weights=part) for part in held])
    if s.data is not None and s.data.page_cache is not None:
        by_node[PARTS.index("page cache")] = s.data.page_cache
    fullest = by_node[:, int(np.argmax(by_node.sum(axis=0)))]
    return {name: size for name, size in zip(PARTS, fullest.tolist(), strict=True) if size}


def most_at_once(result: Result, held: list[tuple[Int64, Int64, Float64 | float]]) -> Float64:
    """Return the most bytes that are held at once, by tile.

    Args:
        result: of a run.
        held: (first rows, last rows, bytes): from the start of the first to the end of the last.
    """
    start, end = result.times.columns
    column = result.times.column_of_tile
    time = np.concatenate([x for first, last, _ in held for x in (end[last], start[first])])
    delta = np.concatenate([
        np.full(len(rows), sign * size)
        for first, last, size in held for rows, sign in ((last, -1), (first, 1))
    ])  # fmt: skip
    order = np.lexsort((np.broadcast_to(delta[:, None], time.shape), time), axis=0)
    most = np.cumsum(delta[order], axis=0).max(axis=0, initial=0.0)  # what leaves goes first
    by_tile: Float64 = most if column is None else most[column]
    return by_tile


def _batches(result: Result, s: Scenario, at: int) -> Float64:
    """Return the most bytes of batches on the host of a rank of the tile, by tile.

    A batch is there as it lies on storage from its read to its transform's end, as it goes to the
    device from its transform on, and a second time, pinned, from the copy to there.
    """
    p, data, count = result.tiled, s.data, s.plan.microbatch_size
    assert data is not None
    sample = sample_of(s)
    names = np.array(["read" if c.name in STORED else c.name for c in p.costs])[p.cost]
    lanes = np.array([n.split(" ")[0] in ("worker", "storage", "pin", "copy") for n in p.streams])
    mine = (p.rank == at) & np.append(lanes, False)[p.stream]
    read, transform, pin, copy = (
        np.flatnonzero(mine & (names == n)) for n in ("read", "transform", "pin", "copy")
    )
    if not len(read):
        return np.zeros(p.num_tiles)
    ready = count * sample.device_bytes
    moved = slice(len(copy))  # those beyond the last step's are not copied
    held: list[tuple[Int64, Int64, Float64 | float]] = [
        (read, transform, count * sample.bytes),
        (transform[moved], (pin if data.pinned else copy)[moved], ready),
    ]
    if data.pinned:
        held.append((pin[moved], copy, ready))
    return most_at_once(result, held)


def _checkpoint(result: Result, s: Scenario, at: int) -> Float64:
    """Return the most bytes of checkpoints on the host of a rank of the tile, by tile."""
    p, save = result.tiled, s.checkpoint
    assert save is not None
    held: list[tuple[Int64, Int64, Float64 | float]] = [
        (_rows(p, at, "snapshot"), _rows(p, at, "write"), parts_of(s)[at].bytes)
    ]
    if save.restore:
        rows = np.flatnonzero((p.rank == at) & (p.stream == p.streams.index("restore")))
        held.append((rows[:1], rows[1:], held_state(s)[at].bytes))
    most = most_at_once(result, held)
    if not save.sharded:  # the first replica has it all
        most[s.plan.tp :] = 0.0
    return most


def _rows(p: Program, at: int, name: str) -> Int64:
    named = np.array([cost.name == name for cost in p.costs])[p.cost]
    mine = (p.rank == at) & (p.stream == p.streams.index(name)) & named
    found: Any = np.flatnonzero(mine)
    return found  # type: ignore[no-any-return]


def host_lines(result: Result, s: Scenario) -> list[str]:
    """Return the line of the report that says what lies on hosts, if anything does."""
    summary, parts = result.summary, host_memory(result, s)
    if not parts:
        return []
    what = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
    verdict = "fits" if summary.fits_host else "DOES NOT FIT"
    return [
        f"  host        {format_bytes(summary.host_memory_bytes)} of "
        f"{format_bytes(summary.host_capacity_bytes)} on the fullest node: {verdict} ({what})"
    ]


def host_notes(result: Result) -> tuple[str, ...]:
    """Return a hint where batches are what makes a host too small."""
    s = result.scenario
    if s is None or s.data is None or result.summary.fits_host:
        return ()
    batches = host_memory(result, s).get("batches", 0.0)
    return (
        f"batches take {format_bytes(batches)} of the fullest host: fewer data.workers, or a "
        f"data.prefetch_factor below {s.data.prefetch_factor}, hold less",
    )


def host_assumptions(s: Scenario) -> list[str]:
    """Return what was assumed of the memory of hosts beside what is offloaded."""
    if s.cluster.is_mixed or (s.data is None and s.checkpoint is None):
        return []
    what = [
        *["batches from their read until they are on the device, twice where pinned"]
        * (s.data is not None),
        *["a checkpoint from its snapshot until it is written"] * (s.checkpoint is not None),
    ]
    return [
        f"hosts hold {' and '.join(what)}; each rank's most, added up; the workers' own processes, "
        "the operating system and its buffers take none"
    ]
