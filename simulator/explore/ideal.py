"""What a step would take if one thing were ideal: each is a scenario, or ops at other prices.

Where a scenario can say it, the ideal is that scenario, and its settings are given. What nobody
can describe, messages without time or stages that take the same, are ops at other ticks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from simulator.api import simulate
from simulator.describe.fields import from_text, rules
from simulator.describe.scenario import Scenario
from simulator.errors import DescriptionError
from simulator.program import ACTION_CODE, Int64, Program
from simulator.report.breakdown import COMMUNICATION, moves, stream_category
from simulator.report.result import Result
from simulator.report.summary import OWNERS

ENDLESS = "1e9 GB/s"
"""A rate at which nothing takes time."""

Reprice = Callable[[Program, Int64], Int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ideal:
    """One thing made ideal."""

    name: str
    settings: dict[str, object]
    """As ``--set`` takes them; empty where no setting says it."""
    reprice: Reprice | None = None
    owner: str = ""
    """Whose time it takes away, a key of `OWNERS`; empty where it is of several."""

    def run(self, s: Scenario) -> Result:
        """Return the result of a scenario with it.

        Raises:
            DescriptionError: where the scenario cannot have it.
        """
        if self.reprice is not None and s.run.network == "fluid":
            raise DescriptionError(
                f"{self.name} has no meaning where flows share links; --set run.network=alpha-beta"
            )
        return simulate(with_settings(s, self.settings), repriced=self.reprice)


def with_settings(s: Scenario, settings: dict[str, object]) -> Scenario:
    """Return a scenario with other values at dotted keys, quantities as texts with their units.

    Values of one description change at once, as they may be checked against each other.
    """
    parents: dict[str, dict[str, object]] = {}
    for key, value in settings.items():
        parent, _, name = key.rpartition(".")
        parents.setdefault(parent, {})[name] = value
    for parent, values in parents.items():
        s = _with(s, parent.split("."), values)
    return s


def _with(description: Any, path: list[str], values: dict[str, object]) -> Any:
    if path:
        first, *rest = path
        return replace(description, **{first: _with(getattr(description, first), rest, values)})
    kind: type = type(description)
    read = {k: from_text(v, rules(kind)[k].markers) for k, v in values.items()}
    return replace(description, **read)


def ideals(s: Scenario) -> Iterator[Ideal]:
    """Yield what can be made ideal in a scenario."""
    yield from _hardware(s)
    yield from _plan(s)
    axes = _axes(s)
    for axis in axes:
        yield Ideal(name=f"free {OWNERS[axis]}", settings={}, reprice=free((axis,)), owner=axis)
    if len(axes) > 1:
        yield Ideal(name="no communication at all", settings={}, reprice=free(COMMUNICATION))
    if s.plan.pp > 1:
        yield Ideal(name="perfect stage balance", settings={}, reprice=balance)


def _hardware(s: Scenario) -> Iterator[Ideal]:
    if s.cluster.is_mixed:
        return
    node = "cluster.node"
    if s.cluster.ranks_per_node > 1:
        link = {f"{node}.link.bandwidth": ENDLESS, f"{node}.link.pair_bandwidth": ENDLESS}
        settings: dict[str, object] = {**link, f"{node}.link.latency": "0 s"}
        yield Ideal(name=f"infinite {s.cluster.node.link.name.split()[0]}", settings=settings)
    if s.cluster.num_nodes > 1:
        settings = {f"{node}.nic.bandwidth": ENDLESS, f"{node}.nic.latency": "0 s"}
        if s.cluster.node.nic.plugin_latency:
            settings[f"{node}.nic.plugin_latency"] = "0 s"
        yield Ideal(name="infinite network", settings=settings)
    if s.cluster.node.device.calibration is not None:
        return  # measured times do not say what of them was memory, or a gap
    yield Ideal(
        name="infinite memory bandwidth", owner="memory",
        settings={f"{node}.device.memory_bandwidth": ENDLESS},
    )  # fmt: skip
    gaps = {f"{node}.host_launch": "0 s", f"{node}.device.launch_overhead": "0 s"}
    yield Ideal(name="no launch gaps", settings={**gaps}, owner="launch")


def _plan(s: Scenario) -> Iterator[Ideal]:
    size = s.plan.microbatch_size
    if size > 1 and s.plan.pp > 1:
        half = next(d for d in range(size // 2, 0, -1) if size % d == 0)
        yield Ideal(name=MORE, settings={"plan.microbatch_size": half})
    batch = 2 * s.run.global_batch_size
    yield Ideal(name="twice the batch", settings={"run.global_batch_size": batch})
    parts = (s.plan.recompute_layers, s.plan.recompute_modules)
    if s.plan.recompute != "none" and parts == (None, None):
        again: dict[str, object] = {"plan.recompute_again": False} if s.plan.recompute_again else {}
        yield Ideal(name="no recomputation", settings={**again, "plan.recompute": "none"})


MORE = "more, smaller microbatches"


def _axes(s: Scenario) -> list[str]:
    """Return the axes along which something moves in a step."""
    from simulator.lower import lower

    program = lower(s)
    found = {stream_category(program.streams[x]) for x in np.unique(program.stream[moves(program)])}
    return [axis for axis in COMMUNICATION if axis in found]


def free(axes: tuple[str, ...]) -> Reprice:
    """Return the prices at which communication along some axes takes no time."""
    return scaled(axes, 0.0)


def scaled(axes: tuple[str, ...], factor: float) -> Reprice:
    """Return the prices at which communication along some axes takes so many times as long."""

    def reprice(program: Program, ticks: Int64) -> Int64:
        rows, out = of_axes(program, axes), ticks.copy()
        out[rows] = np.rint(out[rows] * factor).astype(np.int64)
        return out

    return reprice


def of_axes(program: Program, axes: tuple[str, ...]) -> Int64:
    """Return the rows of a program that move bytes along some axes."""
    among = np.array([stream_category(name) in axes for name in program.streams] + [False])
    rows: Int64 = np.flatnonzero(moves(program) & among[program.stream])
    return rows


PASSES = [ACTION_CODE[kind] for kind in ("F", "B", "I", "W")]


def balance(program: Program, ticks: Int64) -> Int64:
    """Return the prices at which each rank of the pipeline has the mean work in its passes."""
    works = np.isin(program.action, PASSES) & ~moves(program)
    total = np.zeros(len(program.tile_ranks))
    wide = ticks.reshape(len(program.rank), -1)
    np.add.at(total, program.rank[works], wide[works].mean(axis=1))
    factor = total.mean() / np.maximum(total, 1)
    out = ticks.copy()
    shape = (-1,) + (1,) * (ticks.ndim - 1)
    out[works] = np.rint(out[works] * factor[program.rank[works]].reshape(shape)).astype(np.int64)
    return out
