"""A trace as Perfetto's protocol buffers: smaller than JSON and sooner written, for large traces.

A file is a list of packets. Names, categories and texts stand once at its beginning (they are
*interned*); a slice is a packet that begins it and one that ends it, and of both only the numbers
differ. A rank is a track with its compute stream, its other streams and counters are tracks below:
viewers order such tracks as they are told, and show what a rank computes while it is closed.
Times are whole nanoseconds. The fields are those of Perfetto's public schema: `TracePacket`,
`TrackEvent`, `TrackDescriptor`, `InternedData`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from simulator.program import NONE, Int64
from simulator.report.trace_columns import LABELS, Coded, Counter, Slices, Trace
from simulator.report.trace_json import nanoseconds
from simulator.report.wire import Bytes, Constant, Field, Fixed, Message, Number, encoded
from simulator.wire import FIXED64, TEXT, VARINT, tag, varint
from simulator.wire import text as field_of

ROWS = 100_000
"""Slices that are encoded together: what they take in memory does not grow with the trace."""

PACKET = tag(1, TEXT)  # of Trace
TIMESTAMP = tag(8, VARINT)  # of TracePacket
SEQUENCE = tag(10, VARINT) + varint(1)
TRACK_EVENT = tag(11, TEXT)
FIRST = tag(13, VARINT) + varint(1)  # sequence_flags: what was interned before is forgotten
INTERNED = tag(13, VARINT) + varint(2)  # sequence_flags: what is interned is needed
BEGIN, END, COUNT = (tag(9, VARINT) + varint(kind) for kind in (1, 2, 4))  # of TrackEvent
TRACK = tag(11, VARINT)
CATEGORY, NAME = tag(3, VARINT), tag(10, VARINT)
ANNOTATION = tag(4, TEXT)
SENDS, RECEIVES = tag(47, FIXED64), tag(48, FIXED64)
INTEGER, REAL = tag(30, VARINT), tag(44, FIXED64)
WHOLE, WORD = tag(4, VARINT), tag(17, VARINT)  # of DebugAnnotation: int_value, string_value_iid
EXPLICIT = tag(11, VARINT) + varint(3)  # of TrackDescriptor: children in the order of their ranks

_UNITS = {
    "bytes": tag(3, VARINT) + varint(3),
    "count": tag(3, VARINT) + varint(2),
    "%": field_of(6, b"%"),
}
"""Fields of a CounterDescriptor by unit."""

_ARGUMENTS = (*LABELS, "cost", "bytes", "group", "wait_ns")


def trace_perfetto(trace: Trace) -> Iterator[Bytes]:
    """Yield the parts of the file of a trace."""
    yield _raw(b"".join(_head(trace)))
    s = trace.slices
    texts = _numbered([*s.cost.texts, *s.group.texts])
    for some in s.blocks(ROWS):
        yield _boxes(trace, some, texts)
    for number, counter in enumerate(trace.counters):
        yield _values(trace, counter, _counter_track(trace, number))


def _raw(data: bytes) -> Bytes:
    return np.frombuffer(data, np.uint8)


def _numbered(texts: Iterable[str]) -> dict[str, int]:
    """Return numbers of texts from 1 on, for 0 stands for none."""
    return {text: k + 1 for k, text in enumerate(dict.fromkeys(texts))}


def _head(trace: Trace) -> Iterator[bytes]:
    """Yield packets that name what is interned, and every track."""
    s = trace.slices
    tables = (
        (1, _numbered(s.category.texts)), (2, _numbered(s.name.texts)),
        (3, _numbered(_ARGUMENTS)), (29, _numbered([*s.cost.texts, *s.group.texts])),
    )  # fmt: skip
    interned = b"".join(_table(field, numbers) for field, numbers in tables)
    yield _packet(SEQUENCE + FIRST + field_of(12, interned))
    width = len(str(max(trace.processes, default=0)))
    for pid, name in trace.processes.items():
        # Outermost tracks stand in the order of their names, whatever they are told.
        padded = name.replace(f"rank {pid}", f"rank {pid:0{width}}", 1)
        yield _track(_process(trace, pid), EXPLICIT + field_of(2, padded.encode()))
    ranks, tracks = trace.threads
    numbers = _uuid(trace, ranks, tracks).tolist()
    for pid, uuid, k in zip(ranks.tolist(), numbers, tracks.tolist(), strict=True):
        if uuid != _process(trace, pid):
            stream = field_of(2, trace.tracks[k].encode())
            yield _track(uuid, _parent(trace, pid) + stream + _rank(k))
    for number, counter in enumerate(trace.counters):
        body = _parent(trace, counter.process) + field_of(2, counter.name.encode())
        body += field_of(8, _UNITS[counter.unit]) + _rank(len(trace.tracks) + number)
        yield _track(_counter_track(trace, number), body)


def _table(field: int, numbers: Mapping[str, int]) -> bytes:
    return b"".join(
        field_of(field, tag(1, VARINT) + varint(number) + field_of(2, text.encode()))
        for text, number in numbers.items()
    )


def _packet(body: bytes) -> bytes:
    return PACKET + varint(len(body)) + body


def _track(uuid: int, body: bytes) -> bytes:
    return _packet(SEQUENCE + field_of(60, tag(1, VARINT) + varint(uuid) + body))


def _rank(order: int) -> bytes:
    return tag(12, VARINT) + varint(order)


def _parent(trace: Trace, pid: int) -> bytes:
    return tag(5, VARINT) + varint(_process(trace, pid))


def _process(trace: Trace, pid: int) -> int:
    """Return the uuid of a rank's own track; those of its streams are their ids, and lower."""
    return (max(trace.processes, default=0) + 1) * max(len(trace.tracks), 1) + 1 + pid


