"""What a scenario may ask of a cluster whose nodes are of several kinds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simulator.describe.scenario import Scenario


def device_problems(s: Scenario) -> Iterator[str]:
    """Say which device has no rate for what a run asks of it."""
    run, fastest = s.run, s.precision.fastest
    for node in s.cluster.kinds:
        device = node.device
        if run.attention in ("flash1", "flash2") and f"{run.attention} forward" not in device.fused:
            yield (
                f"run.attention {run.attention!r}: {device.name} has no rate of it; set "
                'run.attention = "flash", or give device.fused its rates'
            )
        if fastest not in device.peak:
            yield (
                f"run.precision {run.precision!r}: {device.name} has no rate for it; "
                f"it has {', '.join(device.peak)}"
            )
        if run.fp8_scaling == "mxfp8" and device.architecture != "blackwell":
            yield (
                f"run.fp8_scaling 'mxfp8': {device.name} multiplies no blocks that have scales of "
                'their own, Blackwell does; set run.fp8_scaling = "delayed" or "current"'
            )


def mixture_problems(s: Scenario) -> Iterator[str]:
    """Say what is not modelled on nodes of several kinds."""
    cluster, plan, run = s.cluster, s.plan, s.run
    if not cluster.is_mixed:
        return
    named = f"cluster.nodes of several kinds ({', '.join(node.name for node in cluster.kinds)})"
    if run.network == "fluid":
        yield (
            f"run.network 'fluid' with {named}: links between unlike nodes are not modelled; "
            'set run.network = "alpha-beta"'
        )
    for name in ("offload_optimizer", "offload_activations"):
        if getattr(plan, name):
            yield f"plan.{name} with {named}: unlike hosts are not modelled; leave it out"
    # What kernels there are is decided before anyone knows on which rank they run.
    devices = [node.device for node in cluster.kinds]
    if run.precision == "fp8" and len({d.architecture == "blackwell" for d in devices}) > 1:
        yield (
            f"run.precision 'fp8' with {named}: some write casts transposed too and some do not, "
            'which is not modelled; set run.precision = "bf16"'
        )
    if run.optimizer == "muon" and len({"bf16" in device.peak for device in devices}) > 1:
        yield (
            f"run.optimizer 'muon' with {named}: it multiplies in bf16 where a device can, and not "
            'all can, which is not modelled; set run.optimizer = "adamw"'
        )
