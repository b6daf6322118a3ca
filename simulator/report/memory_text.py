"""What memory is made of at its peak, in text."""

from __future__ import annotations

import numpy as np

from simulator.describe.scenario import Scenario
from simulator.hardware.outside import nccl_bytes
from simulator.lower.memory import bytes_per_parameter, more_buffer_bytes, rank_memory
from simulator.program import ACTIONS, ALLOCATED, NONE
from simulator.report.host import host_lines
from simulator.report.memory import Peak
from simulator.report.reserve import given_back
from simulator.report.result import Result
from simulator.report.sharding import sharding_memory
from simulator.report.text import stages_head, stages_text, table
from simulator.units import format_bytes

LASTING = ("weights", "gradients", "optimizer", "buffers")
"""Parts that are alive all the time, fields of `StaticMemory`."""

POOLS = ("gathering", "holes")
"""What is reserved and not allocated at the peak: pools of gathers, holes between tensors."""
TOTALS = ("allocated", *POOLS, "reserved", "device")


def memory_text(result: Result, s: Scenario) -> str:
    """Return what the memory of every stage's fullest rank is made of when it holds most."""
    every, more, peaks = rank_memory(s), more_buffer_bytes(s), []
    rows: list[list[str]] = []
    for held, stages, ranks in zip(every, result.stages, result.tiled.tile_ranks, strict=True):
        rank = int(ranks[np.argmax(result.peak_memory_bytes[ranks])])
        peak = result.memory.at_peak(rank)
        peaks.append(f"  {stages_head(result)} {stages_text(stages)}: {_alive(result, peak)}")
        sizes = [float(getattr(held, part)) for part in LASTING]
        sizes[LASTING.index("buffers")] += float(more[rank])
        sizes += [*(getattr(peak.memory, part) for part in ALLOCATED)]
        sizes += [float(most[rank]) for most in _totals(result)]
        parameters = f"{held.params:,}"
        rows.append([stages_text(stages), parameters, *map(format_bytes, sizes)])
    head = [stages_head(result), "parameters", *LASTING, *ALLOCATED, *TOTALS]
    columns = zip(head, *rows, strict=True)
    maybe = (*ALLOCATED, *POOLS)
    shown = [column for column in columns if column[0] not in maybe or _any(column[1:])]
    lines = [table([list(row) for row in zip(*shown, strict=True)]), "", "at the peak:", *peaks, ""]
    if s.plan.shards > 1:
        lines.append(sharding_memory(s.plan, bytes_per_parameter(s)))
    return "\n".join([*lines, *map(str.strip, host_lines(result, s)), _fits(result, s)])


def _totals(result: Result) -> tuple[np.ndarray, ...]:
    pools = (getattr(result.reserve, part) for part in result.reserve._fields[: len(POOLS)])
    reserved, device = result.reserved_memory_bytes, result.device_memory_bytes
    return (result.peak_memory_bytes, *pools, reserved, device)


def _any(sizes: tuple[str, ...]) -> bool:
    return any(size != format_bytes(0.0) for size in sizes)


def _alive(result: Result, peak: Peak) -> str:
    """Return what computes at the peak, and whose activations are alive."""
    p = result.tiled
    by_stage: dict[int, list[int]] = {}
    for stage, microbatch in peak.kept:
        by_stage.setdefault(stage, []).append(microbatch)
    several = len(by_stage) > 1
    kept = "; ".join(
        f"{len(numbers)} microbatch{'es' * (len(numbers) > 1)} "
        f"({', '.join(map(str, numbers[:8]))}{', ...' * (len(numbers) > 8)})"
        + f" of stage {stage}"
        * several
        for stage, numbers in by_stage.items()
    )
    kept = f"activations of {kept}" if kept else "no activations"
    if peak.row == NONE:
        return f"{kept}; nothing computes"
    name, layer = p.costs[p.cost[peak.row]].name, int(p.layer[peak.row])
    action, number = ACTIONS[p.action[peak.row]], int(p.microbatch[peak.row])
    what = f"{name} of {action}{'' if number == NONE else number}"
    return f"{kept}; {what}" + (f" in layer {layer}" if layer != NONE else "")


def _fits(result: Result, s: Scenario) -> str:
    verdict = "fits" if result.summary.fits_device else "DOES NOT FIT"
    kinds = s.cluster.kinds
    lines = [
        f"device{f' {node.device.name}' * (len(kinds) > 1)}: allocated, context "
        f"{format_bytes(node.device.context)}, NCCL {format_bytes(nccl_bytes(s, kind))}"
        for kind, node in enumerate(kinds)
    ]
    each = ", ".join(f"{format_bytes(n.device.memory)} on each {n.device.name}" for n in kinds)
    back = given_back(result, s)
    if result.summary.fits_device and back.any():
        lines.append(
            f"reserved, these and context are {format_bytes(back.max())} more than rank "
            f"{back.argmax()}'s device has: the allocator gives cached memory back and tries again"
        )
    return "\n".join([*lines, f"{each}: {verdict}"])
