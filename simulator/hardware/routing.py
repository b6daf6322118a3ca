"""Shortest routes over links, for many pairs at once, with equal routes chosen by a number.

A router searches breadth-first from each destination it meets, once; then all pairs walk towards
their destinations hop by hop. Where several links lead on, a pair takes the one that the lowest
digit of its number names (in base the number of those links), and the rest of the number decides
the hops that follow. So number 0 is always the first route, the destination's number is
destination-modulo-k routing, and a hash is ECMP.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.hardware.wiring import Ints

Hash = npt.NDArray[np.uint64]
FAR = np.iinfo(np.int16).max
"""Distance of what cannot be reached."""
MAX_ENTRIES = 2**26
"""Numbers that the tables of a router hold at a time, about."""


class Table(NamedTuple):
    """How to get to one destination from everywhere, by a router's own numbers."""

    hops: npt.NDArray[np.int16]
    """Links to the destination from each vertex, `FAR` where there is no way."""
    first: Ints
    """Where the links that lead on from each vertex begin in `onward`; one more at the end."""
    onward: Ints


class Paths(NamedTuple):
    """Links of many routes: those of route i are `links[start[i]:start[i] + length[i]]`."""

    length: Ints
    links: Ints

    @property
    def start(self) -> Ints:
        """Where each route begins in `links`."""
        start: Ints = np.cumsum(self.length) - self.length
        return start

    def take(self, rows: Ints) -> Paths:
        """Return the routes of these rows, in their order."""
        length = self.length[rows]
        return Paths(length, self.links[ragged(self.start[rows], length)])


def ragged(start: Ints, count: Ints) -> Ints:
    """Return `start[0], start[0] + 1, ...`, count[0] numbers, then those of the next row."""
    begin = np.cumsum(count) - count
    places: Ints = np.arange(int(count.sum())) + np.repeat(start - begin, count)
    return places


def end_to_end(pieces: list[Paths]) -> Paths:
    """Return the routes that go through all pieces, one after the other, row by row."""
    count: Ints = np.stack([piece.length for piece in pieces]).sum(axis=0)
    links = np.empty(int(count.sum()), np.int64)
    place = np.cumsum(count) - count
    for piece in pieces:
        links[ragged(place, piece.length)] = piece.links
        place = place + piece.length
    return Paths(count, links)


def mixed(*keys: Ints) -> Hash:
    """Return a hash of columns of whole numbers, the same in every process (splitmix64).

    Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014.
    """
    h = np.zeros(1, np.uint64)
    for key in keys:
        h = h + np.atleast_1d(key).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        h = h ^ (h >> np.uint64(31))
    return h


class Router:
    """Shortest routes, in hops, over some links."""

    def __init__(self, tail: Ints, head: Ints, links: Ints, stubs: Ints | None = None) -> None:
        """Take `links` of the columns `tail` and `head`; no route passes through a vertex of
        `stubs`, which it may start or end at.
        """
        self.vertices, ends = np.unique(
            np.concatenate([tail[links], head[links]]), return_inverse=True
        )
        tails, heads = np.split(ends.reshape(-1), 2)
        order = np.lexsort((heads, tails))  # ties go to the lowest vertex
        self.links, self.tail, self.head = links[order], tails[order], heads[order]
        size = len(self.vertices)
        self.first = np.searchsorted(self.tail, np.arange(size + 1))
        back = np.argsort(self.head, kind="stable")
        self.back_tail = self.tail[back]
        self.back_first = np.searchsorted(self.head[back], np.arange(size + 1))
        self.stub = np.isin(self.vertices, [] if stubs is None else stubs)
        self.tables: dict[int, Table] = {}
        """Tables of the destinations that were searched from."""
        self.searches = 0
        """Searches made so far."""

    def number(self, vertices: Ints) -> Ints:
        """Return the router's own numbers of vertices, -1 for those without links."""
        if not len(self.vertices):
            return np.full(len(vertices), -1)
        at = np.minimum(np.searchsorted(self.vertices, vertices), len(self.vertices) - 1)
        return np.where(self.vertices[at] == vertices, at, -1)

    def distance(self, target: int) -> npt.NDArray[np.int16]:
        """Return the hops from every vertex to one, by the router's own numbers."""
        self.searches += 1
        hops = np.full(len(self.vertices), FAR, np.int16)
        hops[target] = step = 0
        front = np.array([target])
        while front.size:
            step += 1
            count = self.back_first[front + 1] - self.back_first[front]
            near = self.back_tail[ragged(self.back_first[front], count)]
            hops[near[hops[near] == FAR]] = step
            front = np.flatnonzero((hops == step) & ~self.stub)
        return hops

    def table(self, target: int) -> Table:
        """Return the table of a destination, from memory where it has been searched from."""
        if target not in self.tables:
            if len(self.tables) * len(self.tail) > MAX_ENTRIES:
                self.tables.clear()
            hops = self.distance(target)
            through = hops.copy()
            through[self.stub] = FAR
            through[target] = 0
            shorter = through[self.head] == np.repeat(hops - np.int16(1), np.diff(self.first))
            onward = np.flatnonzero(shorter)
            first = np.searchsorted(self.tail[onward], np.arange(len(self.vertices) + 1))
            self.tables[target] = Table(hops, first, onward)
        return self.tables[target]

    def paths(self, source: Ints, target: Ints, pick: Hash) -> tuple[Paths, Ints]:
        """Return the routes of pairs of vertices, and which pairs have none."""
        a, b = self.number(source), self.number(target)
        lost = (source != target) & ((a < 0) | (b < 0))
        walking = np.flatnonzero((source != target) & ~lost)
        walking = walking[np.argsort(b[walking], kind="stable")]
        targets, begin = np.unique(b[walking], return_index=True)
        groups = np.split(walking, begin[1:]) if len(targets) else []
        count = np.zeros(len(source), np.int64)
        for target_, rows in zip(targets.tolist(), groups, strict=True):
            count[rows] = self.table(target_).hops[a[rows]]
        lost |= count == FAR
        count[lost] = 0
        start, links = np.cumsum(count) - count, np.empty(int(count.sum()), np.int64)
        for target_, rows in zip(targets.tolist(), groups, strict=True):
            kept = rows[count[rows] > 0]
            self._walk(self.table(target_), a[kept], pick[kept], count[kept], start[kept], links)
        return Paths(count, links), np.flatnonzero(lost)

    def _walk(
        self, table: Table, at: Ints, pick: Hash, count: Ints, start: Ints, links: Ints
    ) -> None:
        """Write the links of the routes from `at` to one destination, each from its start."""
        for hop in range(int(count.max(initial=0))):
            live = np.flatnonzero(count > hop)
            begin = table.first[at[live]]
            choices = (table.first[at[live] + 1] - begin).astype(np.uint64)
            link = table.onward[begin + (pick[live] % choices).astype(np.int64)]
            pick[live] //= choices
            links[start[live] + hop] = self.links[link]
            at[live] = self.head[link]
