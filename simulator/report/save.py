"""Checkpoints between steps: what they write, how long that takes, what they cost, and reading."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from simulator.describe.scenario import Scenario
from simulator.hardware.compute import work_seconds
from simulator.lower.restore import held_state, load_work
from simulator.lower.save import STREAMS, parts_of, steps_of
from simulator.program import Int64, Program
from simulator.units import format_bytes, format_rate, format_seconds, to_seconds

if TYPE_CHECKING:
    from simulator.report.result import Result


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveUse:
    """What checkpoints are and cost; where several are taken, the longest, but for `blocked_s`."""

    state_bytes: float
    """Written in all."""
    count: int
    """Checkpoints taken."""
    snapshot_s: float
    """The longest of a rank."""
    write_s: float
    """From the first rank's beginning to the last one's end."""
    alone_s: float
    """A write of the largest part at its even share, with nothing else on storage."""
    waited_s: float
    """A snapshot's wait for the checkpoint before to be complete (back-pressure)."""
    blocked_s: float
    """What a checkpoint keeps training from, mean of them: how much longer the steps after the
    first take than without any."""
    beyond_s: float
    """What is written after the end of the last step."""
    restore_s: float
    """Reading all of the state back, and copying it to devices; with `checkpoint.restore` from the
    run, else each rank's at its even share with nothing else on storage."""


def save_use(result: Result, s: Scenario) -> SaveUse | None:
    """Return what the checkpoint of a scenario's result does; None where there is none."""
    save = s.checkpoint
    if save is None:
        return None
    p, (start, end) = result.tiled, result.times.columns
    snapshots, writes = (_rows(p, name) for name in STREAMS)
    parts, tiles = parts_of(s), p.num_tiles if save.sharded else s.plan.tp
    ends = result.step_ends
    span = to_seconds(int(ends[-1] - ends[0]))
    plain = span if result.without_save_s is None else result.without_save_s
    taken = steps_of(s)
    return SaveUse(
        state_bytes=tiles * sum(part.bytes for part in parts),
        count=len(taken),
        snapshot_s=to_seconds(int((end - start)[snapshots].max())),
        write_s=to_seconds(max(
            int(end[mine].max() - start[mine].min())
            for mine in (writes[p.step[writes] == step] for step in taken)
        )),
        alone_s=max(part.write for part in parts),
        waited_s=to_seconds(max(_wait(p, start, end, row) for row in snapshots.tolist())),
        blocked_s=(span - plain) / len(taken),
        beyond_s=to_seconds(max(0, int(end[writes].max()) - result.window[1])),
        restore_s=_restore_seconds(result, s),
    )  # fmt: skip


def _rows(p: Program, name: str) -> Int64:
    """Return the rows of a cost on the stream of the same name."""
    named = np.array([cost.name == name for cost in p.costs])[p.cost]
    return np.flatnonzero(named & (p.stream == p.streams.index(name)))


def _wait(p: Program, start: Int64, end: Int64, snapshot: int) -> int:
    """Return the most ticks from a rank's update to its snapshot, over all tiles."""
    waits = p.predecessors(snapshot)
    updated = end[waits[p.stream[waits] == p.streams.index("compute")]].max(axis=0)
    return int((start[snapshot] - updated).max())


def _restore_seconds(result: Result, s: Scenario) -> float:
    p, (_, end) = result.tiled, result.times.columns
    assert s.checkpoint is not None
    if s.checkpoint.restore:
        return to_seconds(int(end[p.stream == p.streams.index("restore")].max()))
    return max(
        held.read
        + max(sum(work_seconds(load_work(held), node, s.cluster.ranks_per_node).values())
              for node in s.cluster.kinds)
        for held in held_state(s)
    )  # fmt: skip


def save_lines(result: Result, s: Scenario) -> list[str]:
    """Return the lines of the report on the checkpoint, if there is one."""
    use, save = result.summary.checkpoint, s.checkpoint
    if use is None or save is None:
        return []
    rate = format_rate(use.state_bytes / use.write_s, "B") if use.write_s else "no time"
    after = f", {format_seconds(use.beyond_s)} of it after the last step" if use.beyond_s else ""
    many = f"{use.count} times " * (use.count > 1)
    waited = f"; {format_seconds(use.waited_s)} of it until the one before was written" * bool(
        use.waited_s
    )
    began = "; the run began with that" * save.restore
    return [
        f"  checkpoint  {many}{format_bytes(use.state_bytes)} to {save.storage}: snapshot "
        f"{format_seconds(use.snapshot_s)}, write {format_seconds(use.write_s)} ({rate}; alone "
        f"{format_seconds(use.alone_s)}){after}",
        f"              training is {format_seconds(use.blocked_s)} longer for each{waited}; "
        f"reading it back takes {format_seconds(use.restore_s)}{began}",
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
    complete = (
        "when all ranks have met after their writes" if save.barrier and s.plan.world_size > 1
        else "for each rank when its own write has ended"
    )  # fmt: skip
    out = [
        "a checkpoint holds what parameters are updated from: the fp32 copy (or the weight) and "
        f"the optimizer's states; {who} and computes again after {goes_on}; it is complete "
        f"{complete}, and none begins before; {share}; serialising takes no time"
    ]
    if save.restore:
        out.append(
            "the run begins with reading the state: each rank all that it holds, replicas the "
            "same, then a copy to the device; what else a rank needs is made or gathered in no "
            "time; warm-up follows, and loaders work meanwhile"
        )
    return out
