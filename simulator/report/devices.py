"""What is assumed of the devices of a scenario, by kind of node where there are several."""

from __future__ import annotations

from simulator.describe.cluster import Device, Node
from simulator.describe.scenario import Scenario
from simulator.hardware.calibration import measured
from simulator.hardware.power import clock_left
from simulator.lower.bodies import stage_bodies
from simulator.lower.operators import STREAM
from simulator.program import OFF_DEVICE, Work
from simulator.units import format_seconds

HOST = {
    False: "; the host never holds the device back",
    True: ", but not before the host has issued it, one in {}",
}
"""What is assumed of a host that takes no time to launch a kernel, and of one that does."""

TILED = {
    False: ", whatever their shape",
    True: " at best; less by how tiles fill the device, what writing results takes, how rows align",
}
"""What is assumed of products where tiles do not matter, and where they do."""


def device_assumptions(s: Scenario) -> list[str]:
    """Return what is assumed of kernels on each kind of node."""
    return [line for node in s.cluster.kinds for line in _of_kernels(s, node)]


def _of_kernels(s: Scenario, node: Node) -> list[str]:
    """Return what is assumed of kernels on a kind of node, which is named where there are more."""
    device = node.device
    where = f"on {device.name}: " if s.cluster.is_mixed else ""
    stream = device.memory_efficiency_in.get(STREAM)
    return [
        *(f"{where}{line}" for line in _calibrated(s, device)),
        *(f"{where}{line}" for line in _limited(device)),
        f"{where}matrix products sustain {_sustained(s, device):.1%} of the "
        f"{s.precision.fastest} peak{TILED[device.compute_units is not None]}, and memory-bound "
        f"kernels {device.memory_efficiency:.1%} of the memory bandwidth, whatever their size"
        + (f" (passes over whole buffers {stream:.1%})" if stream else ""),
        f"{where}each kernel starts {format_seconds(device.launch_overhead)} after the one before "
        f"it{HOST[node.host_launch > 0].format(format_seconds(node.host_launch))}",
    ]


def _calibrated(s: Scenario, device: Device) -> list[str]:
    """Return which kernels take what was measured, and which do not and why."""
    table = device.calibration
    if table is None:
        return []
    named = f"device.calibration ({table.device}, {table.measured_at}; {table.how})"
    covered: dict[str, None] = {}
    left: dict[str, dict[str, None]] = {}
    for cost in stage_bodies(s).costs:
        for kernel in cost.kernels if isinstance(cost, Work) else ():
            if kernel.dtype not in OFF_DEVICE:
                found = measured(kernel, device)
                if found.seconds is not None:
                    covered[found.why] = None
                else:
                    left.setdefault(found.why, {})[kernel.name] = None
    if not covered:
        why = next(iter(left), "it runs none")
        return [f"{named} prices no kernel: {why}; all are priced by the rules below"]
    by_why = "; ".join(f"{', '.join(names)} ({why})" for why, names in left.items())
    rest = f"; by the rules below {by_why}" if left else ", which are all"
    return [f"{named} prices {', '.join(covered)}{rest}"]


def _limited(device: Device) -> list[str]:
    """Return what a power limit leaves of the clock, and of which kernels."""
    if device.power_limit is None:
        return []
    return [
        f"a limit of {device.power_limit:g} W in place of {device.tdp:g} W leaves "
        f"{clock_left(device):.1%} of the clock to matrix products and fused attention, from the "
        "first step on; kernels bound by memory are not slowed"
    ]


def _sustained(s: Scenario, device: Device) -> float:
    """Return the share of the peak that the largest products of most layers reach."""
    share = device.matmul_efficiency_in.get(s.precision.fastest, device.matmul_efficiency)
    return share * device.sustained_clock * clock_left(device)
