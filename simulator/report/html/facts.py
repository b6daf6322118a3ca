"""What a page says in words and numbers: the report's own, formatted as the report formats them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from simulator.describe.scenario import Scenario
from simulator.program import NONE
from simulator.report.breakdown import CATEGORIES
from simulator.report.flows import FlowUse
from simulator.report.samples import throughput
from simulator.report.summary import OWNERS, Summary, assumptions
from simulator.report.text import headline, stages_text
from simulator.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from simulator.report.result import Result


NO_LINKS = (
    "Flows share no links in this run (run.network is alpha-beta), so that no use of links is "
    'known; run.network = "fluid" gives it.'
)


class Metric(NamedTuple):
    """A number that a person wants to know first."""

    name: str
    text: str
    """With its unit."""
    note: str
    """What it is of, or a second number beside it."""
    value: float
    """To compare with another run's."""
    better: int
    """1 where more is better, -1 where less is, 0 where neither is."""


def facts(result: Result) -> dict[str, Any]:
    """Return all that a page says of a result beside its timeline, memory and links."""
    s = result.scenario
    begin, end = result.window
    return {
        "name": s.name if s is not None else result.title,
        "lines": _lines(s),
        "about": _about(result),
        "window": [begin, end],
        "makespan": result.times.makespan,
        "ranks": result.tiled.num_ranks,
        "numOps": len(result.tiled),
        "metrics": [m._asdict() for m in (_metrics(result, s) if s else _bare_metrics(result))],
        "verdict": _verdict(result.summary) if s else "",
        "owners": _owners(result.summary) if s else [],
        "categories": list(CATEGORIES),
        "meanShares": result.breakdown.shares.mean(axis=1).tolist(),
        "stepTime": result.step_time_s,
        "steps": len(result.step_ends),
        "microbatches": int(result.tiled.microbatch.max(initial=NONE)) + 1,
        "sized": s is not None,
        "capacity": result.summary.memory_capacity_bytes if s else 0,
        "placeWord": "stage" if max(map(len, result.stages), default=1) == 1 else "position",
        "noLinks": NO_LINKS if s else "No cluster is described, and so no links.",
        "places": _places(result),
        "flows": [_flow(use) for use in result.flows],
        "assumptions": assumptions(s) if s else [],
        "notes": list(result.notes),
    }


def _lines(s: Scenario | None) -> list[list[str]]:
    """Return label and text of what was simulated."""
    if s is None:
        return []
    lines = (re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in headline(s)[1:])
    return [pair for pair in lines if len(pair) == 2]


def _about(result: Result) -> str:
    """Return what is known of a run that no scenario describes."""
    if result.scenario is not None:
        return ""
    count = result.tiled.num_ranks
    return f"{count:,} rank{'s' * (count > 1)}" + ", stated times" * bool(result.actions)


def _metrics(result: Result, s: Scenario) -> list[Metric]:
    m, b = result.summary, result.breakdown
    exposed = m.exposed_communication_s
    most = max(exposed, key=lambda kind: exposed[kind])
    low, high = b.bubble_fraction.min(), b.bubble_fraction.max()
    total = sum(exposed.values())
    return [
        Metric("step time", format_seconds(m.step_time_s),
               f"first step {format_seconds(m.first_step_s)}", m.step_time_s, -1),
        Metric("throughput", *_halves(throughput(s, m)), m.samples_per_s, 1),
        Metric("MFU", f"{m.mfu:.1%}", f"HFU {m.hfu:.1%}", m.mfu, 1),
        Metric("bubble", f"{m.bubble_fraction:.1%}", f"{low:.1%} to {high:.1%} by rank",
               m.bubble_fraction, -1),
        Metric("exposed communication", format_seconds(total) if total else "none",
               f"{total / m.step_time_s:.1%} of the step, most of it {most}" if total else
               "mean over ranks", total, -1),
        Metric("memory", format_bytes(m.device_memory_bytes),
               f"of {format_bytes(m.memory_capacity_bytes)}, rank {m.peak_memory_rank}: "
               + ("fits" if m.fits_device else "does not fit"), m.device_memory_bytes, -1),
    ]  # fmt: skip


def _halves(text: str) -> tuple[str, str]:
    first, _, rest = text.partition(", ")
    return first, rest


def _bare_metrics(result: Result) -> list[Metric]:
    b = result.breakdown
    fraction = float(b.bubble_fraction.mean())
    ratio = b.bubble.sum() / max(1, b.of("forward", "backward", "optimizer").sum())
    peak = float(result.memory.peak.max(initial=0.0))
    out = [
        Metric("step time", format_seconds(result.step_time_s), "", result.step_time_s, -1),
        Metric("bubble", f"{fraction:.1%}", f"{ratio:.1%} of the work", fraction, -1),
    ]
    if peak > 0:
        where = "microbatches, on the fullest rank"
        out.append(Metric("activations in flight", f"{peak:.0f}", where, peak, -1))
    return out


def _verdict(m: Summary) -> str:
    return f"{m.bottleneck[0].upper()}{m.bottleneck[1:]}"


def _owners(m: Summary) -> list[list[Any]]:
    """Return what owns the step, most first: a name and a share."""
    order = sorted(m.shares.items(), key=lambda item: -item[1])
    return [[OWNERS[kind], share] for kind, share in order if share >= 0.0005]


def _places(result: Result) -> list[dict[str, Any]]:
    """Return what each place of a pipeline is called, and where the time of its ranks goes."""
    b, ranks_of = result.breakdown, result.tiled.tile_ranks
    plain = len(ranks_of) == 1 or max(map(len, result.stages), default=0) == 0
    out = []
    for stages, ranks in zip(result.stages, ranks_of, strict=True):
        word = f"stage{'s' * (len(stages) > 1)} {stages_text(stages)}"
        out.append(
            {
                "name": "all ranks" if plain else word,
                "stages": stages,
                "shares": b.shares[:, ranks].mean(axis=1).tolist(),
                "memory": _held(result, float(result.device_memory_bytes[ranks].max())),
                "bubble": float(b.bubble_fraction[ranks].mean()),
            }
        )
    return out


def _held(result: Result, most: float) -> str:
    """Return the memory of a rank in words; a bare schedule counts microbatches."""
    if result.scenario is not None:
        return format_bytes(most)
    return f"keeps {most:.0f}" if most else ""


def _flow(use: FlowUse) -> dict[str, Any]:
    """Return a row of the table of communication."""
    rates = (use.algbw_bytes_per_s, use.busbw_bytes_per_s)
    return {
        "axis": use.axis,
        "cells": [
            use.operation, format_bytes(use.payload_bytes), f"{use.ranks:,}",
            f"{use.nodes:,}" if use.nodes else "-", f"{use.calls:,}",
            " ".join(filter(None, (use.algorithm, use.protocol))) or "-",
            format_seconds(use.transfer_mean_s),
            *("-" if rate is None else format_rate(rate, "B") for rate in rates),
            format_seconds(use.wait_mean_s), format_seconds(use.transfer_per_rank_s),
        ],
    }  # fmt: skip


FLOW_HEAD = ("communication", "payload", "ranks", "nodes", "calls", "by", "transfer", "algbw",
             "busbw", "wait", "a rank")  # fmt: skip
"""Columns of the table of communication."""
