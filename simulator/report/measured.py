"""The report of a run that was measured: what a simulated run's says, of times that were recorded.

Overlap is counted as profilers do: a call lasts from when the rank's own kernel began, its wait for
other ranks included, and what of that time the rank computes is hidden. Exposed communication is
counted as for simulated runs, from when the last member was there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.exchange.kineto import Measured
from simulator.program import NONE, Int64
from simulator.report.breakdown import BUBBLE, COMMUNICATION, WORK
from simulator.report.flows import flows_text
from simulator.report.result import Result
from simulator.report.text import result_dict, table
from simulator.units import TICKS_PER_SECOND, format_seconds, to_seconds

MOST_RANKS = 16
"""Ranks that the table shows, evenly spaced when there are more."""

FIGURES = ("pipeline", "breakdown")
"""Figures that a measured run has."""


class Overlap(NamedTuple):
    """By rank, of the last step, in ticks."""

    communication: Int64
    """Time in which any collective or message is under way on the rank."""
    hidden: Int64
    """Of it what the rank computes."""
    host: Int64
    """Idle time before kernels that the host had not launched yet."""


def result_of(measured: Measured) -> Result:
    """Return a measured run as a result, whose metrics and figures are those of simulated ones."""
    return Result(measured.program, measured.timeline, title=measured.name, notes=measured.notes)


def step_times(result: Result) -> npt.NDArray[np.float64]:
    """Return the seconds of each step, from the end of the one before to its own end."""
    ends = np.concatenate([[0], result.step_ends])
    seconds: npt.NDArray[np.float64] = np.diff(ends) / TICKS_PER_SECOND
    return seconds


def overlap(result: Result, measured: Measured | None = None) -> Overlap:
    """Return how much communication computing hides, and how late the host was, by rank.

    Without `measured` calls last from when all members are there, and the host is never late.
    """
    p, t = result.program, result.timeline
    posted = t.start if measured is None else measured.posted
    launches = np.full(len(p), NONE) if measured is None else measured.launched
    begin, end = result.window
    out = Overlap(*(np.zeros(p.num_ranks, np.int64) for _ in Overlap._fields))
    compute = p.stream == p.streams.index("compute")
    for rank in range(p.num_ranks):
        mine = p.rank == rank
        work = np.flatnonzero(mine & compute & (t.end > begin) & (t.start < end))
        calls = np.flatnonzero(mine & p.is_flow & (t.end > begin) & (posted < end))
        first, last = t.start[work].clip(begin, end), t.end[work].clip(begin, end)
        opened, closed = _union(posted[calls].clip(begin, end), t.end[calls].clip(begin, end))
        out.communication[rank] = (closed - opened).sum()
        out.hidden[rank] = (_before(first, last, closed) - _before(first, last, opened)).sum()
        idle_from = np.concatenate([[begin], last])[:-1]
        launched = launches[work]
        late = np.minimum(launched, first) - idle_from
        out.host[rank] = late[(launched != NONE) & (late > 0)].sum()
    return out


def _union(start: Int64, end: Int64) -> tuple[Int64, Int64]:
    """Return where spans lie, those that meet as one."""
    order = np.argsort(start, kind="stable")
    start = start[order]
    until = np.asarray(np.maximum.accumulate(end[order]), np.int64)
    first = np.flatnonzero(np.append(len(start) > 0, start[1:] > until[:-1])[: len(start)])
    last = np.append(first[1:], len(start))[: len(first)] - 1
    return start[first], until[last]


def _before(start: Int64, end: Int64, at: Int64) -> Int64:
    """Return how much of spans, in order and apart, lies before each time."""
    total = np.concatenate([[0], np.cumsum(end - start)])
    k = np.searchsorted(start, at, side="right")
    inside = np.where(k > 0, np.maximum(end[k - 1] - at, 0), 0) if len(start) else 0
    return np.asarray(total[k] - inside, np.int64)


def measured_text(measured: Measured, result: Result) -> str:
    """Return the report of a measured run as text."""
    return run_text(result, overlap(result, measured), measured.ranks)


def run_text(result: Result, over: Overlap, ranks: Sequence[int]) -> str:
    """Return the report of a run that has no scenario: of traces, measured or run again.

    Args:
        result: the run.
        over: what of its communication is hidden.
        ranks: what to call each rank.
    """
    b, seconds = result.breakdown, step_times(result)
    low, high = b.bubble_fraction.min(), b.bubble_fraction.max()
    exposed = {c: to_seconds(float(b.of(c).mean())) for c in COMMUNICATION}
    shown = ", ".join(f"{c} {format_seconds(s)}" for c, s in exposed.items() if s) or "none"
    total, hidden = int(over.communication.sum()), int(over.hidden.sum())
    lines = [
        result.title,
        f"  run         {len(ranks)} ranks, {len(seconds)} steps, {len(result.tiled):,} ops",
        f"  step        {format_seconds(result.step_time_s)}" + (
            f" (the last; all: median {format_seconds(float(np.median(seconds)))}, "
            f"{format_seconds(float(seconds.min()))} to {format_seconds(float(seconds.max()))})"
            if len(seconds) > 1 else ""
        ),
        f"  computing   {b.of(*WORK).sum() / max(b.window.sum(), 1):.1%} of the step "
        "(mean over ranks)",
        f"  bubble      {b.bubble_fraction.mean():.1%} of the step "
        f"({low:.1%} to {high:.1%} by rank)",
        f"  exposed     {shown} (mean over ranks)",
        "  overlap     " + (f"{hidden / total:.1%} of the time of communication is computed beside"
                            if total else "no communication"),
        *([f"  host        {over.host.sum() / b.window.sum():.1%} of the step kernels are not "
           "launched yet (mean over ranks)"] if over.host.any() else []),
        "",
        _rank_table(result, over, ranks),
    ]  # fmt: skip
    if result.flows:
        lines += ["", flows_text(result.flows, b)]
    return "\n".join(lines) + "".join(f"\nnote: {note}" for note in result.notes)


def _rank_table(result: Result, over: Overlap, ranks: Sequence[int]) -> str:
    b, count = result.breakdown, len(ranks)
    at = np.unique(np.linspace(0, count - 1, min(count, MOST_RANKS)).round().astype(int)).tolist()
    names = [c for c in (*WORK, *COMMUNICATION, *BUBBLE) if b.of(c).any()]
    rows = [["rank", *names, "overlap"]]
    for i in at:
        shares = [f"{b.of(c)[i] / max(b.window[i], 1):.1%}" for c in names]
        total = int(over.communication[i])
        rows.append([str(ranks[i]), *shares,
                     f"{over.hidden[i] / total:.1%}" if total else "-"])  # fmt: skip
    more = f"\n{len(at)} of {count} ranks, evenly spaced" if len(at) < count else ""
    return table(rows) + more


def run_dict(result: Result, over: Overlap) -> dict[str, Any]:
    """Return the report of a run that has no scenario as plain values; keys name their units."""
    document = result_dict(result)
    for key in [key for key in document["ranks"] if "memory" in key]:  # traces state none
        del document["ranks"][key]
    document["ranks"] |= {
        "communication_s": (over.communication / TICKS_PER_SECOND).tolist(),
        "hidden_communication_s": (over.hidden / TICKS_PER_SECOND).tolist(),
    }
    return document | {"name": result.title, "step_times_s": step_times(result).tolist()}


def measured_dict(measured: Measured, result: Result) -> dict[str, Any]:
    """Return the report of a measured run as plain values; the keys name their units."""
    over = overlap(result, measured)
    return run_dict(result, over) | {
        "measured": {
            "ranks": list(measured.ranks),
            "steps": list(measured.steps),
            "clock_corrections_s": (measured.clocks.offset * 1e-9).tolist(),
            "host_late_s": (over.host / TICKS_PER_SECOND).tolist(),
        },
    }
