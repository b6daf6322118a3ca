"""NCCL's published tuner constants, in NCCL's own units: microseconds and GB/s (1e9 bytes/s).

Source of every table, unless it says otherwise: github.com/NVIDIA/nccl, src/graph/tuning.cc,
`ncclTunerConstantsDefaults` of commit 5067397c2676. They are what NCCL plans with; what machines
achieve is in `ACHIEVED`, at the end: a few constants, fitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ARCHITECTURES = ("volta", "ampere", "hopper", "blackwell")
PROTOCOLS = ("LL", "LL128", "SIMPLE")

BASE_LATENCY_US: Mapping[str, tuple[float, float, float]] = {
    "TREE": (6.8, 14.0, 8.4),
    "RING": (6.6, 14.0, 8.4),
    "NVLS": (0.0, 0.0, 0.0),
    "NVLS_TREE": (0.0, 0.0, 0.0),
    "PAT": (8.0, 8.0, 8.0),
}
"""Start of a collective by algorithm, for (LL, LL128, Simple)."""

HARDWARE_LATENCY_US: Mapping[str, Mapping[str, tuple[float, float, float]]] = {
    "NVLINK": {
        "TREE": (0.6, 1.25, 4.0), "RING": (0.6, 1.9, 3.4), "NVLS": (0.0, 0.0, 25.0),
        "NVLS_TREE": (0.0, 0.0, 25.0), "PAT": (0.0, 0.0, 4.0),
    },
    "PCI": {
        "TREE": (1.0, 1.9, 4.0), "RING": (1.0, 2.5, 5.7), "NVLS": (0.0, 0.0, 0.0),
        "NVLS_TREE": (0.0, 0.0, 0.0), "PAT": (0.0, 0.0, 4.0),
    },
    "NET": {
        "TREE": (5.0, 8.5, 14.0), "RING": (2.7, 4.0, 14.0), "NVLS": (0.0, 0.0, 18.0),
        "NVLS_TREE": (0.0, 0.0, 20.9), "PAT": (0.0, 0.0, 14.0),
    },
}  # fmt: skip
"""One step over a kind of link by algorithm, for (LL, LL128, Simple)."""

NET_OVERHEAD_US = 1.0
"""Posting to the network, each step of a ring over nodes; three times this for Simple."""

LL_MAX_GBS = {
    "volta": (39.0, 39.0, 20.4), "ampere": (87.7, 22.5, 19.0),
    "hopper": (141.0, 45.0, 35.0), "blackwell": (282.0, 90.0, 70.0),
}  # fmt: skip
"""Most that LL carries, for (one node, two, more). NCCL looks at the CPU's maker over nodes, which
a description does not state; the row of the device's generation is taken instead."""

RING_LL128_CHANNEL_GBS = {
    "volta": (20.0, 20.0, 20.0), "ampere": (20.0, 20.0, 20.0),
    "hopper": (36.7, 36.7, 36.7), "blackwell": (40.0, 40.0, 40.0),
}  # fmt: skip
TREE_LL128_CHANNEL_GBS = {
    "volta": (20.0, 20.0, 20.0), "ampere": (20.0, 20.0, 20.0),
    "hopper": (36.7, 36.7, 29.0), "blackwell": (55.6, 31.67, 20.0),
}  # fmt: skip
TREE_CHANNEL_GBS = {
    "volta": (26.5, 18.5, 10.0), "ampere": (24.0, 23.6, 17.8),
    "hopper": (38.7, 41.4, 36.0), "blackwell": (70.0, 42.8, 24.0),
}  # fmt: skip
NVLS_TREE_CHANNEL_GBS = {
    "volta": (26.5, 18.5, 10.0), "ampere": (24.0, 23.6, 17.8),
    "hopper": (0.0, 57.7, 45.5), "blackwell": (0.0, 96.0, 80.0),
}  # fmt: skip
"""Most of one channel, for (one node, two, more)."""

NVLS_HEAD_GBS = {"volta": 0.0, "ampere": 0.0, "hopper": 60.0, "blackwell": 90.0}
"""Most of one NVLS channel; each device of a node heads one, so that few devices cannot fill the
links: the first entries of sm90SpeedArrayIntra and sm100SpeedArrayIntra, src/graph/search.cc."""

TREE_CORRECTION = {
    "LL": (1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5,
           0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.0, 1.0, 1.0, 1.0),
    "LL128": (1.0, 1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6,
              0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1.0, 1.0, 1.0),
    "SIMPLE": (0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5,
               0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9, 1.0),
}  # fmt: skip
"""Share of a tree's bandwidth that medium sizes reach: powers of two from 64 bytes (tuning.cc,
treeCorrectionFactor; it ends below 2**29 bytes). Between powers the simulator interpolates, so that
time grows with size."""

NVLS_CHUNK = 131072
NVLS_SMALLER_CHUNKS = ((64, 65536), (8, 32768), (2, 16384))
"""NVLS moves chunks of 128 KiB, one a channel and head in each round; a message of fewer rounds
than the first number takes chunks of the second (src/enqueue.cc, calcCollChunking)."""

PLATEAU = {"volta": 1.9, "ampere": 1.4, "hopper": 1.4, "blackwell": 1.4}
"""Factor on the latency of a Simple ring over nodes: 'plateau effect of ring', tuning.cc."""

CROSSING_ADAPTERS = 8
"""Adapters of one node that a ring or tree leaves through; more stay idle. Fitted to racks of 72
devices with 72 adapters, where an all-reduce over racks gets the rate of 8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a cost model assumes of machines, over the tables above and the links' rates."""

    launch_us: float
    """Start and end of the kernel, on top of the base latency."""
    nvls_share: Mapping[str, float]
    """Share of a device's link rate that in-switch reduction turns into message bytes."""
    nvls_fill: float
    """Rounds of chunks that fill each stage of an NVLS pipeline."""
    net_ll_share: float
    """What LL and LL128 keep of their bandwidth where they cross nodes."""
    local_copy_gbs: Mapping[str, float]
    """Rate at which a rank copies its own size/n bytes, the one step that crosses no link (the last
    of an all-reduce, the first of an all-gather); free where absent."""
    parts_share: Mapping[str, float]
    """Share of the links' rate that a Simple ring of a gather or a scatter reaches in a node, where
    one of an all-reduce reaches all of it; 1 where absent."""
    pairs_share: Mapping[str, float]
    """Share of it that an all-to-all reaches in a node; 1 where absent."""


PLANNED = Rates(
    launch_us=0.0,
    nvls_share={"volta": 0.0, "ampere": 0.0, "hopper": 0.85, "blackwell": 0.74},
    nvls_fill=0.0,
    net_ll_share=1.0,
    local_copy_gbs={},
    parts_share={},
    pairs_share={},
)
"""NCCL's own, by which it chooses (nvlsEfficiency; the rest it does not model)."""

ACHIEVED = Rates(
    launch_us=23.5,
    nvls_share={"volta": 0.0, "ampere": 0.0, "hopper": 0.739, "blackwell": 0.7065},
    nvls_fill=1.375,
    net_ll_share=0.7375,
    local_copy_gbs={"volta": 600.0, "ampere": 600.0},
    parts_share={"hopper": 0.965, "blackwell": 0.965},
    pairs_share={"hopper": 0.925, "blackwell": 0.925},
)
"""Fitted by `python -m benchmarks.fit_collectives` on the fit half of `topologies/measured`. The
copy is why 2 A100 reach less busbw than 8; on Hopper 4 reach what 8 do, so it is left out there."""
