"""Print what writing a large trace takes in each form: ``python -m benchmarks.traces``.

A million slices of GPT-3 175B (`gpt3-175b-1024gpu`) with their arguments, arrows and counters; and
beside them the slices alone through the perfetto package's own builder, a Python object a packet.
Seconds are of the processor.
"""

from __future__ import annotations

import gzip
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from simulator import load, simulate
from simulator.program import NONE
from simulator.report.text import table
from simulator.report.trace_columns import LABELS, Trace, trace_of
from simulator.report.trace_json import nanoseconds, trace_json
from simulator.report.trace_perfetto import trace_perfetto

RANKS = 56
"""Of 17,763 slices each, in the mean."""


def main() -> None:
    """Print the table."""
    begun = time.process_time()
    result = simulate(load("gpt3-175b-1024gpu"))
    shown = np.zeros(result.tiled.num_ranks, np.bool_)
    shown[:RANKS] = True
    lines = [f"simulated in {time.process_time() - begun:.1f} s"]
    begun = time.process_time()
    trace = trace_of(result, shown)
    values = sum(len(counter.time) for counter in trace.counters)
    lines.append(
        f"{len(trace.slices.rank):,} slices and {values:,} values of counters as columns: "
        f"{time.process_time() - begun:.1f} s"
    )
    forms: dict[str, Callable[[Trace, Path], None]] = {
        ".pftrace": _perfetto, ".pftrace.gz": _perfetto_gzip, ".json": _json, ".json.gz": _gzip,
        "perfetto package, slices only": _package,
    }  # fmt: skip
    rows = [["form", "seconds", "MB", "bytes a slice"]]
    with tempfile.TemporaryDirectory() as folder:
        for name, write in forms.items():
            path, begun = Path(folder) / "trace", time.process_time()
            write(trace, path)
            seconds, size = time.process_time() - begun, path.stat().st_size
            each = size / len(trace.slices.rank)
            rows.append([name, f"{seconds:.2f}", f"{size / 1e6:.1f}", f"{each:.0f}"])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    sys.stdout.write("\n".join([*lines, table(rows), f"peak {peak:.1f} GB", ""]))


def _perfetto(trace: Trace, path: Path) -> None:
    with path.open("wb") as file:
        for part in trace_perfetto(trace):
            file.write(part.data)


def _perfetto_gzip(trace: Trace, path: Path) -> None:
    with gzip.open(path, "wb", compresslevel=6) as file:
        for part in trace_perfetto(trace):
            file.write(part.data)


def _json(trace: Trace, path: Path) -> None:
    with path.open("wb") as file:
        for part in trace_json(trace):
            file.write(part)


def _gzip(trace: Trace, path: Path) -> None:
    with gzip.open(path, "wb", compresslevel=6) as file:
        for part in trace_json(trace):
            file.write(part)


def _package(trace: Trace, path: Path) -> None:
    from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb
    from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder

    s = trace.slices
    columns = [trace.thread(s.rank, s.track), nanoseconds(s.start), nanoseconds(s.end), s.name.code,
               s.category.code, s.cost.code, *(s.labels[label] for label in LABELS)]  # fmt: skip
    with path.open("wb") as file:
        builder = StreamingTraceProtoBuilder(file)
        for track, start, end, name, category, cost, *labels in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            packet = builder.create_packet()
            packet.timestamp, packet.trusted_packet_sequence_id = start, 1
            event = packet.track_event
            event.type, event.track_uuid = pb.TrackEvent.TYPE_SLICE_BEGIN, track
            event.name, _ = s.name.texts[name], event.categories.append(s.category.texts[category])
            for label, value in zip(LABELS, labels, strict=True):
                if value != NONE:
                    argument = event.debug_annotations.add()
                    argument.name, argument.int_value = label, value
            argument = event.debug_annotations.add()
            argument.name, argument.string_value = "cost", s.cost.texts[cost]
            builder.write_packet(packet)
            packet = builder.create_packet()
            packet.timestamp, packet.trusted_packet_sequence_id = end, 1
            packet.track_event.type = pb.TrackEvent.TYPE_SLICE_END
            packet.track_event.track_uuid = track
            builder.write_packet(packet)


if __name__ == "__main__":
    main()
