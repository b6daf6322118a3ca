"""Seconds of fused attention: a share of the peak rate, less on short and few sequences.

A unit computes some queries of one head against all keys that they see. So where queries are few,
the last ones keep few units busy, and under a causal mask a unit with the last queries of a
sequence works twice as long as one does on average.
"""

from __future__ import annotations

from simulator.describe.cluster import Device
from simulator.hardware.power import clock_left
from simulator.program import Kernel

LENGTH, DIM, FULL_DIM = 300, 50, 128
"""Sequence at which fused attention reaches half of its rate on long ones; likewise of the size of
a head, where rates are stated for heads of 128.

Shah et al., FlashAttention-3 (arXiv 2407.08608), figure 5, causal, on an H100: FlashAttention-2
runs at 191, 260, 298, 319, 333, 335 TFLOP/s over 512 to 16,384 tokens, 342 x s/(s + 300) to 13 %
(to 2 % from 1,024 on); cuDNN at 315, 410, 484, 518, 529, 539, 550 x s/(s + 300) to 10 % (4 %).
Heads of 64 reach 299 of 335 and 388 of 539; 0.78 lies between.
"""

WIDE = 0.86
"""Share of the rate that is left on heads above 128: of 192 and 128, latent attention's."""

WAITING = {"forward": 240, "backward": 80}
"""Queries for each unit that the units' waiting for the last ones costs, from 4 heads on.

`WIDE` and these are fitted on the fit half of `topologies/measured/kernels.csv`, flash-attention 2
on an A100 with 4 to 128 heads of 4,096 tokens; held-out rows follow to 5 %.
"""

TILE = {"blackwell": 2}
"""How many times more queries a unit has at once: kernels for Blackwell take two tiles of 128 in
turn (Zadouri et al., FlashAttention-4). A B200's rows alone ask for 2.2 to 2.5 times in forward."""


def flash_seconds(kernel: Kernel, device: Device) -> float:
    """Return the arithmetic seconds of a kernel of fused attention."""
    assert kernel.matmul is not None
    heads, queries, _, dim = kernel.matmul
    length, full = queries / (queries + LENGTH), FULL_DIM / (FULL_DIM + DIM)
    width = dim / (dim + DIM) / full if dim <= FULL_DIM else WIDE
    rate = device.peak[kernel.dtype] * device.fused[kernel.algorithm] * length * width
    rate *= clock_left(device)
    return kernel.flops / rate * (1 + _waiting(kernel, device) / (heads * queries))


def _waiting(kernel: Kernel, device: Device) -> float:
    """Return how many queries more the waiting of all units costs."""
    direction = kernel.algorithm.split(" ")[-1]
    tile = TILE.get(device.architecture, 1)
    return WAITING[direction] * tile * (device.compute_units or 0)
