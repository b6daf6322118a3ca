"""A checkpoint between two steps: what it writes, how long that takes, what it costs a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from simulator.describe.scenario import Scenario
from simulator.lower.save import parts_of
from simulator.units import format_bytes, format_rate, format_seconds, to_seconds

if TYPE_CHECKING:
    from simulator.report.result import Result


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveUse:
    """What a checkpoint is and costs."""

    state_bytes: float
    """Written in all."""
    snapshot_s: float
    """The longest of a rank."""
    write_s: float
    """From the first rank's beginning to the last one's end."""
    alone_s: float
    """A write of the largest part at its even share, with nothing else on storage."""
    blocked_s: float
    """What the last step takes longer than it would without a checkpoint."""
    beyond_s: float
    """What is written after the end of the last step."""
    restore_s: float
    """Reading the largest part back at its even share of storage, all ranks at once."""


def save_use(result: Result, s: Scenario) -> SaveUse | None:
    """Return what the checkpoint of a scenario's result does; None where there is none."""
    save = s.checkpoint
    if save is None:
        return None
    p, (start, end) = result.tiled, result.times.columns
    snapshots, writes = (
        np.flatnonzero(p.stream == p.streams.index(name)) for name in ("snapshot", "write")
    )
    parts, tiles = parts_of(s), p.num_tiles if save.sharded else s.plan.tp
    finish = int(end[writes].max())
    return SaveUse(
        state_bytes=tiles * sum(part.bytes for part in parts),
        snapshot_s=to_seconds(int((end - start)[snapshots].max())),
        write_s=to_seconds(finish - int(start[writes].min())),
        alone_s=max(part.write for part in parts),
        blocked_s=result.step_time_s - (result.without_save_s or result.step_time_s),
        beyond_s=to_seconds(max(0, finish - result.window[1])),
        restore_s=max(part.read for part in parts),
    )


def save_lines(result: Result, s: Scenario) -> list[str]:
    """Return the lines of the report on the checkpoint, if there is one."""
    use, save = result.summary.checkpoint, s.checkpoint
    if use is None or save is None:
        return []
    rate = format_rate(use.state_bytes / use.write_s, "B") if use.write_s else "no time"
    after = f", {format_seconds(use.beyond_s)} of it after the step" if use.beyond_s else ""
    return [
        f"  checkpoint  {format_bytes(use.state_bytes)} to {save.storage}: snapshot "
        f"{format_seconds(use.snapshot_s)}, write {format_seconds(use.write_s)} ({rate}; alone "
        f"{format_seconds(use.alone_s)}){after}",
        f"              the step is {format_seconds(use.blocked_s)} longer for it; reading it back "
        f"takes {format_seconds(use.restore_s)}",
    ]


def save_assumptions(s: Scenario) -> list[str]:
    """Return what was assumed of a checkpoint that the scenario does not say."""
    save = s.checkpoint
    if save is None:
        return []
    who = "each rank saves its even part" if save.sharded else "the first replica saves all"
    goes_on = "the snapshot" if save.asynchronous else "its write"
    share = (
        "writes share storage with all that meets them there"
        if s.run.network == "fluid"
        else "writes have their even share of storage, as if nothing read from it meanwhile"
    )
    return [
        "a checkpoint holds what parameters are updated from: the fp32 copy (or the weight) and "
        f"the optimizer's states; {who} and computes again after {goes_on}; {share}; serialising "
        "takes no time, and hosts have room for it"
    ]