def _counter_track(trace: Trace, number: int) -> int:
    return _process(trace, max(trace.processes, default=0)) + 1 + number


def _uuid(trace: Trace, rank: Int64, track: Int64) -> Int64:
    """Return the uuids of tracks: what a rank computes lies on its own, seen when it is closed."""
    threads = trace.thread(rank, track)
    if trace.tracks[:1] != ("compute",):
        return threads
    found: Int64 = np.where(track == 0, _process(trace, 0) + rank, threads)
    return found


def _boxes(trace: Trace, s: Slices, texts: Mapping[str, int]) -> Bytes:
    """Return the packets that begin and end some slices, one after the other."""
    track = _uuid(trace, s.rank, s.track)
    start, end = nanoseconds(s.start), nanoseconds(s.end)
    event: list[Field] = [
        Constant(BEGIN),
        Number(TRACK, track),
        Number(CATEGORY, s.category.code + 1),
        Number(NAME, s.name.code + 1),
        *_arguments(s, texts),
    ]
    for head, column in ((SENDS, s.sends), (RECEIVES, s.receives)):
        if (column != NONE).any():
            event.append(Fixed(head, column + 1, column != NONE))  # 0 is no number of an arrow
    begin = Message(PACKET, [
        Number(TIMESTAMP, start), Constant(SEQUENCE + INTERNED), Message(TRACK_EVENT, event),
    ])  # fmt: skip
    finish = Message(PACKET, [
        Number(TIMESTAMP, end), Constant(SEQUENCE),
        Message(TRACK_EVENT, [Constant(END), Number(TRACK, track)]),
    ])  # fmt: skip
    return encoded(len(track), begin, finish)


def _arguments(s: Slices, texts: Mapping[str, int]) -> Iterator[Field]:
    """Yield what is known of slices as annotations; what is absent is left out."""
    columns: dict[str, tuple[Int64, bytes]] = {
        name: (column, WHOLE) for name, column in s.labels.items()
    }
    columns["cost"] = _text_codes(s.cost, texts), WORD
    columns["bytes"] = np.round(s.bytes).astype(np.int64), WHOLE
    columns["group"] = _text_codes(s.group, texts), WORD
    wait = s.wait
    columns["wait_ns"] = np.where(wait == NONE, NONE, nanoseconds(wait)), WHOLE
    for number, name in enumerate(_ARGUMENTS, 1):
        values, kind = columns[name]
        if (there := values != NONE).any():
            named = Constant(tag(1, VARINT) + varint(number))
            yield Message(ANNOTATION, [named, Number(kind, np.maximum(values, 0))], there)


def _text_codes(coded: Coded, texts: Mapping[str, int]) -> Int64:
    """Return the numbers of texts among those interned, NONE where there is none."""
    numbers = np.array([*(texts[text] for text in coded.texts), NONE], np.int64)
    return numbers[coded.code]


def _values(trace: Trace, counter: Counter, track: int) -> Bytes:
    """Return the packets of a counter."""
    value: Field
    if counter.unit == "%":
        value = Fixed(REAL, counter.values.astype(np.float64))
    else:
        value = Number(INTEGER, np.maximum(np.round(counter.values), 0).astype(np.int64))
    event = Message(TRACK_EVENT, [Constant(COUNT + TRACK + varint(track)), value])
    packet = Message(PACKET, [
        Number(TIMESTAMP, nanoseconds(counter.time)), Constant(SEQUENCE), event,
    ])  # fmt: skip
    return encoded(len(counter.time), packet)
