"""What flows put on links: the input of engines when links are contended.

A flow is *fluid*: after its latency it moves its bytes at a rate, and moving one byte of payload
puts `coefficient` bytes on each link that it uses. Flows that share a link divide it fairly; see
`simulator.kernels.sharing` for what fair means.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from simulator.kernels.sharing import share
from simulator.program import Int32, Int64

Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Traffic:
    """Links, and the demands that flows make on them; many flows may make the same demand."""

    capacity: Float64
    """Bytes/s of each link, in one direction."""
    names: tuple[str, ...]
    """Name of each link, as ``node0/gpu1>node0/nvswitch``."""
    offset: Int64
    """Demand d uses ``links[offset[d]:offset[d + 1]]``, each once."""
    links: Int32
    coefficient: Float64
    """Bytes put on each of those links for one byte of payload; above 0."""
    size: Float64
    """Bytes of payload of each demand."""
    limit: Float64
    """Bytes/s of payload that each demand reaches when nothing is in its way."""
    demand: Int32
    """(joint ops, classes): the demand of each joint op on each class of tiles, or NONE where its
    time is fixed."""
    arriving: Float64 | None = None
    """Bytes that arrive at each rank for one byte of each demand's payload; none when absent."""
    private: int = 0
    """Links at the end that stand for the computing of ranks (`simulator.hardware.overlap`)."""

    @classmethod
    def none(cls) -> Traffic:
        """Return the traffic of a program whose flows all take fixed times."""
        real, whole = np.zeros(0), np.zeros(0, np.int32)
        return cls(real, (), np.zeros(1, np.int64), whole, real, real, real, whole.reshape(0, 1))

    @cached_property
    def solo(self) -> Float64:
        """Bytes/s of payload of each demand when it is alone."""
        rate = np.zeros(len(self.size))
        numbers = np.arange(len(self.size))
        scratch = np.zeros((2, len(self.capacity)))
        users = np.zeros(len(self.capacity), np.int64)
        for d in numbers:
            share(
                numbers[d : d + 1], numbers, self.offset, self.links, self.coefficient, self.weight,
                self.limit, self.capacity, scratch[0], scratch[1], users, rate,
            )  # fmt: skip
        return rate

    @cached_property
    def weight(self) -> Float64:
        """Bytes that a demand puts, for a byte of payload, on the link that binds it when alone.

        Private links bind nobody who uses others.
        """
        weight = np.ones(len(self.size))
        shared = np.arange(len(self.capacity)) < len(self.capacity) - self.private
        for d in range(len(self.size)):
            used = slice(self.offset[d], self.offset[d + 1])
            links = self.links[used]
            share = self.coefficient[used] / self.capacity[links] * shared[links]
            if len(share):
                weight[d] = self.coefficient[used][int(np.argmax(share))]
        return weight
