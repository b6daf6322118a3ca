"""The result of a simulation: a program that has run, and what can be read off it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from simulator.describe.scenario import Scenario
from simulator.hardware.outside import outside
from simulator.program import ACTIONS, NONE, Int64, Program
from simulator.report.breakdown import Breakdown, breakdown
from simulator.report.memory import MemoryTimeline, memory_over_time
from simulator.schedules.action import Actions
from simulator.timeline import Timeline
from simulator.traffic import Traffic
from simulator.units import TICKS_PER_SECOND, to_seconds

if TYPE_CHECKING:
    import pandas as pd

    from simulator.report.flows import FlowUse
    from simulator.report.links import LinkUse
    from simulator.report.plots import Plots
    from simulator.report.reserve import Reserve
    from simulator.report.summary import Summary


@dataclass(frozen=True, eq=False)
class Moves:
    """What flows put on links that they share, and how long each waits before it does."""

    traffic: Traffic
    latency: Int64
    """(rows, tiles) ticks between the start of a flow and its bytes' first move."""


@dataclass(frozen=True, eq=False)
class Result:
    """A program and its timeline, with everything that is computed from the two."""

    tiled: Program
    """The program as it was lowered; `program` is the same, one row for every op."""
    times: Timeline
    """Its timeline; `timeline` is the same by op id."""
    scenario: Scenario | None = None
    """What was simulated; None for a bare schedule."""
    notes: tuple[str, ...] = ()
    """Warnings that the description itself gives rise to, and what was folded."""
    moves: Moves | None = None
    """What was on links, where they were shared."""
    actions: Actions = ()
    """Action lists of a bare schedule by rank."""
    title: str = "schedule"
    """What a bare schedule is called."""
    without_data_s: float | None = None
    """Seconds of a step of the same scenario with all samples there, where ranks wait for some."""
    without_save_s: float | None = None
    """Seconds from the first step's end to the last one's of the same scenario without its
    checkpoints."""
    without_evaluation_s: float | None = None
    """Likewise of the same without evaluations."""
    without_log_s: float | None = None
    """Likewise of the same without logging."""
    slowed_by_communication_s: float = 0.0
    """By how much longer the last step's work took because of flows beside it, mean over ranks."""

    @property
    def program(self) -> Program:
        """Every op of every rank; large for many ranks, see `excerpt`."""
        return self.tiled.flat

    @property
    def timeline(self) -> Timeline:
        """When every op of `program` started and ended."""
        return self.times.flat

    def excerpt(self, ranks: Sequence[int] | Int64) -> tuple[Program, Timeline]:
        """Return the program and timeline of the replicas that hold some ranks."""
        held = np.isin(self.tiled.tile_ranks, np.asarray(ranks)).any(axis=0)
        tiles = np.flatnonzero(held)
        return self.tiled.flat_of(tiles), self.times.flat_of(tiles)

    @cached_property
    def rank_step_ends(self) -> Int64:
        """(steps, ranks of a tile, columns): when each rank's last op of each step ended.

        What a loader does ahead of the steps that follow is no part of one, nor what is written
        beside steps.
        """
        p, (_, end) = self.tiled, self.times.columns
        rows, step = p.last_of_steps, p.step
        ends = np.zeros((int(step.max(initial=0)) + 1, len(p.tile_ranks), end.shape[1]), np.int64)
        np.maximum.at(ends, (step[rows], p.rank[rows]), end[rows])
        return ends

    @cached_property
    def step_ends(self) -> Int64:
        """When the last op of each step ended, in ticks."""
        ends: Int64 = self.rank_step_ends.max(axis=(1, 2), initial=0)
        return ends

    @property
    def window(self) -> tuple[int, int]:
        """First and last tick of the last step."""
        begin, end = [0, *self.step_ends.tolist()][-2:]
        return begin, end

    @property
    def first_step_s(self) -> float:
        """Seconds of the first step, from nothing running to its last op's end."""
        return to_seconds(int(self.step_ends[0]))

    @property
    def is_asynchronous(self) -> bool:
        """Whether replicas may be in different steps."""
        return self.scenario is not None and self.scenario.plan.staleness is not None

    @cached_property
    def own_windows(self) -> tuple[Int64, Int64]:
        """(ranks of a tile, columns) twice: first and last tick of each rank's own last step.

        That is the last step that its replica ended while all replicas were still at work, for one
        that is alone at the end finds links freer than they were. A replica that ended none by then
        shows its first.
        """
        ends = self.rank_step_ends
        by_replica = ends.max(axis=1)
        last = np.maximum((by_replica <= by_replica[-1].min()).sum(axis=0) - 1, 0)
        padded = np.concatenate([np.zeros_like(ends[:1]), ends])
        columns = np.arange(len(last))
        return padded[last, :, columns].T, padded[last + 1, :, columns].T

    @property
    def step_time_s(self) -> float:
        """Seconds of the last step: from the end of the one before to its own end.

        Of an asynchronous run: the harmonic mean of the replicas' own last steps, for work done in
        a second adds up. So long takes a step's batch, whichever replicas do more of it.
        """
        begin, end = self.window
        if not self.is_asynchronous:
            return to_seconds(end - begin)
        first, last = (own.max(axis=0) for own in self.own_windows)
        column = self.times.column_of_tile
        alike = np.ones(1) if column is None else np.bincount(column)
        return to_seconds(float(alike.sum() / (alike / (last - first)).sum()))

    @cached_property
    def breakdown(self) -> Breakdown:
        """Where every rank's time goes during the last step.

        With several steps a rank's window runs from its own end of the step before to its own end
        of the last one: all ranks' windows are equally long once steps repeat.
        """
        ends = self.rank_step_ends
        begin, end = self.window
        if self.is_asynchronous:
            first, last = self.own_windows
            return breakdown(self.tiled, self.times, first, last, turn=first.max(axis=0))
        if len(ends) == 1:
            return breakdown(self.tiled, self.times, begin, end)
        return breakdown(self.tiled, self.times, ends[-2], ends[-1], turn=begin)

    @cached_property
    def memory(self) -> MemoryTimeline:
        """What comes and goes in memory over time; `peak_memory_bytes` has the rest too."""
        return memory_over_time(self.tiled, self.times)

    @cached_property
    def activations(self) -> MemoryTimeline:
        """Activations kept for backward over time."""
        return self.memory.only("activations")

    @cached_property
    def flows(self) -> tuple[FlowUse, ...]:
        """Collectives and messages of the last step by kind: rates, transfer and wait."""
        from simulator.report.flows import flow_use

        return flow_use(self)

    @cached_property
    def links(self) -> LinkUse:
        """How busy links were during the last step.

        Raises:
            ValueError: when flows did not share links (`run.network` is "alpha-beta").
        """
        from simulator.report.links import link_use

        return link_use(self)

    @cached_property
    def peak_memory_bytes(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Most bytes allocated at any time, by rank (torch.cuda.max_memory_allocated)."""
        static = self.tiled.static_bytes
        return self.memory.peak + (static if len(static) else 0.0)

    @cached_property
    def reserve(self) -> Reserve:
        """What torch's allocator reserves beyond what is allocated at the peak, by rank."""
        from simulator.report.reserve import reserve_of

        return reserve_of(self)

    @property
    def reserved_memory_bytes(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Most bytes that the allocator has reserved, by rank (torch.cuda.max_memory_reserved).

        Where a device has no room for them the allocator gives some back.
        """
        return self.peak_memory_bytes + self.reserve.total

    @property
    def device_memory_bytes(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Bytes that each rank's device must have.

        Most that is allocated, times `run.allocator_reserve`, the context and NCCL's buffers. What
        is reserved beyond that the allocator can give back.
        """
        if self.scenario is None:
            return self.peak_memory_bytes
        return self.peak_memory_bytes * self.scenario.run.allocator_reserve + outside(self.scenario)

    @cached_property
    def summary(self) -> Summary:
        """The numbers of the report.

        Raises:
            ValueError: for the result of a bare schedule, which has no model and no cluster.
        """
        from simulator.report.summary import summarise

        return summarise(self)

    def __str__(self) -> str:
        from simulator.report.text import result_text

        return result_text(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values, units in the names of keys."""
        from simulator.report.text import result_dict

        return result_dict(self)

    def to_frame(self) -> pd.DataFrame:
        """Return one row for each span: labels, start and end in seconds."""
        import pandas as pd

        p, t = self.program, self.timeline
        names = np.array([c.name for c in p.costs], object)

        def optional(column: np.ndarray[Any, Any]) -> pd.arrays.IntegerArray:
            return pd.arrays.IntegerArray(column.astype(np.int64), column == NONE)

        def named(codes: np.ndarray[Any, Any], names: Sequence[str]) -> pd.Categorical[Any]:
            return pd.Categorical.from_codes(codes.astype(np.int64), pd.Index(list(names)))

        return pd.DataFrame(
            {
                "rank": p.rank,
                "stream": named(p.stream, p.streams),
                "action": named(p.action, ACTIONS),
                "stage": optional(p.stage),
                "microbatch": optional(p.microbatch),
                "layer": optional(p.layer),
                "step": p.step,
                "name": pd.Categorical(names[p.cost]),
                "joint": optional(p.joint),
                "start_s": t.start / TICKS_PER_SECOND,
                "end_s": t.end / TICKS_PER_SECOND,
            }
        )

    @property
    def stage_ranks(self) -> Int64:
        """One rank of each stage, the first of its replica; every rank of a bare schedule."""
        return self.tiled.tile_ranks[:, 0].astype(np.int64)

    @cached_property
    def stages(self) -> list[list[int]]:
        """Stages of each rank of a pipeline, one for each of its chunks."""
        p = self.tiled
        held = np.zeros((len(p.tile_ranks), int(p.stage.max(initial=NONE)) + 2), bool)
        held[p.rank, p.stage] = True  # ops of no stage, NONE, mark the last column
        return [np.flatnonzero(row).tolist() for row in held[:, :-1]]

    def save_trace(
        self, path: str | Path, ranks: Sequence[int] | Literal["all", "some"] = "some"
    ) -> None:
        """Write a trace that Perfetto and chrome://tracing open.

        Args:
            path: a file whose name ends in ``.json`` or ``.pftrace``, with ``.gz`` or without.
            ranks: those to show; "some" are all of up to 64, else one of each stage.
        """
        from simulator.report.trace import write_trace

        write_trace(self, Path(path), self._trace_ranks(ranks))

    def save_kineto(
        self, folder: str | Path, ranks: Sequence[int] | Literal["all", "some"] = "some"
    ) -> None:
        """Write traces as torch.profiler does, a file a rank, for tools that read those.

        Args:
            folder: a new or an empty one.
            ranks: those to show; "some" are all of up to 64, else one of each stage.
        """
        from simulator.report.trace_kineto import write_kineto

        write_kineto(self, Path(folder), self._trace_ranks(ranks))

    def _trace_ranks(self, ranks: Sequence[int] | Literal["all", "some"]) -> Sequence[int]:
        from simulator.report.trace import MANY_RANKS

        if ranks == "all" or (ranks == "some" and self.tiled.num_ranks <= MANY_RANKS):
            return range(self.tiled.num_ranks)
        return self.stage_ranks.tolist() if isinstance(ranks, str) else ranks

    def save_html(self, path: str | Path) -> None:
        """Write the report as one page that any browser opens offline, with a timeline to explore.

        Args:
            path: a file whose name ends in ``.html``.
        """
        from simulator.report.html import save_html

        save_html(self, path)

    @property
    def plot(self) -> Plots:
        """Figures of this result: ``result.plot.pipeline("pipeline.png")``."""
        from simulator.report.plots import Plots

        return Plots(self)
