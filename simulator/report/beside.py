"""Compute beside communication: how much longer it takes, and what was assumed of it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from simulator.describe.cluster import Device
from simulator.describe.scenario import Scenario
from simulator.hardware.taken import NET_CHANNELS
from simulator.program import Int64, Program
from simulator.timeline import Timeline
from simulator.units import TICKS_PER_SECOND


def slowed_seconds(program: Program, ticks: Int64, timeline: Timeline) -> float:
    """Return the seconds by which the work of the last step takes longer, mean over ranks.

    Args:
        program: what has run.
        ticks: what its ops take alone, (rows, tiles or 1) or by op id.
        timeline: its times.
    """
    start, end = timeline.columns
    work = ~program.is_flow & (program.stream == program.streams.index("compute"))
    rows = np.flatnonzero(work & (program.step == program.step.max(initial=0)))
    alone = ticks.reshape(len(program.rank), -1)
    if alone.shape[1] > 1 and timeline.column_of_tile is not None:
        alone = alone[:, np.unique(timeline.column_of_tile, return_index=True)[1]]
    longer = (end[rows] - start[rows] - alone[rows]).sum(axis=0)
    tiles = np.ones(1, np.int64)
    if timeline.column_of_tile is not None:
        tiles = np.bincount(timeline.column_of_tile, minlength=len(longer))
    return float(longer @ tiles) / program.num_ranks / TICKS_PER_SECOND


def beside_communication(s: Scenario) -> Iterator[str]:
    """Yield what is assumed of kernels that run while flows move."""
    stated = s.run.overlap_slowdown
    if stated:
        yield (
            f"each collective or message takes {stated:.1%} of the computing of its ranks while it "
            + WHILE[s.run.network]
        )
    elif stated == 0:
        yield "kernels run at full rate beside communication (run.overlap_slowdown is 0)"
    elif s.jitter is not None and s.run.network == "fluid":
        yield (
            "kernels run at full rate beside communication: which SMs collectives hold is not "
            "modelled under jitter where flows share links"
        )
    else:
        yield from _by_device(s)
    if s.jitter is not None and s.run.network != "fluid" and stated != 0:
        yield (
            "under jitter communication slows the kernels beside it by as many seconds as in the "
            "step that nothing disturbs"
        )


WHILE = {
    "alpha-beta": "moves bytes, nothing during its latency; every kernel feels it alike",
    "fluid": "moves bytes at its own rate, less where others hold it back, nothing during its "
    "latency; every kernel feels it alike",
}
"""When a flow takes computing, by the network model."""


def _by_device(s: Scenario) -> Iterator[str]:
    """Yield what collectives take of each kind of device."""
    devices = dict.fromkeys(node.device for node in s.cluster.kinds)
    without = [device.name for device in devices if not device.communication_units]
    if without:
        yield (
            f"kernels run at full rate beside communication on {', '.join(without)}: no "
            "communication_units are stated for it"
        )
    if len(without) < len(devices):
        held = ", ".join(_held(device) for device in devices if device.communication_units)
        pieces = ", tensor-parallel collectives in pieces no SMs" * (s.plan.tp_overlap == "all")
        yield (
            f"a collective holds {held}, and bytes that arrive at a rank take their share of its "
            f"memory bandwidth from kernels, while it {WHILE[s.run.network]}; messages between "
            f"stages take nothing{pieces} (run.overlap_slowdown states another share, of messages "
            "too)"
        )


def _held(device: Device) -> str:
    units = device.communication_units or 0
    net = f" ({NET_CHANNELS} over several nodes)" * (units > NET_CHANNELS)
    return f"{units} of the {device.compute_units} SMs{net} of {device.name}"
