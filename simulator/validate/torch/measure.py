"""Times measured in the ranks' processes apart from any step: actions by stage, messages, sums.

All ranks measure at once, so that each has the neighbours on its host that it has in a step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from simulator.schedules import Action
from simulator.validate.torch.executor import Executor
from simulator.validate.torch.job import ELEMENT, WARMING, label

LEAST = 8
"""Forwards of a repetition, at least."""

ROUNDS = 40
"""Messages and sums of each size that count."""

SIZES = tuple(4**k for k in range(5, 13))
"""Bytes of messages and sums that a calibration measures beside those of its job: 1 KiB to
16 MiB."""


OTHER = 2**23
"""Bytes that are touched between two messages, and before a sum."""


def actions(
    ex: Executor, kept: int, progress: Callable[[int], None] = lambda repetition: None
) -> dict[str, list[list[list[float]]]]:
    """Return busy and wall seconds of the work of the actions of a rank's stages, by label.

    An action done once is a list of its parts that work, a pair of times each.

    As many forwards as the schedule keeps at once, then as many backwards: caches and allocator see
    what they see in a step. Medians, because a busy host makes outliers.
    """
    found: dict[str, list[list[list[float]]]] = {}
    live = min(ex.live, ex.job.num_microbatches)
    split = ex.split
    ex.load()
    rounds = -(-LEAST // live)
    for repetition in range(WARMING + kept):
        dist.barrier()
        progress(repetition)
        for stage in ex.stages:
            for pattern in patterns(ex, stage, live):
                kinds = {a.kind for a in pattern}
                ex.split = {(stage, m) for m in range(live)} if "I" in kinds else set()
                for _ in range(1 if "OPT" in kinds else rounds):
                    ex.feed(stage, live)
                    spans = iter(ex.run(pattern))
                    for action in pattern:
                        parts = ex.job.parts_of(action)
                        work = [
                            [span.busy * 1e-9, (span.end - span.start) * 1e-9]
                            for part, span in zip(parts, islice(spans, len(parts)), strict=True)
                            if part.kind == "work"
                        ]
                        if repetition >= WARMING:
                            found.setdefault(label(action), []).append(work)
    ex.split = split
    return found


def patterns(ex: Executor, stage: int, live: int) -> Iterator[list[Action]]:
    """Yield what a stage does: forwards, then whole or split backwards; at the end its update."""
    kinds = {a.kind for a in ex.actions if a.stage == stage}
    for backward in (("B",), ("I", "W")):
        if kinds & set(backward):
            yield [Action(stage, "F", m) for m in range(live)] + [
                Action(stage, kind, m) for m in range(live) for kind in backward
            ]
    yield [Action(stage, "OPT")]


def gap(ex: Executor) -> float:
    """Return the seconds from one kernel of no work to the next, launched one after the other."""
    x = torch.zeros(1, device=ex.here)
    spent = []
    for _ in range(WARMING + ROUNDS):
        ex.turns.take()
        ex.device.settle()
        begin = time.perf_counter_ns()
        for _ in range(ROUNDS):
            x.add_(1.0)
        ex.device.settle()
        spent.append((time.perf_counter_ns() - begin) * 1e-9 / ROUNDS)
        ex.turns.give()
    return statistics.median(spent[WARMING:])


def copies(ex: Executor, sizes: list[int]) -> list[dict[str, float]]:
    """Return the time of copies from the host's memory to the device's, by size."""
    out = []
    for size in sizes:
        here = torch.zeros(size // ELEMENT)
        there = torch.zeros(size // ELEMENT, device=ex.here)
        here = here.pin_memory() if ex.here.type == "cuda" else here
        spent = []
        for _ in range(WARMING + ROUNDS):
            ex.turns.take()
            ex.device.settle()
            begin = time.perf_counter_ns()
            there.copy_(here)
            ex.device.settle()
            spent.append((time.perf_counter_ns() - begin) * 1e-9)
            ex.turns.give()
        out.append({"bytes": size, "seconds": statistics.median(spent[WARMING:])})
    return out


def messages(ex: Executor, sizes: list[int]) -> list[dict[str, float]]:
    """Return the time of messages between the first two ranks of a pipeline, by size.

    Half a round trip, with the receive posted before the message is sent and caches that hold
    something else; and what the sender and the receiver compute for it themselves.
    """
    job = ex.job
    if job.pp == 1:
        return []
    ends = job.rank(0, 0), job.rank(0, 1)
    out = []
    for size in sizes:
        dist.barrier()
        if ex.rank in ends:
            row = _round_trips(ex, ends, size)
            if ex.rank == ends[0]:
                out.append({"bytes": size, **row})
    dist.barrier()
    return out


def _round_trips(ex: Executor, ends: tuple[int, int], size: int) -> dict[str, float]:
    first = ex.rank == ends[0]
    peer = ends[first]
    there, back = ("SEND_F", "SEND_B") if first else ("SEND_B", "SEND_F")
    out = ex.groups.lanes.get((ex.rank, peer, there))
    into = ex.groups.lanes.get((peer, ex.rank, back))
    data = torch.zeros(size // ELEMENT, device=ex.here)
    buffer = torch.zeros(size // ELEMENT, device=ex.device.link)
    busy = ex.device.busy
    trips, sends, receives = [], [], []
    other = torch.zeros(OTHER // ELEMENT, device=ex.here)
    for _ in range(WARMING + ROUNDS):
        other.add_(1.0)
        ex.device.settle()
        receive = dist.irecv(buffer, peer, into)
        begin = time.perf_counter_ns()
        if first:
            start = busy()
            send = dist.isend(data.to(ex.device.link), peer, out)
            middle = busy()
            receive.wait()
            buffer.to(ex.here)
            sends.append(middle - start)
            receives.append(busy() - middle)
        else:
            receive.wait()
            buffer.to(ex.here)
            send = dist.isend(data.to(ex.device.link), peer, out)
        send.wait()
        ex.device.settle()
        trips.append(time.perf_counter_ns() - begin)
    middle_of = [statistics.median(v[WARMING:] or [0]) * 1e-9 for v in (trips, sends, receives)]
    return {"seconds": middle_of[0] / 2, "send": middle_of[1], "receive": middle_of[2]}


def sums(ex: Executor, sizes: list[int]) -> list[dict[str, float]]:
    """Return the time of all-reduces over the ranks that hold a rank's first stage, by size.

    Sizes that the stages' buckets have are measured too.
    """
    mine = {flat.numel() * ELEMENT for flats in ex.sums.values() for flat in flats}
    return _all_reduces(ex, ex.job.sharers(ex.rank, min(ex.stages)), mine | set(sizes))


def peer_sums(ex: Executor, sizes: list[int]) -> list[dict[str, float]]:
    """Return the time of all-reduces over a rank's tp peers, by size; those of its actions too."""
    parts = (part for _, part in ex.job.parts(ex.rank))
    mine = {int(part.bytes) for part in parts if part.kind == "sum"}
    return _all_reduces(ex, ex.job.peers(ex.rank), mine | set(sizes))


