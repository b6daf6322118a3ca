"""Events of one trace as columns: what ran on the device, what the host did, and named ranges."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from simulator.exchange.kineto.files import Document

Int64: TypeAlias = npt.NDArray[np.int64]

KINDS = {
    "kernel": "device", "gpu_memcpy": "device", "gpu_memset": "device",
    "memcpy": "device", "memset": "device",
    "cuda_runtime": "launches", "cuda_driver": "launches", "runtime": "launches",
    "hip_runtime": "launches",
    "user_annotation": "ranges", "cpu_op": "operators", "operator": "operators",
}  # fmt: skip
"""What categories of events are, in lower case; those of torch before 1.12 had other names."""

NANOSECONDS_PER_MICROSECOND = 1000


@dataclass(slots=True)
class Spans:
    """Spans of one kind in the order in which they began; times in nanoseconds."""

    names: list[str] = field(default_factory=list)
    start: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))
    end: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))
    threads: list[Any] = field(default_factory=list)
    """Thread of the host, or stream of the device."""
    args: list[Mapping[str, Any]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.names)

    def some(self, mask: npt.NDArray[np.bool_]) -> Spans:
        """Return the spans that a mask chooses."""
        at = np.flatnonzero(mask).tolist()
        return Spans(
            [self.names[i] for i in at], self.start[at], self.end[at],
            [self.threads[i] for i in at], [self.args[i] for i in at],
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Recorded:
    """What one rank recorded."""

    device: Spans
    launches: Spans
    ranges: Spans
    operators: Spans
    skipped: int
    """Events that have no name, no start or no duration that is a number."""

    def launched(self) -> Int64:
        """Return when the host launched each span of the device, or -1 where nothing says."""
        when = {
            a["correlation"]: start
            for a, start in zip(self.launches.args, self.launches.start.tolist(), strict=True)
            if "correlation" in a
        }
        return np.array([when.get(a.get("correlation"), -1) for a in self.device.args], np.int64)


def recorded(document: Document) -> Recorded:
    """Return the events of a trace by kind, times in nanoseconds of the clock of its host."""
    rows: dict[str, list[tuple[int, int, str, Any, Mapping[str, Any]]]] = {
        kind: [] for kind in ("device", "launches", "ranges", "operators")
    }
    skipped, base = 0, document.base_ns
    for event in document.events:
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        kind = KINDS.get(str(event.get("cat", "")).lower())
        if kind is None:
            continue
        name: Any = event.get("name")
        ts: Any = event.get("ts")
        dur: Any = event.get("dur")
        if not (isinstance(name, str) and _is_time(ts) and _is_time(dur) and dur >= 0):
            skipped += 1
            continue
        args = event.get("args")
        start = base + round(ts * NANOSECONDS_PER_MICROSECOND)
        length = round(dur * NANOSECONDS_PER_MICROSECOND)
        thread = event.get("tid")
        rows[kind].append(
            (start, start + length, name, thread, args if isinstance(args, dict) else {})
        )
    return Recorded(**{kind: _spans(some) for kind, some in rows.items()}, skipped=skipped)


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _spans(rows: list[tuple[int, int, str, Any, Mapping[str, Any]]]) -> Spans:
    """Return rows in order of start, of those that start at once the longest first."""
    rows.sort(key=lambda row: (row[0], -row[1]))
    if not rows:
        return Spans()
    start, end, names, threads, args = zip(*rows, strict=True)
    return Spans(
        list(names), np.array(start, np.int64), np.array(end, np.int64), list(threads), list(args)
    )


def innermost(spans: Spans, at: Int64) -> Int64:
    """Return which span holds each time, the one that began last of several, or -1."""
    points, owner = [-(2**63)], [-1]
    stack: list[int] = []
    ends = spans.end.tolist()

    def close(until: int) -> None:
        while stack and ends[stack[-1]] <= until:
            points.append(max(points[-1], ends[stack.pop()]))
            owner.append(stack[-1] if stack else -1)

    for i, start in enumerate(spans.start.tolist()):
        close(start)
        points.append(max(points[-1], start))
        owner.append(i)
        stack.append(i)
    close(2**63 - 1)
    where = np.searchsorted(np.array(points, np.int64), at, side="right") - 1
    return np.array(owner, np.int64)[where]


def outermost(spans: Spans) -> npt.NDArray[np.bool_]:
    """Return which spans lie within no other one of their thread."""
    until: dict[Any, int] = {}
    outer = np.zeros(len(spans), bool)
    ends = spans.end.tolist()
    for i, (thread, start) in enumerate(zip(spans.threads, spans.start.tolist(), strict=True)):
        if start >= until.get(thread, start):
            outer[i] = True
            until[thread] = ends[i]
    return outer
