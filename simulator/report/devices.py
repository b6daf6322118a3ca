"""What is assumed of the devices of a scenario, by kind of node where there are several."""

from __future__ import annotations

from simulator.describe.cluster import Device, Node
from simulator.describe.scenario import Scenario
from simulator.units import format_seconds

HOST = {
    False: "; the host never holds the device back",
    True: ", but not before the host has issued it, one in {}",
}
"""What is assumed of a host that takes no time to launch a kernel, and of one that does."""

TILED = {
    False: ", whatever their shape",
    True: " at best; less by how tiles fill the device, how deep k is, how rows align",
}
"""What is assumed of products where tiles do not matter, and where they do."""


def device_assumptions(s: Scenario) -> list[str]:
    """Return what is assumed of kernels on each kind of node."""
    return [line for node in s.cluster.kinds for line in _of_kernels(s, node)]


def _of_kernels(s: Scenario, node: Node) -> list[str]:
    """Return what is assumed of kernels on a kind of node, which is named where there are more."""
    device = node.device
    where = f"on {device.name}: " if s.cluster.is_mixed else ""
    return [
        f"{where}matrix products sustain {_sustained(s, device):.1%} of the "
        f"{s.precision.fastest} peak{TILED[device.compute_units is not None]}, and memory-bound "
        f"kernels {device.memory_efficiency:.1%} of the memory bandwidth, whatever their size",
        f"{where}each kernel starts {format_seconds(device.launch_overhead)} after the one before "
        f"it{HOST[node.host_launch > 0].format(format_seconds(node.host_launch))}",
    ]


def _sustained(s: Scenario, device: Device) -> float:
    """Return the share of the peak that the largest products of most layers reach."""
    share = device.matmul_efficiency_in.get(s.precision.fastest, device.matmul_efficiency)
    return share * device.sustained_clock
