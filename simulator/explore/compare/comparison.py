"""What differs between two sides, in whole ticks that add up, and one sentence that says so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from simulator.explore.compare.inputs import Input, differing
from simulator.explore.compare.side import OUT_OF_STEP, Side
from simulator.report.breakdown import BUBBLE, COMMUNICATION
from simulator.units import format_bytes, format_seconds, to_seconds

COMPUTING = ("forward", "backward")

SPOKEN = {
    **dict.fromkeys(COMPUTING, "computation"),
    "optimizer": "optimizer",
    **dict.fromkeys(BUBBLE, "bubble"),
    **{axis: f"exposed {axis} communication" for axis in COMMUNICATION},
    "offload": "waiting for the host",
    "data": "waiting for data",
    "save": "waiting for the checkpoint",
    OUT_OF_STEP: "time between the ranks' own steps",
}
"""Parts of a step as a sentence has them."""

MOST_SPOKEN = 3
"""Parts that a verdict names."""

LEAST_SPOKEN = 0.05
"""Of all that changed, parts below it are not named."""

LEAST_OF_STEP = 0.001
"""Of A's step, parts below it are not named."""

LEAST_MEMORY = 0.1
"""Of a device's memory, differences below it are not named."""


@dataclass(frozen=True, slots=True)
class Change:
    """A value of both sides; None where one has none."""

    name: str
    a: float | None
    b: float | None

    @property
    def difference(self) -> float | None:
        """By how much B's is more."""
        return None if self.a is None or self.b is None else self.b - self.a


@dataclass(frozen=True, eq=False)
class Comparison:
    """Side B as seen from side A."""

    a: Side
    b: Side

    @cached_property
    def inputs(self) -> tuple[Input, ...]:
        """What the two scenarios say differently; nothing where one side is none."""
        left, right = self.a.scenario, self.b.scenario
        return () if left is None or right is None else differing(left, right)

    @property
    def difference(self) -> int:
        """Ticks that B's step is longer."""
        return self.b.step - self.a.step

    @cached_property
    def parts(self) -> tuple[Change, ...]:
        """Ticks of a rank's step by part, in the mean; differences add up to `difference`."""
        a, b = self.a.parts, self.b.parts
        return tuple(Change(n, a.get(n, 0), b.get(n, 0)) for n in SPOKEN if n in a or n in b)

    @cached_property
    def path(self) -> tuple[Change, ...] | None:
        """Ticks of the critical path by owner; differences add up to `difference`."""
        a, b = self.a.path, self.b.path
        if a is None or b is None:
            return None
        from simulator.report.summary import OWNERS

        return tuple(Change(n, a.get(n, 0), b.get(n, 0)) for n in OWNERS if n in a or n in b)

    @cached_property
    def ops(self) -> tuple[Change, ...]:
        """Seconds of a rank's step by kernel or op, most changed first; none of unlike sides."""
        if self.a.is_measured != self.b.is_measured:
            return ()
        return _by_change(self.a.ops, self.b.ops)

    @cached_property
    def flows(self) -> tuple[Change, ...]:
        """Seconds of a rank's transfers by axis and operation, most changed first."""
        return _by_change(self.a.flows, self.b.flows)

    @cached_property
    def numbers(self) -> tuple[Change, ...]:
        """What else a person wants to know of both; names state their units."""
        rows = [dict(_numbers(side)) for side in (self.a, self.b)]
        names = dict.fromkeys([*rows[0], *rows[1]])
        found = [Change(n, rows[0].get(n), rows[1].get(n)) for n in names]
        return tuple(c for c in found if c.a is not None or c.b is not None)

    @cached_property
    def memory(self) -> tuple[Change, ...]:
        """Bytes on the fullest rank by part at its peak; none where a side does not say."""
        a, b = self.a.memory, self.b.memory
        if not (a and b):
            return ()
        return tuple(Change(n, a.get(n, 0.0), b.get(n, 0.0)) for n in dict.fromkeys([*a, *b]))

    @property
    def verdict(self) -> str:
        """What is better, and why, in a sentence."""
        return verdict(self)

    def __str__(self) -> str:
        from simulator.explore.compare.text import comparison_text

        return comparison_text(self)


def compare(a: Side, b: Side) -> Comparison:
    """Return two sides with their differences."""
    return Comparison(a, b)


def _by_change(a: Mapping[str, float], b: Mapping[str, float]) -> tuple[Change, ...]:
    found = [Change(n, a.get(n, 0.0), b.get(n, 0.0)) for n in dict.fromkeys([*a, *b])]
    return tuple(sorted(found, key=lambda c: -abs(c.difference or 0.0)))


