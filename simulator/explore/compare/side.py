"""One of two runs that are compared: a scenario's result, or a measured program and timeline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from simulator.describe.scenario import Scenario
from simulator.errors import DescriptionError
from simulator.explore.critical import critical_path
from simulator.hardware.compute import kernel_seconds, work_seconds
from simulator.lower.memory import more_buffer_bytes, rank_memory
from simulator.program import OFF_DEVICE, Program, Work
from simulator.report.breakdown import CATEGORIES
from simulator.report.memory_text import LASTING
from simulator.report.result import Result
from simulator.timeline import Timeline
from simulator.units import TICKS_PER_SECOND

if TYPE_CHECKING:
    from simulator.operate.cost import Bill

OUT_OF_STEP = "out of step"
"""What the windows of ranks are shorter than the step, in the mean; nothing where there is one
step."""

Ticks = dict[str, int]


@dataclass(frozen=True, eq=False)
class Side:
    """A run that has a name; every part of it is computed when it is first asked for."""

    name: str
    result: Result
    is_measured: bool = False

    @classmethod
    def of_run(
        cls, program: Program, timeline: Timeline, name: str, notes: Sequence[str] = ()
    ) -> Side:
        """Return the side of a measured run; notes say what was taken where it says nothing."""
        result = Result(program, timeline, title=name, notes=tuple(notes))
        return cls(name, result, is_measured=True)

    @classmethod
    def of_result(cls, result: Result, settings: Sequence[str] = ()) -> Side:
        """Return the side of a simulated run; settings that were changed go into its name."""
        name = result.title if result.scenario is None else result.scenario.name
        return cls(", ".join((name, *settings)), result)

    @property
    def scenario(self) -> Scenario | None:
        """What was simulated; None for a measured run and a bare schedule."""
        return self.result.scenario

    @cached_property
    def step(self) -> int:
        """Ticks of the last step."""
        return round(self.result.step_time_s * TICKS_PER_SECOND)

    @cached_property
    def parts(self) -> Ticks:
        """Mean ticks of a rank by what it does or waits for; they add up to the step."""
        b, ranks = self.result.breakdown, self.result.tiled.num_ranks
        sums = b.ticks.sum(axis=1).tolist()
        parts = {name: total / ranks for name, total in zip(CATEGORIES, sums, strict=True) if total}
        parts[OUT_OF_STEP] = (self.step * ranks - sum(sums)) / ranks
        return {name: ticks for name, ticks in rounded(parts, self.step).items() if ticks}

    @cached_property
    def path(self) -> Ticks | None:
        """Ticks of the critical path by owner, which add up to the step; None where none is known.

        Those are runs without a scenario, whose replicas are not in step or whose ops queue.
        """
        try:
            found = critical_path(self.result)
        except DescriptionError:
            return None
        return rounded({k: v * TICKS_PER_SECOND for k, v in found.owners_s.items()}, self.step)

    @cached_property
    def ops(self) -> dict[str, float]:
        """Seconds of a rank's step by kernel, in the mean; by op where no kernels are known."""
        p, s = self.result.tiled, self.scenario
        busy = np.bincount(p.cost, weights=self.result.breakdown.busy, minlength=len(p.costs))
        out: dict[str, float] = defaultdict(float)
        scale = p.num_ranks * TICKS_PER_SECOND
        for cost, ticks in zip(p.costs, busy.tolist(), strict=True):
            if isinstance(cost, Work) and ticks:
                for name, share in _kernels(cost, s).items():
                    out[name] += share * ticks / scale
        return dict(out)

    @cached_property
    def flows(self) -> dict[str, float]:
        """Seconds of a rank's transfers by axis and operation, in the mean."""
        out: dict[str, float] = defaultdict(float)
        for use in self.result.flows:
            out[f"{use.axis} {use.operation}"] += use.transfer_per_rank_s
        return dict(out)

    @cached_property
    def bills(self) -> tuple[Bill, Bill] | None:
        """What a step and a million tokens take; None where the scenario has no [cost].

        Raises:
            DescriptionError: when the device's file does not say what it draws.
        """
        if self.scenario is None or self.scenario.cost is None:
            return None
        from simulator.operate.cost import step_bills

        return step_bills(self.result)

    @cached_property
    def memory(self) -> dict[str, float]:
        """Bytes allocated on the fullest rank by part at its peak; none where not modelled."""
        r, s = self.result, self.scenario
        if s is None:
            return {}
        rank = r.summary.peak_memory_rank
        held = rank_memory(s)[int(np.nonzero(r.tiled.tile_ranks == rank)[0][0])]
        parts = {part: float(getattr(held, part)) for part in LASTING}
        parts["buffers"] += float(more_buffer_bytes(s)[rank])
        parts |= r.memory.at_peak(rank).memory._asdict()
        return {name: size for name, size in parts.items() if size}


def _kernels(cost: Work, s: Scenario | None) -> Mapping[str, float]:
    """Return the share of each kernel in the time of work; all of it is the op's without any."""
    if s is None or s.cluster.is_mixed:
        return {cost.name: 1.0}
    node = s.cluster.node
    on_device = [k for k in cost.kernels if k.dtype not in OFF_DEVICE]
    whole = sum(work_seconds(cost, node, s.cluster.ranks_per_node).values())
    if not on_device or not whole:
        return {cost.name: 1.0}
    shares: dict[str, float] = defaultdict(float)
    for kernel in on_device:
        shares[kernel.name] += kernel.count * kernel_seconds(kernel, node.device)[0] / whole
    shares["launch gaps"] = max(0.0, 1 - sum(shares.values()))
    return shares


def rounded(parts: Mapping[str, float], total: int) -> Ticks:
    """Return parts as whole ticks that add up to a total, each within a tick of its own value.

    The parts add up to about the total; what is missing goes to those that lost most.
    """
    floors = {name: int(np.floor(value)) for name, value in parts.items()}
    missing = total - sum(floors.values())
    order = sorted(parts, key=lambda name: floors[name] - parts[name])
    for name in order[: max(missing, 0)]:
        floors[name] += 1
    floors[order[0]] += total - sum(floors.values())  # what floating point lost of long steps
    return floors