def _all_reduces(ex: Executor, ranks: tuple[int, ...], sizes: set[int]) -> list[dict[str, float]]:
    """Return the time of all-reduces over some ranks, of the sizes that any rank names.

    As in a step each follows work, with caches that hold something else and threads of gloo that
    sleep; it counts from the arrival of the last rank, by the clock of the host they share.
    """
    if len(ranks) == 1:
        return []
    group = ex.groups.sums[ranks]
    every: list[Any] = [None] * ex.job.world_size
    dist.all_gather_object(every, sorted(sizes))
    out = []
    other = torch.zeros(OTHER // ELEMENT, device=ex.here)
    for size in sorted({size for part in every for size in part}):
        data = torch.zeros(size // ELEMENT, device=ex.here)
        begins, ends = [], []
        for _ in range(WARMING + ROUNDS):
            other.add_(1.0)
            ex.device.settle()
            begins.append(time.perf_counter_ns())
            dist.all_reduce(data, group=group)
            ex.device.settle()
            ends.append(time.perf_counter_ns())
        arrivals: list[Any] = [None] * len(ranks)
        dist.all_gather_object(arrivals, begins, group=group)
        spent = [end - max(each) for end, *each in zip(ends, *arrivals, strict=True)]
        seconds = statistics.median(spent[WARMING:]) * 1e-9
        out.append({"bytes": size, "ranks": len(ranks), "seconds": seconds})
    return out
