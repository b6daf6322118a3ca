"""Seconds of a kernel on a device: a roofline with sustained rates, and a gap between kernels."""

from __future__ import annotations

from simulator.describe.cluster import Device, Node
from simulator.hardware.calibration import measured
from simulator.hardware.flash import flash_seconds
from simulator.hardware.gemm import alignment, gemm_slots, written
from simulator.hardware.grouped import grouped_seconds
from simulator.hardware.host import host_seconds
from simulator.hardware.power import clock_left
from simulator.program import GROUPED, OFF_DEVICE, PRODUCTS, Kernel, Work

BOUNDS = ("compute", "memory", "launch")
"""What can hold a kernel back: arithmetic, memory bandwidth, the gap after it."""

ELEMENT = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
"""Bytes of an operand of a product by precision."""


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
    if kernel.algorithm in device.fused:
        return flash_seconds(kernel, device)
    efficiency = device.matmul_efficiency_in.get(kernel.dtype, device.matmul_efficiency)
    rate *= efficiency * device.sustained_clock * clock_left(device)
    units = device.compute_units
    if units is None or kernel.algorithm not in PRODUCTS:
        return kernel.flops / rate
    batch = kernel.matmul[0]
    if kernel.algorithm == GROUPED:
        return grouped_seconds(batch, lambda beside: _tiles_seconds(kernel, beside, device, rate))
    return _tiles_seconds(kernel, batch, device, rate)


def _tiles_seconds(kernel: Kernel, batch: int, device: Device, rate: float) -> float:
    """Return the seconds of so many of a kernel's products, in tiles at a rate of the device."""
    assert kernel.matmul is not None
    assert device.compute_units is not None
    products, m, n, k = kernel.matmul
    element, units = ELEMENT[kernel.dtype], device.compute_units
    moved = max(0.0, kernel.bytes / products - element * (m * k + k * n)) / (m * n)
    more = written(moved, rate, device.memory_bandwidth * device.memory_efficiency)
    left = alignment(kernel.matmul, element, wgrad=kernel.name.endswith("wgrad"))
    return 2 * gemm_slots((batch, m, n, k), units, more) / left * units / rate


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
