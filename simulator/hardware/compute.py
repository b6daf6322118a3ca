"""Seconds of a kernel on a device: a roofline with sustained rates, and a gap between kernels."""

from __future__ import annotations

from simulator.describe.cluster import Device
from simulator.program import Kernel, Work

BOUNDS = ("compute", "memory", "launch")
"""What can hold a kernel back: arithmetic, memory bandwidth, the gap before it."""


def kernel_seconds(kernel: Kernel, device: Device) -> tuple[float, str]:
    """Return the seconds of a kernel without its launch gap, and which bound held.

    max(FLOPs / (peak x efficiency), bytes / (bandwidth x efficiency)): the roofline of Williams et
    al., 2009, with the sustained shares that the device's file states in place of the peaks.
    """
    rate = device.peak[kernel.dtype]
    efficiency = device.matmul_efficiency if kernel.matmul else 1.0
    arithmetic = kernel.flops / (rate * efficiency)
    memory = kernel.bytes / (device.memory_bandwidth * device.memory_efficiency)
    return (arithmetic, "compute") if arithmetic >= memory else (memory, "memory")


def work_seconds(work: Work, device: Device) -> dict[str, float]:
    """Return the seconds of work by what bounds it, a key of `BOUNDS` each.

    A stated duration counts as compute.
    """
    if work.seconds is not None:
        return {"compute": work.seconds, "memory": 0.0, "launch": 0.0}
    by_bound = {"compute": 0.0, "memory": 0.0, "launch": 0.0}
    for kernel in work.kernels:
        seconds, bound = kernel_seconds(kernel, device)
        by_bound[bound] += kernel.count * seconds
        by_bound["launch"] += kernel.count * device.launch_overhead
    return by_bound
