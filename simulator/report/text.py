"""The report as text for people and as plain values for programs."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from simulator.describe.cluster import Cluster
from simulator.describe.scenario import Scenario
from simulator.lower.layers import active_parameters, num_parameters
from simulator.lower.trainable import parameters
from simulator.program import ACTIONS, NONE
from simulator.report.between import between_lines
from simulator.report.breakdown import BUBBLE, CATEGORIES, COMMUNICATION, WORK
from simulator.report.data import data_lines
from simulator.report.host import host_lines
from simulator.report.samples import attention_name, sample_name, throughput
from simulator.report.save import save_lines
from simulator.report.sharding import sharding_lines, sharding_name
from simulator.report.summary import OWNERS, Summary, assumptions
from simulator.report.training import training_name
from simulator.units import (
    TICKS_PER_SECOND,
    format_bytes,
    format_count,
    format_seconds,
)

if TYPE_CHECKING:
    from simulator.report.result import Result

SCHEMA_VERSION = 1


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as aligned columns; the first row is the header, the first column left."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        right = [f"{cell:>{w}}" for cell, w in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([f"{row[0]:<{widths[0]}}", *right]).rstrip())
    return "\n".join(lines)


def result_text(result: Result) -> str:
    """Return the report of a result as text."""
    notes = "".join(f"\nnote: {note}" for note in result.notes)
    if result.scenario is None:
        return bare_text(result) + notes
    lines = [
        *headline(result.scenario),
        *_numbers(result, result.scenario, result.summary),
        *host_lines(result, result.scenario),
        *data_lines(result, result.scenario),
        *save_lines(result, result.scenario),
        *between_lines(result, result.scenario),
        *sharding_lines(result, result.scenario.plan),
        "",
        _stage_table(result),
        *_communication(result),
        *_busiest_links(result),
        "",
        "assumed:",
        *(f"  - {line}" for line in assumptions(result.scenario)),
    ]
    return "\n".join(lines) + notes


def headline(s: Scenario) -> list[str]:
    """Return what was simulated: a name, then lines of a label and what stands for it."""
    plan, run, cluster = s.plan, s.run, s.cluster
    chunks = f" x {plan.chunks} chunks" if plan.chunks > 1 else ""
    inner = f"cp {plan.cp} x " if plan.cp > 1 else ""
    if plan.ep > 1 or plan.etp > 1:
        chunks += f", ep {plan.ep}" + (f" x etp {plan.etp}" if plan.etp > 1 else "")
    sharding = f", {sharding_name(plan)}" if plan.shards > 1 else ""
    held = parameters(s)
    trained = f", {format_count(held.trained)} of them trained" * (not run.trains_all)
    active = active_parameters(s.model)
    trained += f", of which a token meets {format_count(active)}" * (active < held.total)
    return [
        s.name,
        f"  model       {s.model.name}, {format_count(held.total)} parameters{trained}",
        f"  cluster     {cluster_name(cluster)}",
        f"  plan        dp {plan.dp} x {inner}tp {plan.tp} x pp {plan.pp}{chunks}, "
        f"{plan.schedule}, {s.num_microbatches} microbatches of {plan.microbatch_size}, "
        f"recompute {plan.recompute}"
        + ("" if plan.placement == "block" else f", placement {plan.placement_name}")
        + sharding,
        f"  run         global batch {run.global_batch_size} {sample_name(s)}, "
        f"{run.precision}, {run.optimizer}{attention_name(s)}{training_name(run)}",
        "",
    ]  # fmt: skip


def cluster_name(cluster: Cluster) -> str:
    """Return how many devices there are in how many nodes, by kind."""
    each, count = cluster.ranks_per_node, Counter(cluster.kind_of_node)
    parts = []
    for kind, node in enumerate(cluster.kinds):
        used = "" if each == node.num_devices else f", {each} of {node.num_devices} devices used"
        plural = "s" if count[kind] > 1 else ""
        parts.append(
            f"{count[kind] * each} x {node.device.name} in {count[kind]} "
            f"node{plural} {node.name}{used}"
        )
    return "; ".join(parts)


def _numbers(result: Result, s: Scenario, summary: Summary) -> list[str]:
    b = result.breakdown
    low, high = b.bubble_fraction.min(), b.bubble_fraction.max()
    exposed = {k: v for k, v in summary.exposed_communication_s.items() if v}
    communication = ", ".join(f"{k} {format_seconds(v)}" for k, v in exposed.items()) or "none"
    verdict = "fits" if summary.fits_device else "DOES NOT FIT"
    return [
        f"  step        {format_seconds(summary.step_time_s)} "
        f"(first {format_seconds(summary.first_step_s)})",
        f"  throughput  {throughput(s, summary)}",
        f"  MFU         {summary.mfu:.1%}   HFU {summary.hfu:.1%}",
        f"  bubble      {summary.bubble_fraction:.1%} of the step "
        f"({low:.1%} to {high:.1%} by rank), {summary.bubble_ratio:.1%} of the work",
        f"  exposed     {communication} (mean over ranks)",
        *_slowed(summary),
        f"  memory      {format_bytes(summary.device_memory_bytes)} of "
        f"{format_bytes(summary.memory_capacity_bytes)} "
        f"on rank {summary.peak_memory_rank}: {verdict} "
        f"({format_bytes(summary.peak_memory_bytes)} allocated, "
        f"{format_bytes(summary.reserved_memory_bytes)} reserved)",
        f"  bottleneck  {summary.bottleneck}",
        "  owners      "
        + ", ".join(f"{OWNERS[k]} {v:.1%}" for k, v in summary.shares.items() if v >= 0.0005),
    ]


def _slowed(summary: Summary) -> list[str]:
    """Return how much longer work takes because of communication beside it."""
    seconds = summary.slowed_by_communication_s
    if seconds < 0.0005 * summary.step_time_s:
        return []
    share = seconds / summary.step_time_s
    return [
        f"  slowed      compute by {format_seconds(seconds)} ({share:.1%} of the step), by "
        "communication beside it (mean over ranks)"
    ]


def _communication(result: Result) -> list[str]:
    if not result.flows:
        return []
    from simulator.report.flows import flows_text

    return ["", flows_text(result.flows, result.breakdown)]


def _busiest_links(result: Result) -> list[str]:
    if result.moves is None:
        return []
    from simulator.report.links import links_text

    return ["", "busiest links", links_text(result.links, 5)]


def stages_head(result: Result) -> str:
    """Return the head of a column of ranks by what they hold."""
    return "stages" if max(map(len, result.stages)) > 1 else "stage"


def stages_text(stages: Sequence[int]) -> str:
    """Return the stages of a rank as a short list."""
    names = list(map(str, stages))
    return ", ".join(names if len(names) < 5 else [*names[:2], "...", names[-1]])


def _stage_table(result: Result) -> str:
    """Return a row for the ranks of each stage or stages: mean times, and the highest memory."""
    b, ranks_of = result.breakdown, result.tiled.tile_ranks
    present = [c for c in CATEGORIES if c in WORK or c in BUBBLE or b.of(c).any()]
    rows = [[stages_head(result), "ranks", *present, "device memory"]]
    for stages, ranks in zip(result.stages, ranks_of, strict=True):
        shares = [f"{b.shares[CATEGORIES.index(c), ranks].mean():.1%}" for c in present]
        peak = format_bytes(result.device_memory_bytes[ranks].max())
        rows.append([stages_text(stages), str(len(ranks)), *shares, peak])
    return table(rows)


def bare_text(result: Result) -> str:
    """Return the report of a bare schedule: its grid over time and its bubble."""
    b = result.breakdown
    chunks = ", of one stage each" if stages_head(result) == "stages" else ""
    return "\n".join([
        schedule_text(result),
        "",
        f"step {result.step_time_s:g} s; bubble {b.bubble_fraction.mean():.4f} of the step, "
        f"{b.bubble.sum() / max(1, b.of(*WORK).sum()):.4f} of the work",
        f"activations in flight by rank{chunks}: "
        + " ".join(f"{peak:.0f}" for peak in result.memory.peak),
    ])  # fmt: skip


MAX_COLUMNS = 120
"""Time units that a schedule's text shows; a finer or longer one is listed in order instead."""


