"""A trace as Chrome's JSON, which Perfetto and chrome://tracing open: small ones, and any tool's.

Times are microseconds to the nanosecond. Viewers count whole nanoseconds and drop a box that
would overlap the one before it: starts and ends are rounded, and durations are what lies between.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from simulator.program import NONE, Int64
from simulator.report.trace_columns import Coded, Counter, Slices, Trace
from simulator.units import TICKS_PER_SECOND, parse_quantity

TICKS_PER_NANOSECOND = TICKS_PER_SECOND // 10**9

_GIGABYTE = parse_quantity("1 GB", "bytes")

_UNITS = {"bytes": "GB", "count": "count", "%": "%"}
"""What the values of counters are called."""


def nanoseconds(ticks: Int64) -> Int64:
    """Return the nearest whole nanoseconds."""
    found: Int64 = (ticks + TICKS_PER_NANOSECOND // 2) // TICKS_PER_NANOSECOND
    return found


ROWS = 20_000
"""Slices that are written together."""


def trace_json(trace: Trace) -> Iterator[bytes]:
    """Yield the parts of the JSON file of a trace, one event a line."""
    yield b'{"displayTimeUnit":"ms","traceEvents":['
    separator = "\n"
    for events in _events(trace):
        if text := ",\n".join(events):
            yield (separator + text).encode()
            separator = ",\n"
    yield b"\n]}\n"


def _events(trace: Trace) -> Iterator[Iterator[str]]:
    yield _metadata(trace)
    for some in trace.slices.blocks(ROWS):
        threads = trace.thread(some.rank, some.track).tolist()
        yield _boxes(some, some.rank.tolist(), threads, nanoseconds(some.start))
    for some in trace.slices.blocks(ROWS):
        threads = trace.thread(some.rank, some.track).tolist()
        yield _arrows(some, some.rank.tolist(), threads, nanoseconds(some.start))
    for counter in trace.counters:
        yield _values(counter)


def _metadata(trace: Trace) -> Iterator[str]:
    """Name the processes and the threads that have slices, and say how to order them."""
    for pid, text in trace.processes.items():
        name = json.dumps(text, ensure_ascii=False)
        head = f'{{"ph":"M","pid":{pid}'
        yield f'{head},"name":"process_name","args":{{"name":{name}}}}}'
        yield f'{head},"name":"process_sort_index","args":{{"sort_index":{pid}}}}}'
    ranks, tracks = trace.threads
    threads = trace.thread(ranks, tracks).tolist()
    for pid, tid, k in zip(ranks.tolist(), threads, tracks.tolist(), strict=True):
        head = f'{{"ph":"M","pid":{pid},"tid":{tid}'
        name = json.dumps(trace.tracks[k])
        yield f'{head},"name":"thread_name","args":{{"name":{name}}}}}'
        yield f'{head},"name":"thread_sort_index","args":{{"sort_index":{k}}}}}'


def _boxes(s: Slices, pids: list[int], threads: list[int], start: Int64) -> Iterator[str]:
    """Yield one complete event for each slice."""
    duration = nanoseconds(s.end) - start
    labels = [_members(name, column) for name, column in s.labels.items()]
    costs = [f'"cost":"{text}"' for text in _texts(s.cost)]
    columns = (
        pids, threads, _microseconds(start), _microseconds(duration), _texts(s.name),
        _texts(s.category), map("".join, zip(*labels, costs, strict=True)), _flows(s),
    )  # fmt: skip
    for pid, tid, ts, dur, text, cat, args, more in zip(*columns, strict=True):
        yield (
            f'{{"ph":"X","pid":{pid},"tid":{tid},"ts":{ts},"dur":{dur},'
            f'"name":"{text}","cat":"{cat}","args":{{{args}{more}}}}}'
        )


def _members(name: str, column: Int64) -> list[str]:
    """Return a member of a JSON object for each value; what is absent is left out."""
    texts = [f'"{name}":{value},' for value in range(int(column.max(initial=NONE)) + 1)]
    texts.append("")  # NONE is -1, the last one
    return [texts[value] for value in column.tolist()]


def _texts(coded: Coded) -> list[str]:
    texts = [*(json.dumps(text)[1:-1] for text in coded.texts), ""]  # NONE is -1, the last one
    return [texts[code] for code in coded.code.tolist()]


def _flows(s: Slices) -> list[str]:
    """Return what is known of flows as further members."""
    out = [""] * len(s.rank)
    flows = np.flatnonzero(s.wait != NONE)
    groups = [*(json.dumps(text) for text in s.group.texts), '""']
    columns = (flows.tolist(), s.bytes[flows].tolist(), s.group.code[flows].tolist(),
               _microseconds(nanoseconds(s.wait[flows])))  # fmt: skip
    for at, size, group, wait in zip(*columns, strict=True):
        out[at] = f',"bytes":{_real(size)},"group":{groups[group]},"wait_us":{wait}'
    return out


def _arrows(s: Slices, pids: list[int], threads: list[int], start: Int64) -> Iterator[str]:
    """Draw an arrow from each send to its receive."""
    for phase, column, bind in (("s", s.sends, ""), ("f", s.receives, ',"bp":"e"')):
        rows = np.flatnonzero(column != NONE)
        columns = (rows.tolist(), column[rows].tolist(), _microseconds(start[rows]))
        for row, arrow, ts in zip(*columns, strict=True):
            yield (
                f'{{"ph":"{phase}","id":{arrow},"pid":{pids[row]},"tid":{threads[row]},'
                f'"ts":{ts},"name":"message","cat":"pp"{bind}}}'
            )


def _values(counter: Counter) -> Iterator[str]:
    """Draw a value over time."""
    values: Sequence[object] = counter.values.tolist()
    if counter.unit == "bytes":
        values = [f"{value / _GIGABYTE:.6f}" for value in counter.values.tolist()]
    elif counter.unit == "%":
        values = [f"{value:.3f}" for value in counter.values.tolist()]
    name, unit = json.dumps(counter.name), _UNITS[counter.unit]
    head = f'{{"ph":"C","pid":{counter.process},"ts":'
    times = _microseconds(nanoseconds(counter.time))
    for ts, value in zip(times, values, strict=True):
        yield f'{head}{ts},"name":{name},"args":{{"{unit}":{value}}}}}'


def _microseconds(ns: npt.NDArray[np.int64]) -> list[str]:
    """Return nanoseconds as exact decimals in microseconds."""
    whole, rest = np.divmod(ns, 1000)
    return [
        f"{w}.{r:03d}".rstrip("0") if r else str(w)
        for w, r in zip(whole.tolist(), rest.tolist(), strict=True)
    ]


def _real(value: float) -> str:
    return repr(float(value)).removesuffix(".0")
