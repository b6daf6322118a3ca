"""The figure of memory over time: what fills the fullest rank, and a rank of each stage."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from simulator.hardware.outside import outside
from simulator.lower.memory import more_buffer_bytes, rank_memory
from simulator.program import Int64, Memory
from simulator.report import palette
from simulator.report.palette import COLOURS, INK, Float64, text_width
from simulator.units import UNITS

if TYPE_CHECKING:
    from simulator.report.result import Result

LASTING_PARTS = ("weights", "gradients", "optimizer", "buffers")

MEMORY_PARTS = ("context", *LASTING_PARTS, "gathered", "unreduced", "activations", "transients")
"""What fills memory, from the bottom: what torch's allocator does not give out, what is alive all
the time, what comes and goes."""

GB = UNITS["bytes"]["GB"]


def memory(result: Result, path: str | Path | None = None) -> Figure:
    """Draw what fills the fullest rank beside its capacity, and below it a rank of each stage.

    Of a bare schedule, which has no sizes, draw how many microbatches each rank keeps.

    Raises:
        DescriptionError: when the figure cannot be saved.
    """
    palette.check_path(path)
    ranks = palette.sample(result.stage_ranks)
    sized, count = result.scenario is not None, result.tiled.num_ranks
    many = len(ranks) > 1 or not sized
    some = f"{len(ranks)} of {count} ranks, " if len(ranks) < count else ""
    some += "" if sized else "microbatches kept for backward, "
    drawn = {part for rank in ranks.tolist() for part in memory_parts(result, rank)[1]}
    handles: list[Any] = [palette.swatch(part) for part in MEMORY_PARTS if part in drawn]
    if sized:
        handles.append(Line2D([], [], color=COLOURS["capacity"], ls="--", label="capacity"))
    labels = [palette.rank_label(result, rank) for rank in ranks.tolist()]
    peaks = [_peak(result, rank) for rank in ranks.tolist()]
    begin, end = result.window
    with palette.style():
        figure, axes = palette.sheet(
            6.4,
            [2.3] * sized + [min(0.5, 8 / len(ranks)) * len(ranks)] * many,
            titles=palette.titles_of(result, f"rows: {some}all to one scale" if many else ""),
            handles=handles,
            labels=[*(labels if many else ()), "0000000"],
            right=0.25 + max(text_width(peak, 9) for peak in peaks) / 72 * many,
        )
        for ax in axes:
            unit = palette.time_axis(ax, begin, end, since_last_step=begin > 0)
            ax.set_xlabel(ax.get_xlabel() if ax is axes[-1] else "")
        if sized:
            _draw_fullest(axes[0], result, unit)
        if many:
            palette.row_axis(axes[-1], labels, 0.6)
            _draw_each(axes[-1], result, ranks.tolist(), unit)
    return palette.save(figure, path)


def _draw_fullest(ax: Axes, result: Result, unit: float) -> None:
    """Stack what fills the rank that needs most memory, below the capacity of its device."""
    assert result.scenario is not None  # the caller asks only then
    rank, room = result.summary.peak_memory_rank, result.summary.memory_capacity_bytes / GB
    time, heights = memory_parts(result, rank)
    _stack(ax, time / unit, {name: high / GB for name, high in heights.items()}, 0.0, 1.0)
    ax.axhline(room, color=COLOURS["capacity"], ls="--", lw=1.3, gid="capacity")
    ax.set(ylim=(0, 1.25 * max(room, result.device_memory_bytes[rank] / GB)), ylabel="memory (GB)")
    name, peak = palette.rank_label(result, rank), _peak(result, rank)
    ax.text(0.01, 0.98, f"{name}, the fullest: {peak} of {room:.0f} GB", va="top",
            transform=ax.transAxes)  # fmt: skip


def _draw_each(ax: Axes, result: Result, ranks: list[int], unit: float) -> None:
    """Draw a row for each rank, all to one scale, with its peak at the right."""
    scale = max(float(result.device_memory_bytes[ranks].max()), 1.0)
    for row, rank in enumerate(ranks):
        time, heights = memory_parts(result, rank)
        _stack(ax, time / unit, heights, row + 0.96, -0.82 / scale)
        ax.text(1.01, row + 0.6, _peak(result, rank), va="center_baseline",
                transform=ax.get_yaxis_transform())  # fmt: skip


def _stack(ax: Axes, x: Float64, parts: dict[str, Float64], low: float, step: float) -> None:
    base = np.full(len(x), low)
    for name, part in parts.items():
        top = base + step * part
        ax.fill_between(x, base, top, step="post", gid=name, **palette.area(name))
        base = top
    ax.step(x, base, where="post", color=INK, lw=0.8)


def _peak(result: Result, rank: int) -> str:
    peak = float(result.device_memory_bytes[rank])
    return f"peak {peak / GB:.1f} GB" if result.scenario else f"peak {peak:.0f}"


def memory_parts(result: Result, rank: int) -> tuple[Int64, dict[str, Float64]]:
    """Return ticks since the last step began, and the bytes of a rank from then on by what for.

    Parts that never hold anything are left out. What the allocator has reserved beyond what is
    allocated is not shown, for that is known at the peak only.
    """
    begin, end = result.window
    passing = {part: result.memory.only(part).of_rank(rank) for part in Memory._fields}
    ticks = np.unique(np.concatenate([[begin, end], *(time for time, _ in passing.values())]))
    ticks = ticks[(ticks >= begin) & (ticks <= end)]
    held = {
        part: np.append(0.0, size)[np.searchsorted(time, ticks, side="right")]
        for part, (time, size) in passing.items()
    }
    parts: dict[str, Float64] = {}
    s = result.scenario
    if s is not None:
        own = rank_memory(s)[palette.place_of(result, rank)]
        lasting = {n: float(getattr(own, n)) for n in LASTING_PARTS}
        lasting["buffers"] += float(more_buffer_bytes(s)[rank])
        lasting["context"] = float(outside(s)[rank])
        parts = {name: np.full(len(ticks), size) for name, size in lasting.items()}
    parts |= held
    return ticks - begin, {n: parts[n] for n in MEMORY_PARTS if n in parts and parts[n].any()}
