"""Dimension-ordered routes on a torus or a mesh, by arithmetic: no search, whatever its size."""

from __future__ import annotations

import numpy as np

from simulator.hardware.routing import Hash, Paths
from simulator.hardware.wiring import Ints


class Torus:
    """The links of a grid by place, dimension and sense, and routes that correct one dimension
    after another, each the shorter way around (Dally and Seitz, 1987).
    """

    def __init__(self, shape: tuple[int, ...], a: Ints, b: Ints, first_link: int) -> None:
        """Take the wires between places a and b, whose links start at `first_link`, two a wire."""
        self.shape = np.array(shape, np.int64)
        self.place = np.stack(np.unravel_index(np.arange(self.shape.prod()), shape), axis=1)
        self.stride = np.append(np.cumprod(self.shape[:0:-1])[::-1], 1)
        self.link = np.full((len(self.place), len(shape), 2), -1, np.int64)
        axis = (self.place[a] != self.place[b]).argmax(axis=1)
        number = first_link + 2 * np.arange(len(a))
        self.link[a, axis, 0] = number
        self.link[b, axis, 1] = number + 1

    def paths(self, source: Ints, target: Ints, pick: Hash) -> Paths:
        """Return routes; `pick` turns the order of dimensions, and halfway round, the sense."""
        dimensions = len(self.shape)
        forth = (self.place[target] - self.place[source]) % self.shape
        steps = np.minimum(forth, self.shape - forth)
        steps[:, self.shape <= 2] = forth[:, self.shape <= 2]
        turn = (pick % np.uint64(dimensions)).astype(np.int64)
        coin = pick // np.uint64(dimensions)
        count = steps.sum(axis=1)
        links = np.empty(int(count.sum()), np.int64)
        at, place = source.copy(), np.cumsum(count) - count
        for nth in range(dimensions):
            axis = (turn + nth) % dimensions
            rows = np.arange(len(at))
            back = forth[rows, axis] * 2 > self.shape[axis]
            tie = (forth[rows, axis] * 2 == self.shape[axis]) & (self.shape[axis] > 2)
            back |= tie & ((coin >> axis.astype(np.uint64)) % np.uint64(2) == 1)
            back |= (self.shape[axis] == 2) & (self.place[at, axis] == 1)
            for step in range(int(steps.max(initial=0))):
                live = np.flatnonzero(steps[rows, axis] > step)
                along, sense = axis[live], back[live].astype(np.int64)
                links[place[live]] = self.link[at[live], along, sense]
                place[live] += 1
                now = self.place[at[live], along]
                then = (now + 1 - 2 * sense) % self.shape[along]
                at[live] += (then - now) * self.stride[along]
        return Paths(count, links)
