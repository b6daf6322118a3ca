"""Seconds of a grouped product, one for each expert of a rank, each with its own weight.

Transformer Engine's grouped linear layers, which Megatron-LM uses, hand cuBLAS a product for each
expert, one after the other, on four streams in turn. So the host's time of a product bounds them
from below, and as many run beside each other as are issued while one runs: few rows an expert mean
products too short to meet. Libraries that do all experts in one kernel are not limited so.
"""

from __future__ import annotations

from collections.abc import Callable

ISSUE = 9.2e-6
"""Seconds in which the host issues the product of one expert.

Fitted on the fit half of `topologies/measured/kernels.csv`: on a B200's host 80 to 256 products of
5120 x 1536 and 7168 x 2048 take 8.6 to 9.4 us each, however few rows they have.
"""

STREAMS = 4
"""Products that may run beside each other: Transformer Engine, common/gemm, the streams that its
multi-stream cuBLAS calls go round."""


def grouped_seconds(groups: int, together: Callable[[int], float]) -> float:
    """Return the seconds of the products of some groups.

    Args:
        groups: how many there are.
        together: seconds of so many of them beside each other.
    """
    beside = min(STREAMS, groups, max(1, int(together(1) / ISSUE)))
    return max(groups / beside * together(beside), groups * ISSUE)