def _numbers(side: Side) -> Iterator[tuple[str, float | None]]:
    """Yield what is known of a side, by a name with its unit."""
    yield "step_time_s", to_seconds(side.step)
    if side.scenario is None:
        yield "bubble_fraction", float(side.result.breakdown.bubble_fraction.mean())
        return
    summary = side.result.summary
    rate = "images_per_s" if side.scenario.model.reads_images else "tokens_per_s"
    yield rate, summary.samples_per_s if rate == "images_per_s" else summary.tokens_per_s
    yield "mfu", summary.mfu
    yield "hfu", summary.hfu
    yield "bubble_fraction", summary.bubble_fraction
    yield "device_memory_bytes", summary.device_memory_bytes
    yield "memory_capacity_bytes", summary.memory_capacity_bytes
    if side.bills is not None:
        what = "images" if side.scenario.model.reads_images else "tokens"
        for bill, unit in zip(side.bills, ("step", f"million_{what}"), strict=True):
            yield f"energy_joules_per_{unit}", bill.joules
            yield f"electricity_usd_per_{unit}", bill.electricity_usd
            yield f"devices_usd_per_{unit}", bill.devices_usd


def verdict(c: Comparison) -> str:
    """Return which side trains faster and what the difference of their steps is made of."""
    a, b = (dict(_numbers(side)) for side in (c.a, c.b))
    rate = next((n for n in ("tokens_per_s", "images_per_s") if n in a and n in b), None)
    work = [s.scenario.tokens_per_step for s in (c.a, c.b) if s.scenario is not None]
    text = f"B's step {_length(c)}"
    if rate is not None and len(set(work)) > 1:
        unit = rate.removesuffix("_per_s")
        text = f"B trains {_times(b[rate] or 0.0, a[rate] or 1.0)} {unit} a second; its step "
        text += _length(c)
    if said := _reasons(c):
        text += f": {said}"
    return text + "".join((*_memory(c), *_misfits(c)))


def _times(b: float, a: float) -> str:
    """Return how many more or fewer B is, in words."""
    if b > 2 * a:
        return f"{b / a:.2f} times as many"
    return f"{abs(b / a - 1):.1%} {'more' if b >= a else 'fewer'}"


def _length(c: Comparison) -> str:
    """Return how long B's step is beside A's, without its subject."""
    if not c.difference:
        return f"takes as long as A's, {format_seconds(to_seconds(c.b.step))}"
    a, b = (format_seconds(to_seconds(side.step)) for side in (c.a, c.b))
    instead = f"({b} instead of {a})"
    if c.a.step and c.b.step >= 2 * c.a.step:
        return f"takes {c.b.step / c.a.step:.2f} times as long {instead}"
    share = abs(c.difference) / max(c.a.step, 1)
    return f"is {share:.1%} {'longer' if c.difference > 0 else 'shorter'} {instead}"


def _reasons(c: Comparison) -> str:
    """Return the parts that changed most, in words."""
    changed: dict[str, float] = {}
    for part in c.parts:
        name = SPOKEN[part.name]
        changed[name] = changed.get(name, 0.0) + (part.difference or 0.0)
    total = sum(map(abs, changed.values()))
    least = max(LEAST_SPOKEN * total, LEAST_OF_STEP * c.a.step)
    most = sorted(changed.items(), key=lambda item: -abs(item[1]))[:MOST_SPOKEN]
    return ", ".join(
        f"{format_seconds(to_seconds(abs(ticks)))} {'more' if ticks > 0 else 'less'} {name}"
        for name, ticks in most
        if ticks and abs(ticks) >= least
    )


def _memory(c: Comparison) -> Iterator[str]:
    """Yield by how much the fullest devices differ, where that is much of their memory."""
    if c.a.scenario is None or c.b.scenario is None:
        return
    a, b = c.a.result.summary, c.b.result.summary
    more = b.device_memory_bytes - a.device_memory_bytes
    if abs(more) >= LEAST_MEMORY * a.memory_capacity_bytes:
        held = f"{format_bytes(b.device_memory_bytes)} instead of "
        held += format_bytes(a.device_memory_bytes)
        yield f"; {'more' if more > 0 else 'less'} memory on the fullest device ({held})"


def _misfits(c: Comparison) -> Iterator[str]:
    for letter, side in (("A", c.a), ("B", c.b)):
        if side.scenario is None or side.result.summary.fits:
            continue
        s = side.result.summary
        over = s.device_memory_bytes - s.memory_capacity_bytes
        where = f"by {format_bytes(over)} a device" if over > 0 else "in the memory of its hosts"
        yield f"; {letter} does not fit {where}"