def schedule_text(result: Result) -> str:
    """Return a schedule as papers draw it, in text: a row a rank, a column a unit of time."""
    p, t = result.program, result.timeline
    ops = np.flatnonzero(p.stream == p.streams.index("compute"))
    moments = np.concatenate([t.start[ops], t.end[ops]])
    unit = int(np.gcd.reduce(moments)) or 1
    if t.makespan // unit > MAX_COLUMNS:
        return _in_order(result, ops)
    width = max((len(_cell(result, op)) for op in ops.tolist()), default=1) + 1
    rows = [["."] * (t.makespan // unit) for _ in range(p.num_ranks)]
    for op in ops.tolist():
        row, begin, end = rows[p.rank[op]], t.start[op] // unit, t.end[op] // unit
        if end > begin:
            row[begin:end] = [_cell(result, op), *["=" * width] * (end - begin - 1)]
    label = len(str(p.num_ranks - 1))
    return "\n".join(
        f"rank {rank:>{label}} |" + _joined(row, width) for rank, row in enumerate(rows)
    )


def _cell(result: Result, op: int) -> str:
    p = result.program
    number = "" if p.microbatch[op] == NONE else str(p.microbatch[op])
    stage = "" if p.stage.max() < p.num_ranks else str(p.stage[op])
    return f"{stage}{ACTIONS[p.action[op]]}{number}"


def _joined(row: list[str], width: int) -> str:
    """Join cells of one width; a cell that goes on is filled with '='."""
    out = []
    for cell, following in zip(row, [*row[1:], ""], strict=True):
        goes_on = following.startswith("=")
        out.append(cell.ljust(width, "=" if goes_on else " "))
    return "".join(c.replace("=" * width, "=" * (width - 1) + " ") if not f.startswith("=") else c
                   for c, f in zip(out, [*row[1:], ""], strict=True)).rstrip()  # fmt: skip


def _in_order(result: Result, ops: np.ndarray[Any, Any]) -> str:
    p = result.program
    rows: list[list[str]] = [[] for _ in range(p.num_ranks)]
    for op in ops.tolist():
        rows[p.rank[op]].append(_cell(result, op))
    return "\n".join(f"rank {rank} |{' '.join(row)}" for rank, row in enumerate(rows))


def result_dict(result: Result) -> dict[str, Any]:
    """Return the report as plain values; the keys name their units."""
    b = result.breakdown
    ranks = {
        f"{category}_s": (b.of(category) / TICKS_PER_SECOND).tolist() for category in CATEGORIES
    }
    out: dict[str, Any] = {"schema_version": SCHEMA_VERSION}
    if result.scenario is not None:
        out["scenario"] = dataclasses.asdict(result.scenario)
        counts, model = parameters(result.scenario), result.scenario.model
        idle = num_parameters(model) - active_parameters(model)
        out["parameters"] = counts._asdict() | {"active": counts.total - idle}
        out["summary"] = {**dataclasses.asdict(result.summary), "fits": result.summary.fits}
        out["assumptions"] = assumptions(result.scenario)
    else:
        out["summary"] = {
            "step_time_s": result.step_time_s,
            "bubble_fraction": float(b.bubble_fraction.mean()),
        }
    out["notes"] = list(result.notes)
    out["num_ops"] = len(result.tiled)
    out["flows"] = [use._asdict() for use in result.flows]
    if result.moves is not None:
        from simulator.report.links import links_dict

        out["links"] = links_dict(result.links)
    out["ranks"] = {
        "bubble_fraction": b.bubble_fraction.tolist(),
        "exposed_communication_s": (b.of(*COMMUNICATION) / TICKS_PER_SECOND).tolist(),
        "peak_memory_bytes": result.peak_memory_bytes.tolist(),
        "reserved_memory_bytes": result.reserved_memory_bytes.tolist(),
        "device_memory_bytes": result.device_memory_bytes.tolist(),
        **ranks,
    }
    return out
