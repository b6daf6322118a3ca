"""Perfetto's protocol buffers hold what JSON holds, as the perfetto package reads them."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator import simulate, simulate_schedule
from simulator.program import NONE
from simulator.report import trace_perfetto, wire
from simulator.report.result import Result
from simulator.report.trace import write_trace
from simulator.timeline import Timeline
from simulator.wire import FIXED64, TEXT, VARINT, tag

pb = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")


def parsed(path: Path) -> Any:
    trace = pb.Trace()
    trace.ParseFromString(path.read_bytes())
    return trace


class Read:
    """A trace as a viewer sees it: slices, counters and arrows by the names of their tracks."""

    def __init__(self, path: Path) -> None:
        first, *packets = parsed(path).packet
        assert first.sequence_flags == pb.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
        tables = first.interned_data
        names = {e.iid: e.name for e in tables.event_names}
        categories = {e.iid: e.name for e in tables.event_categories}
        keys = {e.iid: e.name for e in tables.debug_annotation_names}
        texts = {e.iid: e.str.decode() for e in tables.debug_annotation_string_values}
        self.tracks = {p.track_descriptor.uuid: p.track_descriptor for p in packets
                       if p.HasField("track_descriptor")}  # fmt: skip
        self.slices: list[dict[str, Any]] = []
        self.counters: dict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
        opened: dict[int, dict[str, Any]] = {}
        for packet in packets:
            event = packet.track_event
            if not packet.HasField("track_event"):
                continue
            uuid = event.track_uuid
            assert uuid in self.tracks
            if event.type == pb.TrackEvent.TYPE_SLICE_BEGIN:
                assert uuid not in opened, "a slice begins within another"
                assert packet.sequence_flags == pb.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
                args = {
                    keys[a.name_iid]: a.int_value if a.HasField("int_value")
                    else texts[a.string_value_iid]
                    for a in event.debug_annotations
                }  # fmt: skip
                opened[uuid] = {
                    "rank": self.rank(uuid), "name": names[event.name_iid],
                    "category": categories[event.category_iids[0]], "begin": packet.timestamp,
                    "args": args, "out": list(event.flow_ids),
                    "in": list(event.terminating_flow_ids),
                }  # fmt: skip
            elif event.type == pb.TrackEvent.TYPE_SLICE_END:
                self.slices.append(opened.pop(uuid) | {"end": packet.timestamp})
            else:
                value = (event.counter_value if event.HasField("counter_value")
                         else event.double_counter_value)  # fmt: skip
                key = self.rank(uuid), self.tracks[uuid].name
                self.counters[key].append((packet.timestamp, value))
        assert not opened

    def rank(self, uuid: int) -> str:
        """Return the name of the outermost track, without the zeros that order it."""
        track = self.tracks[uuid]
        while track.parent_uuid:
            track = self.tracks[track.parent_uuid]
        return track.name


def as_json(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))["traceEvents"]
    return events


@pytest.fixture(scope="module")
def result(scenario_of: Callable[..., Any], cluster_of: Callable[..., Any]) -> Result:
    plan = {"pp": 2, "tp": 2, "dp": 2}
    run = {"num_steps": 2, "network": "fluid"}
    return simulate(scenario_of(plan=plan, cluster=cluster_of(2, 4), run=run))


@pytest.fixture(scope="module")
def files(result: Result, tmp_path_factory: pytest.TempPathFactory) -> tuple[Read, Any]:
    folder = tmp_path_factory.mktemp("traces")
    for name in ("t.pftrace", "t.json"):
        write_trace(result, folder / name)
    return Read(folder / "t.pftrace"), as_json(folder / "t.json")


def test_slices_are_those_of_the_json_trace(files: tuple[Read, Any]) -> None:
    read, events = files
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    found, expected = Counter(), Counter()
    for s in read.slices:
        args = dict(s["args"])
        if "wait_ns" in args:
            args["wait_us"] = args.pop("wait_ns") / 1000
        found[
            s["rank"], s["name"], s["category"], s["begin"], s["end"], str(sorted(args.items()))
        ] += 1
    for e in events:
        if e["ph"] == "X":
            begin, end = round(1000 * e["ts"]), round(1000 * (e["ts"] + e["dur"]))
            args = {k: float(v) if k == "wait_us" else v for k, v in e["args"].items()}
            expected[
                processes[e["pid"]], e["name"], e["cat"], begin, end, str(sorted(args.items()))
            ] += 1
    assert found == expected


def test_counters_are_those_of_the_json_trace(files: tuple[Read, Any]) -> None:
    read, events = files
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    expected = defaultdict(list)
    for e in events:
        if e["ph"] == "C":
            ((unit, value),) = e["args"].items()
            scale = 1e9 if unit == "GB" else 1
            expected[processes[e["pid"]], e["name"]].append((round(1000 * e["ts"]), scale * value))
    assert read.counters.keys() == expected.keys()
    for key, values in read.counters.items():
        assert [t for t, _ in values] == [t for t, _ in expected[key]]
        assert [v for _, v in values] == pytest.approx([v for _, v in expected[key]], abs=1e3)


def test_every_arrow_goes_from_a_send_to_a_receive_of_its_microbatch(
    files: tuple[Read, Any],
) -> None:
    read, events = files
    out = {s["out"][0]: s for s in read.slices if s["out"]}
    into = {s["in"][0]: s for s in read.slices if s["in"]}
    assert out.keys() == into.keys()
    assert len(out) == sum(e["ph"] == "s" for e in events) > 0
    for arrow, send in out.items():
        assert send["name"].replace("send", "recv") == into[arrow]["name"]
        assert 0 not in (arrow, send["args"]["bytes"])


def test_a_rank_shows_its_computation_and_its_streams_lie_below(files: tuple[Read, Any]) -> None:
    read, _ = files
    (rank,) = (uuid for uuid, t in read.tracks.items() if t.name.startswith("rank 0 "))
    assert read.tracks[rank].child_ordering == pb.TrackDescriptor.EXPLICIT
    below = [t for t in read.tracks.values() if t.parent_uuid == rank]
    names = [t.name for t in sorted(below, key=lambda t: t.sibling_order_rank)]
    assert names == [
        "tp", "dp", "tied", "send F +1", "recv B +1", "memory", "microbatches in flight",
    ]  # fmt: skip


def test_ranks_are_padded_so_that_names_order_them(
    scenario_of: Callable[..., Any], tmp_path: Path
) -> None:
    write_trace(simulate(scenario_of(plan={"dp": 12}), folded=False), tmp_path / "t.pftrace")
    outermost = [t.name for t in Read(tmp_path / "t.pftrace").tracks.values() if not t.parent_uuid]
    assert outermost == sorted(outermost)
    assert outermost[2].startswith("rank 02 ")


def test_memory_is_counted_in_bytes(result: Result, files: tuple[Read, Any]) -> None:
    read, _ = files
    (key,) = (k for k in read.counters if k[1] == "memory" and k[0].startswith("rank 0 "))
    assert max(v for _, v in read.counters[key]) == round(result.peak_memory_bytes[0])


def test_ops_that_take_no_time_are_slices_too(tmp_path: Path) -> None:
    instant = simulate_schedule("GPipe", stages=2, microbatches=1)
    write_trace(instant, tmp_path / "t.pftrace")
    none = [s["name"] for s in Read(tmp_path / "t.pftrace").slices if s["begin"] == s["end"]]
    assert sorted(none) == ["recv B0", "recv F0", "send B0", "send F0"]


def test_ops_without_a_stream_are_tracks_below_their_rank(tmp_path: Path) -> None:
    bare = simulate_schedule("1F1B", stages=2, microbatches=2)
    ops = len(bare.program)
    program = replace(bare.program, stream=np.full(ops, NONE, np.int16))
    timeline = Timeline(np.zeros(ops, np.int64), np.full(ops, 7000, np.int64))
    write_trace(replace(bare, tiled=program, times=timeline), tmp_path / "t.pftrace")
    assert len(Read(tmp_path / "t.pftrace").slices) == ops


def test_a_gzipped_trace_holds_the_same_packets(result: Result, tmp_path: Path) -> None:
    for name in ("t.pftrace", "t.pftrace.gz"):
        write_trace(result, tmp_path / name)
    plain, packed = ((tmp_path / f"t.pftrace{end}").read_bytes() for end in ("", ".gz"))
    assert gzip.decompress(packed) == plain


def test_a_program_without_ops_is_a_trace_too(
    program_of: Callable[..., Any], tmp_path: Path
) -> None:
    program, none = program_of([])
    write_trace(Result(program, Timeline(none, none)), tmp_path / "t.pftrace")
    assert Read(tmp_path / "t.pftrace").slices == []


def test_more_slices_than_are_encoded_together_are_all_written(
    result: Result, files: tuple[Read, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_trace(result, tmp_path / "whole.pftrace")
    monkeypatch.setattr(trace_perfetto, "ROWS", 7)
    write_trace(result, tmp_path / "parts.pftrace")
    assert (tmp_path / "whole.pftrace").read_bytes() == (tmp_path / "parts.pftrace").read_bytes()


@given(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=20), st.data())
def test_numbers_are_encoded_as_protobuf_does(values: list[int], data: st.DataObject) -> None:
    some = data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values)))
    column, there = np.array(values, np.int64), np.array(some)
    event = wire.Message(tag(11, TEXT), [
        wire.Constant(tag(9, VARINT) + b"\x01"),
        wire.Number(tag(11, VARINT), column, there),
        wire.Fixed(tag(47, FIXED64), column, ~there),
    ])  # fmt: skip
    packet = wire.Message(tag(1, TEXT), [event])
    trace = pb.Trace()
    trace.ParseFromString(wire.encoded(len(values), packet).tobytes())
    for p, value, is_there in zip(trace.packet, values, some, strict=True):
        assert p.track_event.type == 1
        assert (p.track_event.track_uuid if is_there else p.track_event.flow_ids[0]) == value
        assert p.track_event.HasField("track_uuid") == is_there
        assert len(p.track_event.flow_ids) == (not is_there)
