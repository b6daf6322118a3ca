"""Seconds of a kernel on a device: a roofline with sustained rates, and a gap between kernels."""

from __future__ import annotations

from simulator.describe.cluster import Device, Node
from simulator.hardware.calibration import measured
from simulator.hardware.gemm import alignment, gemm_slots
from simulator.hardware.host import host_seconds
from simulator.program import OFF_DEVICE, Kernel, Work

BOUNDS = ("compute", "memory", "launch")
"""What can hold a kernel back: arithmetic, memory bandwidth, the gap after it."""

ELEMENT = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
"""Bytes of an operand of a product by precision."""

FLASH_LENGTH, FLASH_DIM, FLASH_FULL_DIM = 300, 50, 128
"""Sequence at which fused attention reaches half of its rate on long ones; likewise of the size of
a head, where rates are stated for heads of 128.

Shah et al., FlashAttention-3 (arXiv 2407.08608), figure 5, causal, on an H100: FlashAttention-2
runs at 191, 260, 298, 319, 333, 335 TFLOP/s over 512 to 16,384 tokens, 342 x s/(s + 300) to 13 %
(to 2 % from 1,024 on); cuDNN at 315, 410, 484, 518, 529, 539, 550 x s/(s + 300) to 10 % (4 %).
Heads of 64 reach 299 of 335 and 388 of 539; 0.78 lies between.
"""


def kernel_seconds(kernel: Kernel, device: Device) -> tuple[float, str]:
    """Return the seconds of a kernel without its launch gap, and which bound held.

    Of a kernel that the device's calibration covers they are what was measured, with the gap.

    max(FLOPs / (peak x efficiency), bytes / (bandwidth x efficiency)): the roofline of Williams et
    al., 2009, with the sustained shares that the device's file states in place of the peaks. How
    much of its share a product reaches follows from its shape: `gemm`.
    """
    arithmetic = _arithmetic_seconds(kernel, device)
    share = device.memory_efficiency_in.get(kernel.algorithm, device.memory_efficiency)
    memory = kernel.bytes / (device.memory_bandwidth * share)
    seconds, bound = max((arithmetic, "compute"), (memory, "memory"), key=lambda each: each[0])
    found = measured(kernel, device).seconds if device.calibration is not None else None
    return (seconds if found is None else found), bound


def _arithmetic_seconds(kernel: Kernel, device: Device) -> float:
    rate = device.peak[kernel.dtype]
    if kernel.matmul is None:
        return kernel.flops / rate
    share = device.fused.get(kernel.algorithm)
    if share is not None:
        _, rows, _, dim = kernel.matmul
        length, full = rows / (rows + FLASH_LENGTH), FLASH_FULL_DIM / (FLASH_FULL_DIM + FLASH_DIM)
        return kernel.flops / (rate * share * length * (dim / (dim + FLASH_DIM) / full))
    efficiency = device.matmul_efficiency_in.get(kernel.dtype, device.matmul_efficiency)
    rate *= efficiency * device.sustained_clock
    units = device.compute_units
    if units is None or kernel.algorithm:
        return kernel.flops / rate
    slots = gemm_slots(kernel.matmul, units) / alignment(kernel.matmul, ELEMENT[kernel.dtype])
    return 2 * slots * units / rate


def work_seconds(work: Work, node: Node, devices: int = 0) -> dict[str, float]:
    """Return the seconds of work by what bounds it, a key of `BOUNDS` each.

    A kernel that ends before the host has issued the next one waits for it. A stated duration
    counts as compute. Of a node `devices` are in use, all where that is 0.
    """
    if work.seconds is not None:
        return {"compute": work.seconds, "memory": 0.0, "launch": 0.0}
    by_bound = {"compute": 0.0, "memory": 0.0, "launch": 0.0}
    for kernel in work.kernels:
        if kernel.dtype in OFF_DEVICE:
            seconds = host_seconds(kernel, node, devices or node.num_devices)
            by_bound["memory"] += kernel.count * seconds
            continue
        seconds, bound = kernel_seconds(kernel, node.device)
        gap = max(node.device.launch_overhead, node.host_launch - seconds)
        if node.device.calibration and measured(kernel, node.device).seconds is not None:
            gap = 0.0
        by_bound[bound] += kernel.count * seconds
        by_bound["launch"] += kernel.count * gap
    return by_bound
