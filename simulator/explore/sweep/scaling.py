"""Scaling curves of a sweep over devices: how much more devices help, and what keeps them from it.

A curve holds everything but the number of devices; its global batch is fixed (strong scaling) or
grows with the devices (weak scaling). Efficiency is throughput a device over that of the curve's
fewest devices. Communication is what is exposed: what computing hides costs no time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from simulator.errors import DescriptionError
from simulator.explore.sweep.columns import WORK
from simulator.explore.sweep.frame import written
from simulator.explore.sweep.lines import telling
from simulator.explore.sweep.point import DEVICES, FIXED, SAMPLES
from simulator.explore.sweep.row import OK, Row
from simulator.explore.sweep.swept import Swept
from simulator.report.breakdown import COMMUNICATION, OF_HOSTS
from simulator.report.summary import OWNERS
from simulator.report.text import table
from simulator.units import format_count, format_seconds


@dataclass(frozen=True, slots=True)
class Curve:
    """Rows that differ in the number of devices, the fewest first; all of them fit in memory."""

    group: str
    """What sets it apart from curves of the same batch, as the kind of node."""
    samples: object
    """Of a step for each device, or `FIXED`."""
    rows: tuple[Row, ...]
    left_out: tuple[tuple[int, str], ...] = ()
    """Devices on which the plan is refused or does not fit, and why."""

    @property
    def regime(self) -> str:
        """How the global batch follows the devices, in a word or two."""
        return "strong" if self.samples == FIXED else f"{written(self.samples)} a device"

    @property
    def efficiency(self) -> list[float]:
        """Throughput a device over that of the fewest devices."""
        each = [row["samples_per_s"] / row["ranks"] for row in self.rows]
        return [value / each[0] for value in each]

    @property
    def overtaken(self) -> tuple[int, int] | None:
        """Devices between which exposed communication comes to take as long as work.

        The fewest twice where it does from the start, None where it never does.
        """
        before = None
        for row in self.rows:
            if ratio(row) >= 1:
                return (row["ranks"] if before is None else before), row["ranks"]
            before = row["ranks"]
        return None


def ratio(row: Row) -> float:
    """Return exposed communication between devices over work."""
    work = float(row["work_fraction"])
    exposed = sum(row[f"exposed_{kind}_fraction"] for kind in COMMUNICATION if kind not in OF_HOSTS)
    return exposed / work if work else math.inf


@dataclass(frozen=True, slots=True)
class Scaling:
    """All curves of a sweep."""

    name: str
    curves: tuple[Curve, ...]

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of groups, in order."""
        return tuple(dict.fromkeys(curve.group for curve in self.curves))

    @property
    def regimes(self) -> tuple[str, ...]:
        """How batches follow the devices, in order."""
        return tuple(dict.fromkeys(curve.regime for curve in self.curves))

    @property
    def node_size(self) -> int | None:
        """Devices of a whole node, where all curves that leave one have equal nodes."""
        several = [r for c in self.curves for r in c.rows if r["num_nodes"] > 1]
        sizes = {row["ranks"] // row["num_nodes"] for row in several}
        return sizes.pop() if len(sizes) == 1 else None


def scaling(swept: Swept) -> Scaling:
    """Return the scaling curves of a sweep over devices.

    Raises:
        DescriptionError: when no curve has a row that runs and fits.
    """
    others = [key for key in swept.varied if key not in (DEVICES, SAMPLES)]
    names = telling(swept.rows, others)
    found: dict[tuple[str, object], list[Row]] = {}
    for row in swept.rows:
        group = ", ".join(written(row.get(key, "-")) for key in names)
        found.setdefault((group, row.get(SAMPLES, FIXED)), []).append(row)
    curves = []
    for (group, samples), rows in found.items():
        rows = sorted(rows, key=lambda row: int(row[DEVICES]))
        good = tuple(row for row in rows if row["status"] == OK and row["fits"])
        bad = tuple((row[DEVICES], row["reason"]) for row in rows if row not in good)
        if good:
            curves.append(Curve(group, samples, good, bad))
    if not curves:
        raise DescriptionError(
            "no point of the sweep runs and fits in memory, so there is no scaling to draw"
        )
    return Scaling(swept.name, tuple(curves))


def spent(row: Row) -> str:
    """Return what most of a step goes to, in two words at most."""
    shares = {OWNERS[bound]: row[f"{bound}_bound_fraction"] for bound in WORK}
    shares |= {_named(kind, row): row[f"exposed_{kind}_fraction"] for kind in COMMUNICATION}
    return _largest(shares | {OWNERS["bubble"]: row["bubble_fraction"]})


def lost(row: Row, first: Row) -> str:
    """Return what makes a sample take more device-seconds than in a curve's first row.

    Shares are of the step, and sum to what is missing to an efficiency of 1.
    """
    now, then = (_device_seconds(r) for r in (row, first))
    total = sum(now.values())
    parts = {
        "optimizer": "optimizer, shared by fewer microbatches",
        "work": "forward and backward",
        "bubble": OWNERS["bubble"],
        **{kind: _named(kind, row) for kind in COMMUNICATION},
    }
    return _largest({words: (now[part] - then[part]) / total for part, words in parts.items()})


def _device_seconds(row: Row) -> dict[str, float]:
    """Return device-seconds of a sample by what they go to."""
    each = row["ranks"] / row["samples_per_s"]
    shares = {
        "optimizer": row["optimizer_fraction"],
        "work": row["work_fraction"] - row["optimizer_fraction"],
        "bubble": row["bubble_fraction"],
        **{kind: row[f"exposed_{kind}_fraction"] for kind in COMMUNICATION},
    }
    return {name: share * each for name, share in shares.items()}


def _named(kind: str, row: Row) -> str:
    """Return a kind of communication, and how far it reaches."""
    if kind in OF_HOSTS:
        return OWNERS[kind]
    return f"{OWNERS[kind]} {'between nodes' if row['num_nodes'] > 1 else 'in the node'}"


def _largest(shares: Mapping[str, float]) -> str:
    """Return the two largest shares in words, and what is below zero."""
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    most = [f"{share:.0%} {words}" for words, share in ordered[:2] if share >= 0.005]
    less = [f"less {-share:.0%} {words}" for words, share in ordered if share <= -0.005]
    return ", ".join([*most, *less]) or "-"


def scaling_text(s: Scaling) -> str:
    """Return every curve as a table with what limits each point, and what follows from it."""
    lines = [
        "efficiency: throughput a device over that of the fewest devices; lost: what is missing to "
        "it, and to what; communication is what computing does not hide"
    ]
    for curve in s.curves:
        lines += ["", *_curve_lines(curve)]
    return "\n".join([*lines, "", *_accumulation(s)]).rstrip()


def _curve_lines(curve: Curve) -> Iterator[str]:
    first = curve.rows[0]
    batch = (
        f"global batch {first['global_batch_size']:,}"
        if curve.samples == FIXED
        else f"{written(curve.samples)} samples a device"
    )
    name = f"{curve.group}, " if curve.group else ""
    kind = "strong" if curve.samples == FIXED else "weak"
    yield f"{name}{kind} scaling, {batch}"
    paid = any(row.get("run_devices_usd") is not None for row in curve.rows)
    timed = "run_time_s" in first
    head = ["devices", "nodes", "accumulates", "step", "efficiency",
            *(["run"] if timed else []), *(["cost"] if paid else []),
            "spent on", "lost to"]  # fmt: skip
    rows = [
        [
            f"{row['ranks']:,}", f"{row['num_nodes']:,}", f"{row['num_microbatches']:,}",
            format_seconds(row["step_time_s"]), f"{efficiency:.1%}",
            *([days(row["run_time_s"])] if timed else []),
            *([money(row["run_devices_usd"])] if paid else []),
            spent(row), lost(row, first),
        ]
        for row, efficiency in zip(curve.rows, curve.efficiency, strict=True)
    ]  # fmt: skip
    for column in (-2, -1):  # texts begin at the left
        width = max(len(row[column]) for row in [head, *rows])
        for row in [head, *rows]:
            row[column] = f"{row[column]:<{width}}"
    yield table([head, *rows])
    at = curve.overtaken
    yield (
        f"exposed communication stays below work up to {curve.rows[-1]['ranks']:,} devices"
        if at is None
        else f"exposed communication overtakes work {between(at)}"
    )
    for devices, reason in curve.left_out:
        yield f"{devices:,} devices left out: {reason}"


def _accumulation(s: Scaling) -> Iterator[str]:
    """Say what the same steps take on the fewest devices, which accumulate more, of each group."""
    for curve in s.curves:
        few, many = curve.rows[0], curve.rows[-1]
        if curve.samples != FIXED or few is many:
            continue
        more = few["num_microbatches"] / many["num_microbatches"]
        slower = few["step_time_s"] / many["step_time_s"]
        cheaper = (few["step_time_s"] * few["ranks"]) / (many["step_time_s"] * many["ranks"])
        name = f"{curve.group}: " if curve.group else ""
        yield (
            f"{name}{few['ranks']:,} device{'s' * (few['ranks'] > 1)} accumulating {more:,.4g} "
            f"times as much: {slower:,.4g} times as long as {many['ranks']:,} for the same step, "
            f"at {cheaper:.0%} of the device-hours"
        )


def between(devices: tuple[int, int]) -> str:
    """Return where something happens, in words."""
    low, high = devices
    return f"from {low:,} devices on" if low == high else f"between {low:,} and {high:,} devices"


def days(seconds: float) -> str:
    """Return the time of a run in a unit that suits it."""
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{seconds / size:,.3g} {unit}"
    return format_seconds(seconds)


def money(usd: float | None) -> str:
    """Return a price."""
    return "-" if usd is None else f"${format_count(usd)}"
