"""Bytes that a collective writes into the memory of its ranks, beside the kernels that run there.

A kernel feels a collective even where that holds none of its SMs: 1.1 PFLOP of a matrix product on
an H100 end 0.15 ms later beside copy engines that gather 512 MiB (github.com/pytorch/pytorch, pull
request 172714: 2.96 ms one after the other, 1.77 together). Every byte that arrives is written to
memory once, and that is taken from all kernels in proportion: 369 GB/s of 3,350 are 0.11 of the
rate, 0.15 ms. ASSUMED for kernels of every kind. It is the least that can be: NCCL's author counts
two or three passes through memory for each byte (github.com/NVIDIA/nccl, issue 1428); what is read
again soon after comes from the L2 cache.
"""

from __future__ import annotations

from simulator.hardware.nccl import BUS_FACTORS
from simulator.program import Flow

SUMMED_IN_SWITCH = frozenset({"NVLS", "NVLS_TREE"})
"""Algorithms in which a switch adds what ranks send, so that each rank gets a sum once."""


def arriving(flow: Flow, algorithm: str, ranks: int) -> float:
    """Return the bytes that arrive at each rank of a collective for a byte of its payload.

    Args:
        flow: what moves; of those to and from parameter servers nothing is counted.
        algorithm: that carries it, as `FlowModel` has it.
        ranks: of its group.
    """
    if algorithm == "NONE" or flow.name not in BUS_FACTORS:
        return 0.0
    if flow.name == "all_reduce" and algorithm in SUMMED_IN_SWITCH:
        return 1.0
    return BUS_FACTORS[flow.name](ranks)
