"""Traces of torch.profiler as a measured run: the Program and Timeline that simulations have too.

Theory of operation. Each file is one rank (`files`); its events become columns (`events`), these
ops with step, action, stage and microbatch (`ranks`, `labels`), calls get an operation, a group and
an axis (`calls`). Calls of several ranks that are one are found by group and order (`match`), the
clocks of ranks follow from them (`clocks`), and all ops become rows of a Program (`assemble`).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from simulator.errors import DescriptionError
from simulator.exchange.kineto.assemble import Assembled, assemble
from simulator.exchange.kineto.calls import Call, check_axes
from simulator.exchange.kineto.clocks import Clocks, aligned
from simulator.exchange.kineto.events import Int64
from simulator.exchange.kineto.files import Document, find, read
from simulator.exchange.kineto.labels import Labels
from simulator.exchange.kineto.match import Matched, matched
from simulator.exchange.kineto.ranks import RankOps, rank_ops
from simulator.program import NONE, Program
from simulator.timeline import Timeline


@dataclass(frozen=True, eq=False)
class Measured:
    """A run that was measured, as a simulated one is kept."""

    program: Program
    """Its ops; ranks are numbered from 0 in the order of `ranks`."""
    timeline: Timeline
    """When they ran; tick 0 is when the first step began."""
    name: str
    ranks: tuple[int, ...]
    """Rank of each rank of the program in the run that was measured."""
    steps: tuple[int, ...]
    """Number that the profiler gave each step; 0 without."""
    posted: Int64
    """When each op began by itself, before it waited for other members, in ticks."""
    launched: Int64
    """When the host launched each op, in ticks, or NONE where nothing says."""
    clocks: Clocks
    notes: tuple[str, ...]
    """What the files leave unsaid and what was taken instead, a sentence each."""


def read_kineto(
    paths: str | Path | Sequence[str | Path], axes: Mapping[str, str] | None = None
) -> Measured:
    """Return the run that traces of torch.profiler show, one file a rank.

    Args:
        paths: files, folders of them, or patterns such as ``traces/*.json.gz``.
        axes: mesh axis of process groups by name, over what their descriptions say.

    Raises:
        DescriptionError: when a file is missing, cut short or no trace, two are of one rank, a rank
            cannot be told, or nothing is left to show.
    """
    axes = axes or {}
    check_axes(axes)
    files = find([paths] if isinstance(paths, str | Path) else paths)
    with _without_collection():
        numbered = _by_rank(files, axes)
    notes = _missing([(ops.rank, document) for document, ops in numbered])
    steps, ranks = _kept([ops for _, ops in numbered], notes)
    if not sum(len(ops.names) for ops in ranks):
        raise DescriptionError(
            f"{_named(files)} no kernels, no operators and no ranges that name actions; record "
            "with torch.profiler and its activities CPU and CUDA"
        )
    calls = matched(ranks)
    clocks = aligned(ranks, calls)
    found = assemble(ranks, calls, clocks.offset, _origin(ranks, steps, clocks.offset), steps)
    numbers = tuple(ops.rank for ops in ranks)
    return Measured(
        program=found.program,
        timeline=found.timeline,
        name=_name(paths, files),
        ranks=numbers,
        steps=tuple(steps),
        posted=found.posted,
        launched=found.launched,
        clocks=clocks,
        notes=(clocks.sentence(numbers), *notes, *_notes(ranks, calls, found)),
    )  # fmt: skip


def _name(paths: str | Path | Sequence[str | Path], files: Sequence[Path]) -> str:
    """Return what to call a run: its folder, or its first file and how many more."""
    every = [paths] if isinstance(paths, str | Path) else paths
    if len(every) == 1 and Path(every[0]).is_dir():
        return f"measured, {Path(every[0]).resolve().name}"
    more = f" and {len(files) - 1} more" * (len(files) > 1)
    return f"measured, {files[0].name}{more}"


def _named(files: Sequence[Path]) -> str:
    return f"{str(files[0])!r} holds" if len(files) == 1 else f"the {len(files)} files hold"


@contextmanager
def _without_collection() -> Iterator[None]:
    """Keep the garbage collector from looking through all events again and again."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _by_rank(files: Sequence[Path], axes: Mapping[str, str]) -> list[tuple[Document, RankOps]]:
    """Return what each rank did and what its file says of itself, in the order of ranks.

    The events of a file are dropped before the next one is read.

    Raises:
        DescriptionError: when a file is no trace, a rank cannot be told, or two files are of one.
    """
    found: dict[int, tuple[Document, RankOps]] = {}
    problems = []
    for path in files:
        document = read(path)
        rank = 0 if document.rank is None and len(files) == 1 else document.rank
        if rank is None:
            problems.append(
                f"{str(path)!r} does not say its rank: it has no distributedInfo; "
                "let its name say it, as trace-rank3.json"
            )
        elif rank in found:
            problems.append(
                f"{str(found[rank][0].path)!r} and {str(path)!r} are both of rank {rank}; "
                "give one file a rank"
            )
        else:
            found[rank] = document._replace(events=[]), rank_ops(document, rank, axes)
    if problems:
        raise DescriptionError(problems)
    return [found[rank] for rank in sorted(found)]


def _missing(numbered: Sequence[tuple[int, Document]]) -> list[str]:
    """Say which ranks of the run are not there."""
    sizes = {d.world_size for _, d in numbered} - {None}
    size = max((s for s in sizes if s is not None), default=len(numbered))
    absent = sorted(set(range(size)) - {rank for rank, _ in numbered})
    notes = []
    if len(sizes) > 1:
        notes.append(f"files disagree about the world size: {', '.join(map(str, sorted(sizes)))}")  # type: ignore[type-var]
    if absent:
        some = ", ".join(map(str, absent[:8])) + (", ..." if len(absent) > 8 else "")
        notes.append(
            f"{len(absent)} of {size} ranks have no trace ({some}): their part in collectives and "
            "waits for them are not told apart from transfers"
        )
    if [rank for rank, _ in numbered] != list(range(len(numbered))):
        names = ", ".join(str(rank) for rank, _ in numbered[:8])
        more = ", ..." * (len(numbered) > 8)
        notes.append(f"ranks {names}{more} are shown as 0 to {len(numbered) - 1}, in this order")
    return notes


def _kept(ranks: Sequence[RankOps], notes: list[str]) -> tuple[list[int], list[RankOps]]:
    """Return the steps that all ranks have, and what ranks did in them."""
    have = [set(ops.labels.step.tolist()) - {NONE} for ops in ranks]
    steps = sorted(set.intersection(*have)) if all(have) else []
    partial = sorted(set.union(*have) - set(steps))
    if partial and steps:
        notes.append(f"steps {', '.join(map(str, partial))} are not on all ranks and left out")
    if partial and not steps:
        raise DescriptionError(
            "no step is on all ranks: " + "; ".join(
                f"rank {ops.rank} has {', '.join(map(str, sorted(some))) or 'none'}"
                for ops, some in list(zip(ranks, have, strict=True))[:4]
            )
        )  # fmt: skip
    kept, outside = [], 0
    for ops in ranks:
        mask = np.isin(ops.labels.step, steps)
        outside += int((ops.labels.step == NONE).sum())
        kept.append(_some(ops, mask))
    if outside:
        notes.append(f"{outside} ops lie outside all steps and are left out")
    return steps, kept


def _some(ops: RankOps, mask: npt.NDArray[np.bool_]) -> RankOps:
    at = np.flatnonzero(mask).tolist()
    return replace(
        ops, names=[ops.names[i] for i in at], start=ops.start[at], end=ops.end[at],
        launched=ops.launched[at], labels=Labels(*(c[at] for c in ops.labels)),
        lanes=[ops.lanes[i] for i in at], calls=[ops.calls[i] for i in at],
    )  # fmt: skip


def _origin(ranks: Sequence[RankOps], steps: Sequence[int], offset: Int64) -> int:
    """Return when the first step began on the first rank, or the first op where none is marked."""
    begins = [
        min([ops.steps[steps[0]]] if steps[0] in ops.steps else ops.start.tolist(), default=None)
        for ops in ranks
    ]
    first = [b - o for b, o in zip(begins, offset.tolist(), strict=True) if b is not None]
    ops = [int(r.start.min()) - o for r, o in zip(ranks, offset.tolist(), strict=True)
           if len(r.start)]  # fmt: skip
    return int(min([*first, *ops]))


def _group_notes(calls: Sequence[Call]) -> list[str]:
    """Say which groups count as which axis."""
    names: dict[tuple[str, int], dict[str, None]] = {}
    for call in calls:
        if call.group:
            names.setdefault((call.axis, len(call.ranks)), {})[call.group] = None
    parts = []
    for (axis, size), some in sorted(names.items()):
        shown = ", ".join(repr(name) for name in list(some)[:3]) + ", ..." * (len(some) > 3)
        parts.append(f"{shown}{f' of {size} ranks' * (size > 0)} as {axis}")
    return [f"groups count: {'; '.join(parts)}"] if parts else []


def _notes(ranks: Sequence[RankOps], calls: Matched, found: Assembled) -> list[str]:
    """Say what was taken for what."""
    said: dict[str, list[int]] = {}
    for ops in ranks:
        for note in ops.notes:
            said.setdefault(note, []).append(ops.rank)
    notes = [
        note if len(some) == len(ranks) else f"rank {', '.join(map(str, some))}: {note}"
        for note, some in said.items()
    ]
    joint = [c for ops in ranks for c in ops.calls if c is not None]
    notes += _group_notes(joint)
    if calls.alone and len(ranks) > 1:
        unknown = f", {calls.groupless} of them of no known group" * (calls.groupless > 0)
        notes.append(
            f"{calls.alone} calls match none of another rank{unknown}: they count as transfer from "
            "their start"
        )
    if any(c.bytes == 0 and c.operation != "barrier" for c in joint):
        notes.append("calls whose size no trace states have 0 bytes, and no bandwidth")
    if not any(len(ops.steps) for ops in ranks):
        notes.append("no ProfilerStep: steps follow from repeated actions, or all is one step")
    if not np.any(np.concatenate([ops.labels.stage for ops in ranks]) != NONE):
        notes.append(
            "no ranges name actions: what autograd launches is backward, the optimizer and what "
            "follows the last backward is optimizer, the rest forward; each turn from backward to "
            "forward begins a microbatch"
        )
    if found.overlaps:
        notes.append(
            f"{found.overlaps} kernels overlap earlier ones of their rank; what overlaps counts "
            f"once ({found.overlap_s * 1e3:.4g} ms)"
        )
    if found.dropped:
        notes.append(
            f"{found.dropped} dependencies read off the times would have been a cycle across ranks "
            "and are left out: clocks or matches are not exact"
        )
    return notes
