"""How busy links are: bytes and utilisation over time, from when flows moved on the timeline."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from simulator.program import NONE, Int8, Int32, Int64, ranges
from simulator.report.text import table
from simulator.traffic import Traffic
from simulator.units import TICKS_PER_SECOND, format_bytes, format_rate

if TYPE_CHECKING:
    from simulator.report.result import Result

Float64 = npt.NDArray[np.float64]

BINS = 200
"""Pieces that the time of a step is cut into."""


@dataclass(frozen=True, eq=False)
class LinkUse:
    """Bytes on links within a window; a flow is taken to move evenly from its start to its end."""

    traffic: Traffic
    window: tuple[int, int]
    by_bin: Float64
    """(links, `BINS`): bytes on each link in each piece of the window."""

    @cached_property
    def bytes(self) -> Float64:
        """Bytes on each link in the whole window."""
        total: Float64 = self.by_bin.sum(axis=1)
        return total

    @cached_property
    def utilisation(self) -> Float64:
        """Share of each link's capacity that the whole window used."""
        return self._share(self.bytes, 1)

    @cached_property
    def peak(self) -> Float64:
        """Most of each link's capacity that a piece of the window used."""
        return self._share(self.by_bin.max(axis=1), BINS)

    def share_over_time(self, link: int) -> Float64:
        """Return the share of a link's capacity that each piece of the window used."""
        begin, end = self.window
        room = float(self.traffic.capacity[link]) * max(end - begin, 1) / TICKS_PER_SECOND / BINS
        return self.by_bin[link] / room if room > 0 else np.zeros(BINS)

    def _share(self, moved: Float64, pieces: int) -> Float64:
        """Return the share of a piece of the window's capacity; 0 of a failed link, without any."""
        begin, end = self.window
        room = self.traffic.capacity * (max(end - begin, 1) / TICKS_PER_SECOND / pieces)
        return np.divide(moved, room, out=np.zeros(len(room)), where=room > 0)

    def hottest(self, count: int) -> Int64:
        """Return the busiest links, busiest first."""
        order: Int64 = np.argsort(-self.utilisation, kind="stable")[:count]
        return order


def link_use(result: Result) -> LinkUse:
    """Return how busy links were during the last step.

    Raises:
        ValueError: for a result whose flows do not share links.
    """
    if result.moves is None:
        raise ValueError("flows share no links in this result: set run.network to 'fluid'")
    traffic, program, latency = result.moves.traffic, result.tiled, result.moves.latency
    start, end = result.times.columns
    members = program.joint_members
    rows = members.ranks[members.offset[:-1]]  # any member of a joint op tells its time
    joint, tile = np.nonzero(traffic.demand != NONE)
    at, column = rows[joint], _first_tile(program.classes, program.partition[joint], tile)
    entered = start[at, column] + latency[at, column]
    by_bin = _spread(traffic, traffic.demand[joint, tile], entered, end[at, column], result.window)
    return LinkUse(traffic, result.window, by_bin)


def _first_tile(classes: Int32, partition: Int8, number: Int64) -> Int64:
    """Return a tile of class `number` of a partition."""
    first = np.zeros(classes.shape, np.int64)
    for row, of_tile in enumerate(classes):
        present, tile = np.unique(of_tile, return_index=True)
        first[row, present] = tile
    tiles: Int64 = first[partition, number]
    return tiles


def _spread(
    traffic: Traffic, demand: Int32, begin: Int64, end: Int64, window: tuple[int, int]
) -> Float64:
    """Return (links, bins) bytes of flows that move evenly from `begin` to `end`."""
    low, high = window
    width = max(high - low, 1) / BINS
    count = np.diff(traffic.offset)[demand]
    entry = ranges(traffic.offset[demand], count)
    link = traffic.links[entry].astype(np.int64)
    rate = np.repeat(traffic.size[demand] / np.maximum(end - begin, 1), count)
    rate = rate * traffic.coefficient[entry]  # bytes a tick
    a, b = ((np.repeat(t, count).clip(low, high) - low) / width for t in (begin, end))
    # The bytes up to a moment grow linearly within a bin: differences of that at the bins' edges.
    whole = np.zeros((len(traffic.capacity), BINS + 1))
    for moment, sign in ((a, 1.0), (b, -1.0)):
        bin_index = np.minimum(moment.astype(np.int64), BINS - 1)
        part = (bin_index + 1 - moment) * width * rate * sign
        np.add.at(whole, (link, bin_index), part)
        np.add.at(whole, (link, bin_index + 1), width * rate * sign - part)
    spread: Float64 = np.cumsum(whole, axis=1)[:, :BINS]
    return spread


def links_text(use: LinkUse, count: int = 10) -> str:
    """Return the busiest links as a table."""
    header = ["link", "capacity", "bytes", "mean use", "peak use"]
    rows = [
        [
            use.traffic.names[link], format_rate(use.traffic.capacity[link], "B"),
            format_bytes(use.bytes[link]), f"{use.utilisation[link]:.1%}", f"{use.peak[link]:.1%}",
        ]
        for link in use.hottest(count).tolist()
    ]  # fmt: skip
    return table([header, *rows])


def links_dict(use: LinkUse, count: int = 100) -> list[dict[str, float | str]]:
    """Return the busiest links as plain values."""
    return [
        {
            "name": use.traffic.names[link],
            "capacity_bytes_per_s": float(use.traffic.capacity[link]),
            "bytes": float(use.bytes[link]),
            "utilisation": float(use.utilisation[link]),
            "peak_utilisation": float(use.peak[link]),
        }
        for link in use.hottest(count).tolist()
    ]
