"""The trace file: what viewers read is the timeline to the nanosecond, always the same bytes."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simulator import simulate, simulate_schedule
from simulator.errors import DescriptionError
from simulator.program import NONE
from simulator.report import trace_columns, trace_json
from simulator.report.result import Result
from simulator.report.trace import write_trace
from simulator.timeline import Timeline

Event = dict[str, Any]


def read(path: Path) -> list[Event]:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events: list[Event] = json.loads(data, parse_float=Decimal)["traceEvents"]
    return events


def of_phase(events: list[Event], phase: str) -> list[Event]:
    return [event for event in events if event["ph"] == phase]


def ticks(microseconds: Decimal | int) -> int:
    count = microseconds * 10**6
    assert count == int(count)
    return int(count)


def overlaps(events: list[Event]) -> int:
    tracks = defaultdict(list)
    for e in of_phase(events, "X"):
        tracks[e["pid"], e["tid"]].append((ticks(e["ts"]), ticks(e["ts"]) + ticks(e["dur"])))
    return sum(
        before[1] > after[0]
        for spans in map(sorted, tracks.values())
        for before, after in pairwise(spans)
    )


@pytest.fixture(scope="module")
def result(scenario_of: Callable[..., Any], cluster_of: Callable[..., Any]) -> Result:
    plan = {"pp": 2, "tp": 2, "dp": 2}
    return simulate(scenario_of(plan=plan, cluster=cluster_of(2, 4), run={"num_steps": 2}))


@pytest.fixture(scope="module")
def events(result: Result, tmp_path_factory: pytest.TempPathFactory) -> list[Event]:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    write_trace(result, path)
    return read(path)


@pytest.fixture
def bare() -> Result:
    return simulate_schedule("1F1B", stages=3, microbatches=4, latency=0.25)


def test_every_op_is_one_slice_on_its_rank_at_its_time(result: Result, events: list[Event]) -> None:
    program, timeline = result.program, result.timeline
    start, end = (1000 * ((moment + 500) // 1000) for moment in (timeline.start, timeline.end))
    expected = zip(program.rank.tolist(), start.tolist(), end.tolist(),
                   program.stage.tolist(), program.step.tolist(), strict=True)  # fmt: skip
    found = (
        (e["pid"], ticks(e["ts"]), ticks(e["ts"]) + ticks(e["dur"]),
         e["args"]["stage"], e["args"]["step"])
        for e in of_phase(events, "X")
    )  # fmt: skip
    assert Counter(found) == Counter(expected)


def test_a_box_ends_where_the_next_one_begins_in_whole_nanoseconds(
    op: Callable[..., Any], program_of: Callable[..., Any], tmp_path: Path
) -> None:
    # 1.4 + 1.4 ns: the second begins at 1 ns and ends at 3 ns. Durations rounded by themselves
    # would be 1 ns each, and starts and durations of other sums overlap: viewers drop such boxes.
    program, ticks = program_of([op(0, 1400), op(0, 1400)])
    end = np.cumsum(ticks)
    write_trace(Result(program, Timeline(end - ticks, end)), tmp_path / "t.json")
    slices = of_phase(read(tmp_path / "t.json"), "X")
    assert [(e["ts"], e["dur"]) for e in slices] == [
        (0, Decimal("0.001")), (Decimal("0.001"), Decimal("0.002")),
    ]  # fmt: skip


def test_slices_of_one_track_never_overlap(events: list[Event]) -> None:
    assert overlaps(events) == 0


def test_ops_without_a_stream_lie_side_by_side(bare: Result, tmp_path: Path) -> None:
    # All ops of a rank at one time: without separate tracks, each would cover the others.
    ops = len(bare.program)
    program = replace(bare.program, stream=np.full(ops, NONE, np.int16))
    timeline = Timeline(np.zeros(ops, np.int64), np.full(ops, 7, np.int64))
    write_trace(replace(bare, tiled=program, times=timeline), tmp_path / "t.json")
    found = read(tmp_path / "t.json")
    assert (len(of_phase(found, "X")), overlaps(found)) == (ops, 0)


def test_an_op_that_takes_no_time_is_a_slice_too(tmp_path: Path) -> None:
    instant = simulate_schedule("GPipe", stages=2, microbatches=1)
    write_trace(instant, tmp_path / "t.json")
    slices = of_phase(read(tmp_path / "t.json"), "X")
    assert [e["name"] for e in slices if e["dur"] == 0] == [
        "send F0", "recv B0", "send B0", "recv F0",
    ]  # fmt: skip


def test_every_message_is_one_arrow_from_its_send_to_its_receive(
    result: Result, events: list[Event]
) -> None:
    begins = {e["id"]: e for e in of_phase(events, "s")}
    ends = {e["id"]: e for e in of_phase(events, "f")}
    at = {(e["pid"], e["tid"], e["ts"], e["name"][:4]): e["args"] for e in of_phase(events, "X")}
    for key, begin in begins.items():
        send = at[begin["pid"], begin["tid"], begin["ts"], "send"]
        end = ends[key]
        recv = at[end["pid"], end["tid"], end["ts"], "recv"]
        assert end["bp"] == "e"
        assert abs(send["stage"] - recv["stage"]) == 1
        assert send["microbatch"] == recv["microbatch"]
    # 2 replicas along dp and 2 along tp, 4 microbatches forward and back, 2 steps.
    assert len(begins) == len(of_phase(events, "s")) == 4 * 4 * 2 * 2
    assert begins.keys() == ends.keys()


def test_arrows_to_ranks_that_are_not_shown_are_left_out(result: Result, tmp_path: Path) -> None:
    write_trace(result, tmp_path / "t.json", ranks=[0, 1])  # both of the first stage
    assert not of_phase(read(tmp_path / "t.json"), "s")


def test_only_the_chosen_ranks_are_shown(result: Result, tmp_path: Path) -> None:
    write_trace(result, tmp_path / "t.json", ranks=[5, 2])
    assert {e["pid"] for e in read(tmp_path / "t.json")} == {2, 5}


def test_a_rank_that_does_not_exist_is_refused(result: Result, tmp_path: Path) -> None:
    with pytest.raises(DescriptionError, match=r"^rank 8 lies outside 0\.\.7$"):
        write_trace(result, tmp_path / "t.json", ranks=[0, 8])


def test_processes_are_named_by_rank_place_and_coordinates(events: list[Event]) -> None:
    # 2 nodes of 4, order dp, pp, tp: rank 7 is dp 1, pp 1, tp 1 and the last of node 1.
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names[7] == "rank 7 · node 1 gpu 3 · pp1 dp1 tp1"


def test_tracks_of_a_rank_are_ordered_from_compute_to_receives(events: list[Event]) -> None:
    threads = {e["tid"]: e["args"]["name"] for e in events
               if e["name"] == "thread_name" and e["pid"] == 0}  # fmt: skip
    order = {e["tid"]: e["args"]["sort_index"] for e in events
             if e["name"] == "thread_sort_index" and e["pid"] == 0}  # fmt: skip
    by_index = [threads[tid] for tid in sorted(threads, key=order.__getitem__)]
    assert by_index == ["compute", "tp", "dp", "tied", "send F +1", "recv B +1"]


def test_thread_ids_rise_in_the_order_of_tracks_and_are_no_process_id(
    events: list[Event],
) -> None:
    index = {e["tid"]: (e["pid"], e["args"]["sort_index"]) for e in events
             if e["name"] == "thread_sort_index"}  # fmt: skip
    assert sorted(index) == sorted(index, key=index.__getitem__)
    assert all(tid != pid for tid, (pid, _) in index.items())


def test_flows_lie_on_the_track_that_their_category_names(events: list[Event]) -> None:
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found = {(threads[e["tid"]], e["cat"]) for e in of_phase(events, "X") if "group" in e["args"]}
    assert found == {
        ("tp", "tp"), ("dp", "dp"), ("tied", "tied"), ("send F +1", "pp"), ("recv F +1", "pp"),
        ("send B +1", "pp"), ("recv B +1", "pp"),
    }  # fmt: skip


def test_slices_have_short_names_and_the_categories_of_the_breakdown(
    events: list[Event],
) -> None:
    kinds = {(e["name"], e["cat"]) for e in of_phase(events, "X") if e["name"][-1] not in "123"}
    assert kinds == {
        ("F0", "forward"), ("B0", "backward"), ("OPT", "optimizer"), ("send F0", "pp"),
        ("recv F0", "pp"), ("send B0", "pp"), ("recv B0", "pp"), ("all_reduce", "tp"),
        ("all_reduce", "dp"), ("all_reduce", "tied"),
    }  # fmt: skip


def test_flows_state_their_bytes_and_group(events: list[Event]) -> None:
    # One microbatch of 32 tokens x 64 wide x 2 bytes, between ranks 0 and 2.
    send = next(e["args"] for e in of_phase(events, "X") if e["name"] == "send F0")
    assert (send["bytes"], send["group"]) == (4096, "0, 2")


def test_a_group_of_many_ranks_is_shortened(
    tmp_path: Path, scenario_of: Callable[..., Any]
) -> None:
    write_trace(simulate(scenario_of(plan={"dp": 9})), tmp_path / "t.json")
    groups = {e["args"].get("group") for e in read(tmp_path / "t.json") if e["ph"] == "X"}
    assert groups == {None, "0, 1, 2, 3, 4, 5, 6, 7, ... (9 ranks)"}


def test_a_receive_that_is_posted_early_waits_for_its_send(tmp_path: Path) -> None:
    # Stage 0 computes forward for 1 s; the receive of stage 1 is there from the beginning.
    result = simulate_schedule("GPipe", stages=2, microbatches=1, latency=0.5)
    write_trace(result, tmp_path / "t.json")
    waits = {e["name"]: e["args"].get("wait_us") for e in of_phase(read(tmp_path / "t.json"), "X")}
    assert (waits["send F0"], waits["recv F0"]) == (0, 1_000_000)


def test_the_memory_counter_has_the_peak_of_the_result(result: Result, events: list[Event]) -> None:
    memory = [e for e in of_phase(events, "C") if e["name"] == "memory" and e["pid"] == 0]
    peak = max(float(e["args"]["GB"]) for e in memory)
    assert peak == pytest.approx(result.peak_memory_bytes[0] / 1e9, abs=1e-6)


def test_a_bare_schedule_draws_no_memory(bare: Result, tmp_path: Path) -> None:
    write_trace(bare, tmp_path / "t.json")
    names = {e["name"] for e in of_phase(read(tmp_path / "t.json"), "C")}
    assert names == {"microbatches in flight"}


def test_1f1b_has_as_many_microbatches_in_flight_as_stages_lie_ahead(
    bare: Result, tmp_path: Path
) -> None:
    # Three stages, at least three microbatches: stage s keeps 3 - s.
    write_trace(bare, tmp_path / "t.json")
    most: dict[int, int] = defaultdict(int)
    for e in of_phase(read(tmp_path / "t.json"), "C"):
        most[e["pid"]] = max(most[e["pid"]], e["args"]["count"])
    assert most == {0: 3, 1: 2, 2: 1}


def test_microbatches_in_flight_end_at_none(events: list[Event]) -> None:
    last = {e["pid"]: e["args"]["count"] for e in of_phase(events, "C") if "count" in e["args"]}
    assert last == dict.fromkeys(range(8), 0)


def test_a_microbatch_is_in_flight_until_its_backward_ends_not_its_reduction(
    events: list[Event],
) -> None:
    last = max(e["ts"] for e in of_phase(events, "C") if e["pid"] == 0 and "count" in e["args"])
    ends = [e["ts"] + e["dur"] for e in of_phase(events, "X")
            if e["pid"] == 0 and e["cat"] == "backward"]  # fmt: skip
    assert last == max(ends)


def test_a_counter_has_one_value_at_one_time(events: list[Event]) -> None:
    keys = Counter((e["pid"], e["name"], e["ts"]) for e in of_phase(events, "C"))
    assert set(keys.values()) == {1}


def test_more_slices_than_are_written_together_are_all_written(
    result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_trace(result, tmp_path / "whole.json")
    monkeypatch.setattr(trace_json, "ROWS", 7)
    write_trace(result, tmp_path / "parts.json")
    whole, parts = (read(tmp_path / f"{name}.json") for name in ("whole", "parts"))
    assert Counter(map(str, parts)) == Counter(map(str, whole))


def test_a_trace_that_does_not_fit_in_memory_is_refused(
    result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_columns, "BYTES", 1e15)
    with pytest.raises(DescriptionError, match=r"a trace of [\d,]+ ops would need .* choose ranks"):
        write_trace(result, tmp_path / "t.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_two_writings_are_the_same_bytes(result: Result, tmp_path: Path, name: str) -> None:
    (tmp_path / "other").mkdir()
    write_trace(result, tmp_path / name)
    write_trace(result, tmp_path / "other" / name)
    assert (tmp_path / name).read_bytes() == (tmp_path / "other" / name).read_bytes()


def test_a_gzipped_trace_holds_the_same_events(
    result: Result, events: list[Event], tmp_path: Path
) -> None:
    write_trace(result, tmp_path / "t.json.gz")
    assert read(tmp_path / "t.json.gz") == events


def test_a_gzipped_trace_holds_no_time_of_writing(bare: Result, tmp_path: Path) -> None:
    write_trace(bare, tmp_path / "t.json.gz")
    assert (tmp_path / "t.json.gz").read_bytes()[4:8] == bytes(4)  # RFC 1952: MTIME


def test_names_that_json_must_escape_survive(
    op: Callable[..., Any], program_of: Callable[..., Any], tmp_path: Path
) -> None:
    name = 'a "quoted" \\ naïve\nname'
    program, durations = program_of([op(0, 5, name=name), op(0, 3, name="b")])
    end = np.cumsum(durations)
    write_trace(Result(program, Timeline(end - durations, end)), tmp_path / "t.json")
    assert of_phase(read(tmp_path / "t.json"), "X")[0]["args"]["cost"] == name


def test_a_nanosecond_is_not_lost_after_an_hour(
    op: Callable[..., Any], program_of: Callable[..., Any], tmp_path: Path
) -> None:
    program, _ = program_of([op(0, 1)])
    start = np.array([3600 * 10**12 + 1000], np.int64)
    write_trace(Result(program, Timeline(start, start + 1000)), tmp_path / "t.json")
    assert '"ts":3600000000.001,"dur":0.001,' in (tmp_path / "t.json").read_text("utf-8")


def test_links_that_flows_share_have_counters_of_their_use(
    scenario_of: Callable[..., Any], cluster_of: Callable[..., Any], tmp_path: Path
) -> None:
    s = scenario_of(plan={"dp": 4}, cluster=cluster_of(2, 2), run={"network": "fluid"})
    shared = simulate(s)
    write_trace(shared, tmp_path / "t.json")
    events = read(tmp_path / "t.json")
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names[4] == "shared links"
    busiest = shared.links.hottest(1)[0]
    name = f"link {shared.links.traffic.names[busiest]}"
    values = [float(e["args"]["%"]) for e in events if e["name"] == name]
    assert max(values) == pytest.approx(100 * shared.links.peak[busiest], abs=1e-3)
    assert values[-1] == 0


def test_a_program_without_ops_is_an_empty_trace(
    program_of: Callable[..., Any], tmp_path: Path
) -> None:
    program, none = program_of([])
    write_trace(Result(program, Timeline(none, none)), tmp_path / "t.json")
    assert read(tmp_path / "t.json") == []


@pytest.mark.parametrize("name", ["t.perfetto", "t.gz", "t", "t.json.zip"])
def test_any_other_kind_of_name_is_refused(bare: Result, tmp_path: Path, name: str) -> None:
    with pytest.raises(
        DescriptionError, match=r"must end in \.json or \.json\.gz or \.pftrace or "
    ):
        write_trace(bare, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_refused_and_nothing_is_left(
    bare: Result, tmp_path: Path
) -> None:
    with pytest.raises(DescriptionError, match="there is no folder"):
        write_trace(bare, tmp_path / "absent" / "t.json")
    assert list(tmp_path.iterdir()) == []


def test_save_trace_writes_the_trace(bare: Result, tmp_path: Path) -> None:
    write_trace(bare, tmp_path / "a.json")
    bare.save_trace(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
