"""A replay's comparison as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simulator.units import format_bytes, format_seconds
from simulator.validate.torch.compare import (
    COUNTED,
    FEWEST,
    QUIET,
    TAKING_TURNS,
    TOLERANCE,
    Comparison,
    Figure,
)

TITLES = {
    "rebuilt": "rebuilt clock (time computed in each action + measured messages)",
    "wall": "wall clock of quiet steps",
}


UNITS = (("device", ""), ("cores", " cores"), ("threads_per_rank", " thread(s) a rank"))
"""What of a machine is printed, and in what."""


LINKS = {
    "copies": "copy from the host", "messages": "message", "sums": "sum of gradients",
    "peer_sums": "sum of tp ranks",
}  # fmt: skip
"""What a calibration knows by size, and its name."""


def comparison_text(c: Comparison) -> str:
    """Return everything that a replay says, for people."""
    lines = [*_head(c), "", *_same(c)]
    if c.memory:
        lines += ["", *_memory(c)]
    if c.shares_cores:
        return "\n".join([*lines, "", f"times are left out: {c.shares_cores}"])
    if c.rows:
        lines += ["", *_ops(c)]
    for figure in (c.clock, c.wall):
        if figure is not None:
            lines += ["", *_figure(figure)]
    lines += ["", *_steps(c), "", *_idle(c)]
    if c.clock is not None:
        lines += ["", _verdict(c.wall or c.clock)]
    return "\n".join(lines)


def table_text(table: Mapping[str, Any]) -> str:
    """Return a calibration for people."""
    lines = [f"{'op':8} {'median':>11} {'spread':>8} {'wall clock':>11} {'times':>6}"]
    lines += [
        f"{name:8} {format_seconds(op['seconds']):>11} {op['variation']:>8.1%} "
        f"{format_seconds(op['wall_seconds']):>11} {len(op['samples']):>6}"
        for name, op in table["actions"].items()
    ]
    lines.append(f"from one kernel of no work to the next: {format_seconds(table['gap'])}")
    for name, what in LINKS.items():
        lines += [
            f"{what} of {row['bytes']:,} bytes: {format_seconds(row['seconds'])}"
            for row in table[name]
        ]
    return "\n".join(lines)


def _head(c: Comparison) -> list[str]:
    job, machine = c.job, c.machine
    size = f"{job.pp} pipeline ranks"
    for axis in ("dp", "tp"):
        size += f" x {axis} {getattr(job, axis)}" if getattr(job, axis) > 1 else ""
    where = ", ".join(
        f"{machine[key]}{unit}"
        for key, unit in UNITS
        if machine.get(key) is not None
    )  # fmt: skip
    return [
        f"{size}, {len(job.layers)} stages, {job.num_microbatches} microbatches, "
        f"{c.steps} recorded steps after {job.warmup} that warm up",
        f"on {where}; torch {machine.get('torch')}, {machine.get('backend')}, "
        f"Python {machine.get('python')}",
        f"computed time: {machine.get('busy')}",
        f"predicted from {c.source}",
        *_assumed(c),
    ]


def _assumed(c: Comparison) -> list[str]:
    """Return what is done otherwise than the simulator would."""
    lines = []
    if any(len(holders) > 1 for holders in c.job.holders.values()):
        lines.append(
            "gradients are summed when the last backward of a stage has ended, not during it"
        )
    return lines


def _same(c: Comparison) -> list[str]:
    same = c.sameness
    if same is None:
        return ["not compared with one process"]
    verdict = "same as" if same.holds else "NOT the same as"
    return [
        f"{verdict} one process: {same.losses} losses of {same.steps} steps differ by at most "
        f"{same.loss:.1e}, {same.gradients} gradients by {same.gradient:.1e} of their largest "
        f"element ({same.parameter}); tolerance {TOLERANCE:.0e}"
    ]


def _ops(c: Comparison) -> list[str]:
    lines = [f"{'op':8} {'predicted':>11} {'measured':>11} {'error':>8} {'spread':>8} {'times':>6}"]
    lines += [
        f"{row.label:8} {format_seconds(row.predicted):>11} {format_seconds(row.measured):>11} "
        f"{row.error:>+8.1%} {row.variation:>8.1%} {row.times:>6}"
        for row in c.rows
    ]
    seconds, send, _ = c.links.message(c.job.boundary_bytes)
    if c.job.pp > 1:
        lines.append(
            f"a message of {c.job.boundary_bytes:,} bytes takes {format_seconds(seconds)}, of them "
            f"{format_seconds(send)} of the sender"
        )
    return lines


def _figure(f: Figure) -> list[str]:
    def line(name: str, seconds: float, error: float | None) -> str:
        shown = "" if error is None else f"{error:>+8.1%}"
        return f"  {name:46} {format_seconds(seconds):>11} {shown}".rstrip()

    return [
        f"step by the {TITLES[f.clock]}, median of {f.steps}",
        line(f"measured (half its middle half: {f.spread:.1%})", f.measured, None),
        line("engine, op times of these very steps replayed", f.replayed, f.engine_error),
        line(f"engine, op times measured apart ({f.visits} visits)", f.calibrated, f.error),
    ]


def _steps(c: Comparison) -> list[str]:
    if c.job.device in TAKING_TURNS:
        return [
            "ranks take turns on one device: there is no figure by the wall clock, and nothing "
            "here tells how messages or kernels of two ranks get in each other's way"
        ]
    lines = []
    dropped = c.steps - c.quiet
    lines.append(
        f"{c.quiet} of {c.steps} steps were quiet; {dropped} were dropped from the wall clock's "
        f"figure, whose computing took more than {QUIET - 1:.0%} longer by the wall clock than it "
        "computed"
    )
    if c.wall is None:
        lines.append(
            f"fewer than {FEWEST} quiet steps: there is no figure by the wall clock; the host does "
            "other things too"
        )
    return lines


def _idle(c: Comparison) -> list[str]:
    rows = [
        f"{row.what:24} {row.predicted:>10.1%} {row.rebuilt:>14.1%} "
        f"{'-' if row.wall is None else f'{row.wall:.1%}':>11}"
        for row in c.idle
    ]
    head = f"{'share of a step':24} {'predicted':>10} {'rebuilt clock':>14} {'wall clock':>11}"
    return [head, *rows]


def _memory(c: Comparison) -> list[str]:
    rows = [
        f"rank {rank:<5} {format_bytes(held.predicted):>11} {format_bytes(held.measured):>11} "
        f"{held.error:>+8.1%} {format_bytes(held.states):>11}"
        for rank, held in enumerate(c.memory)
    ]
    head = f"{'peak':10} {'predicted':>11} {'measured':>11} {'error':>8} {'states':>11}"
    return [head, *rows, f"measured: {COUNTED[c.job.device]}"]


def _verdict(f: Figure) -> str:
    return (
        f"verdict ({f.clock} clock): engine error {f.engine_error:+.1%}, cost error "
        f"{f.cost_error:+.1%}, noise {f.spread:.1%}"
    )
