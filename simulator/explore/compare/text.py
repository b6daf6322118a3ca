"""A comparison as text for people and as plain values for programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from simulator.explore.compare.comparison import Change, Comparison
from simulator.explore.compare.inputs import collapsed
from simulator.explore.compare.side import Side
from simulator.report.summary import OWNERS, assumptions
from simulator.report.text import SCHEMA_VERSION, table
from simulator.units import format_bytes, format_rate, format_seconds, to_seconds

MOST_INPUTS = 24
"""Keys that the text lists."""

MOST_ROWS = 8
"""Kernels, and kinds of transfer, that the text lists."""

NUMBERS: dict[str, tuple[str, Callable[[float], str]]] = {
    "step_time_s": ("step", format_seconds),
    "tokens_per_s": ("throughput", lambda v: format_rate(v, "tokens")),
    "images_per_s": ("throughput", lambda v: format_rate(v, "images")),
    "mfu": ("MFU", lambda v: f"{v:.1%}"),
    "hfu": ("HFU", lambda v: f"{v:.1%}"),
    "bubble_fraction": ("bubble, of the step", lambda v: f"{v:.1%}"),
    "device_memory_bytes": ("memory, fullest device", format_bytes),
    "memory_capacity_bytes": ("memory of that device", format_bytes),
    **{f"energy_joules_per_{unit}": (f"energy, {said}", lambda v: f"{v / 3.6e6:.4g} kWh")
       for unit, said in (("step", "a step"), ("million_tokens", "a million tokens"),
                          ("million_images", "a million images"))},
    **{f"{what}_usd_per_{unit}": (f"{what}, {said}", lambda v: f"${v:.4g}")
       for what in ("electricity", "devices")
       for unit, said in (("step", "a step"), ("million_tokens", "a million tokens"),
                          ("million_images", "a million images"))},
}  # fmt: skip
"""How the numbers of a side are called and written."""

LATE = (
    "what a measured op waited for is read off its times: a call that ended in the gap before it, "
    "counted from when its last member was there"
)
"""What parts of a measured step rest on."""


def comparison_text(c: Comparison) -> str:
    """Return a report of two sides."""
    blocks = [
        "\n".join([f"A  {_title(c.a)}", f"B  {_title(c.b)}", "", f"  {c.verdict}"]),
        _inputs(c),
        _table("", [_row(n, *NUMBERS[n.name]) for n in c.numbers]),
        _table("mean of a rank's step, by what it does or waits for", _sums(c.parts, _ticks)),
        _path(c),
        _table("kernels that changed most, a rank", _seconds(c.ops)),
        _table("transfers that changed most, a rank, exposed or not", _seconds(c.flows)),
        _table("allocated at the peak of the fullest rank", _sums(c.memory, format_bytes, "sum")),
        *_assumed(c),
    ]  # fmt: skip
    return "\n\n".join(filter(None, blocks))


def _title(side: Side) -> str:
    r, s = side.result, side.scenario
    if s is None:
        return f"{side.name} ({'measured, ' * side.is_measured}{r.tiled.num_ranks} ranks)"
    plan = s.plan
    return (
        f"{side.name}\n   {s.model.name}, {s.cluster.world_size} x {s.cluster.node.device.name}, "
        f"dp {plan.dp} x tp {plan.tp} x pp {plan.pp}, {plan.schedule}, "
        f"{s.num_microbatches} microbatches of {plan.microbatch_size}"
    )


def _inputs(c: Comparison) -> str:
    if c.a.scenario is None or c.b.scenario is None:
        return ""
    inputs = collapsed(c.inputs)
    if not inputs:
        return "inputs: the same"
    rows = [["differs", "A", "B"]]
    for i in inputs[:MOST_INPUTS]:
        more = f" (and {i.with_it} values with it)" if i.with_it else ""
        rows.append([f"{i.key}{more}", *i.texts])
    rest = len(inputs) - MOST_INPUTS
    return table(rows) + (f"\nand {rest} more (all of them in --json)" if rest > 0 else "")


def _row(change: Change, name: str, text: Callable[[float], str]) -> list[str]:
    values = [change.a, change.b, change.difference]
    cells = ["-" if v is None else text(v) for v in values]
    if change.difference is not None and change.difference > 0:
        cells[2] = f"+{cells[2]}"
    if "%" in cells[0] and change.difference is not None:
        cells[2] = f"{100 * change.difference:+.1f} points"
    return [name, *cells]


def _sums(
    parts: Sequence[Change], text: Callable[[float], str], total: str = "sum: the step"
) -> list[list[str]]:
    """Return rows with their sum, or none where there are none."""
    if not parts:
        return []
    a, b = (sum(getattr(p, side) or 0 for p in parts) for side in "ab")
    return [_row(p, p.name, text) for p in (*parts, Change(total, a, b))]


def _ticks(ticks: float) -> str:
    return format_seconds(to_seconds(ticks))


def _path(c: Comparison) -> str:
    if c.path is None:
        return "critical path: known only of scenarios whose replicas are in step and queue nowhere"
    named = [Change(OWNERS[p.name], p.a, p.b) for p in c.path]
    return _table("critical path, by owner", _sums(named, _ticks))


def _seconds(changes: Sequence[Change]) -> list[list[str]]:
    changed = [c for c in changes if c.difference]
    return [_row(c, c.name, format_seconds) for c in changed[:MOST_ROWS]]


def _table(title: str, rows: list[list[str]]) -> str:
    if not rows:
        return ""
    head = f"{title}\n" if title else ""
    return head + table([["", "A", "B", "B - A"], *rows])


def _assumed(c: Comparison) -> list[str]:
    """Return what each side assumes, what both assume once."""
    lists = [
        [*(assumptions(s.scenario) if s.scenario else [LATE] * s.is_measured), *s.result.notes]
        for s in (c.a, c.b)
    ]
    both = [line for line in lists[0] if line in lists[1]]
    out = []
    for head, lines in (
        ("assumed of both:", both),
        ("assumed of A:", [line for line in lists[0] if line not in both]),
        ("assumed of B:", [line for line in lists[1] if line not in both]),
    ):
        if lines:
            out.append("\n".join([head, *(f"  - {line}" for line in lines)]))
    return out


def comparison_dict(c: Comparison) -> dict[str, Any]:
    """Return a comparison as plain values; the keys name their units, ticks are picoseconds."""
    return {
        "schema_version": SCHEMA_VERSION,
        "a": c.a.name,
        "b": c.b.name,
        "verdict": c.verdict,
        "inputs": [{"key": i.key, "a": i.a, "b": i.b} for i in c.inputs],
        "numbers": _changes(c.numbers),
        "step_difference_ticks": c.difference,
        "parts_ticks": _changes(c.parts),
        "critical_path_ticks": None if c.path is None else _changes(c.path),
        "ops_s": _changes(c.ops),
        "transfers_s": _changes(c.flows),
        "memory_bytes": _changes(c.memory),
    }


def _changes(changes: Sequence[Change]) -> list[dict[str, Any]]:
    return [{"name": c.name, "a": c.a, "b": c.b, "difference": c.difference} for c in changes]
