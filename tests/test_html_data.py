"""Data of a page: columns come back as they were, sums are those of ops, copies are kept once."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator import load, simulate, simulate_schedule
from simulator.errors import DescriptionError
from simulator.program import Program
from simulator.report.html import save_html
from simulator.report.html.charts import MOST_SAMPLES, memory_of, moments
from simulator.report.html.columns import LARGEST, Packed, packed
from simulator.report.html.density import BINS, density
from simulator.report.html.ops import ops_columns, ops_of
from simulator.report.html.page import page_text, run_data
from simulator.report.result import Result
from simulator.timeline import Timeline

Array = np.ndarray[Any, Any]


def unpacked(given: Packed) -> dict[str, Array]:
    """Return columns as a browser reads them: the other half of `packed`, in its own words."""
    data = np.frombuffer(zlib.decompress(base64.b64decode(given.text)), np.uint8)
    out, at = {}, 0
    for column in given.head:
        length, width = column["length"], column["width"]
        planes = data[at : at + length * width].reshape(width, length).astype(np.int64)
        at += length * width
        if column["kind"] == "real":
            out[column["name"]] = planes.T.astype(np.uint8).copy().view("<f4").reshape(-1)
        else:
            codes = sum((plane << (8 * k) for k, plane in enumerate(planes)), np.zeros(length, int))
            out[column["name"]] = codes + column["base"]
    assert at == len(data)
    return out


@pytest.fixture(scope="module")
def result(scenario_of: Callable[..., Any], cluster_of: Callable[..., Any]) -> Result:
    plan = {"pp": 2, "tp": 2, "dp": 2}
    return simulate(scenario_of(plan=plan, cluster=cluster_of(2, 4), run={"num_steps": 2}))


@pytest.fixture(scope="module")
def unlike(result: Result) -> Result:
    """The same run, each of its four replicas a microsecond later than the one before."""
    late = 10**6 * np.arange(result.tiled.num_tiles)
    start, end = (times[:, :1] + late for times in result.times.columns)
    return replace(result, times=Timeline(start, end, np.arange(len(late))))


def spans(result: Result, most: int = 400_000) -> set[tuple[int, ...]]:
    """Return (rank, stream, action, microbatch, start, end) of every op that a page can show."""
    ops = ops_of(result, most)
    columns = ops_columns(result, ops)
    found, at = [], 0
    of_rank = {}
    for sheet in range(ops.exact):
        where, _ = ops.of_sheet(sheet)
        count, before = where.stop - where.start, 0
        of_rank[sheet] = []
        for i in range(count):
            row = where.start + i
            if i and columns["track"][row] != columns["track"][row - 1]:
                before = 0
            start = before + int(columns["gap"][at + i])
            before = start + int(columns["duration"][at + i])
            stream = ops.tracks[columns["track"][row]]
            labels = int(columns["action"][row]), int(columns["microbatch"][row])
            of_rank[sheet].append((stream, *labels, start, before))
        at += count
    for (place, tile), sheet in np.ndenumerate(ops.sheet_of):
        rank = int(result.tiled.tile_ranks[place, tile])
        found += [(rank, *span) for span in of_rank.get(int(sheet), [])]
    return set(found)


def every_span(result: Result) -> set[tuple[Any, ...]]:
    p, t = result.program, result.timeline
    columns = (p.rank, [p.streams[s] for s in p.stream.tolist()], p.action, p.microbatch, t.start,
               t.end)  # fmt: skip
    plain = [c if isinstance(c, list) else c.tolist() for c in columns]
    return set(zip(*plain, strict=True))


# Columns


@given(
    hnp.arrays(np.int64, st.integers(0, 50), elements=st.integers(-(2**52), 2**52 - 1)),
    hnp.arrays(np.int8, st.integers(0, 50)),
    hnp.arrays(np.float32, st.integers(0, 50), elements=st.floats(-1e6, 1e6, width=32)),
)
def test_columns_come_back_as_they_were(large: Array, small: Array, real: Array) -> None:
    back = unpacked(packed({"large": large, "small": small, "real": real}))
    assert back["large"].tolist() == large.tolist()
    assert back["small"].tolist() == small.tolist()
    assert back["real"].tolist() == real.tolist()


def test_a_column_takes_as_many_bytes_as_its_range_needs() -> None:
    head = packed({"a": np.array([1000, 1255]), "b": np.array([1000, 1256])}).head
    assert [column["width"] for column in head] == [1, 2]


def test_a_time_that_browsers_cannot_count_is_refused() -> None:
    with pytest.raises(DescriptionError, match=r"browsers count exactly .* 2\.5 hours"):
        packed({"duration": np.array([LARGEST])})


# Sums


def test_an_op_fills_the_pieces_that_it_covers() -> None:
    # Pieces of 100 ticks; an op from 150 to 400 fills half of piece 1, and pieces 2 and 3.
    share = density(np.array([0]), 2, np.array([150]), np.array([400]), 100 * BINS)
    assert share[0, :5].tolist() == [0.0, 0.5, 1.0, 1.0, 0.0]
    assert not share[1].any()


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 10**6), st.integers(0, 10**6)), max_size=30
    )
)
def test_the_sums_of_pieces_are_those_of_the_ops(ops: list[tuple[int, int, int]]) -> None:
    kind, start, length = (np.array([op[k] for op in ops], np.int64) for k in range(3))
    share = density(kind, 3, start, start + length, 2 * 10**6)
    ticks = share.sum(axis=1) * (2 * 10**6 / BINS)
    assert ticks == pytest.approx(np.bincount(kind, weights=length, minlength=3), abs=1e-3)


def test_ranks_beyond_the_most_ops_are_kept_as_their_sums(unlike: Result) -> None:
    ops = ops_of(unlike, len(unlike.tiled.rank))  # the ops of one replica
    assert ops.exact == 2
    assert len(ops.sheets) == 8
    share = ops_columns(unlike, ops)["density"] / 255
    piece = unlike.times.makespan / BINS
    for number, sheet in enumerate(range(ops.exact, 8)):
        where, rows = ops.of_sheet(sheet)
        start, end = (t[rows, ops.sheets[sheet, 1]] for t in unlike.times.columns)
        ticks = np.bincount(ops.kind[where], weights=end - start, minlength=len(ops.kinds))
        shown = share[number].sum(axis=1) * piece
        assert shown == pytest.approx(ticks, abs=BINS * piece / 510)


# Ops


def test_every_op_of_every_rank_is_there_at_its_time(result: Result) -> None:
    assert spans(result) == every_span(result)


def test_so_is_it_where_replicas_differ(unlike: Result) -> None:
    assert spans(unlike) == every_span(unlike)


def test_ranks_that_run_alike_are_kept_once(result: Result) -> None:
    ops = ops_of(result)
    assert len(ops.sheets) == 2  # one for each stage of eight ranks
    assert len(ops_columns(result, ops)["gap"]) == len(result.tiled.rank)


def test_running_every_rank_adds_no_op(
    scenario_of: Callable[..., Any], cluster_of: Callable[..., Any], result: Result
) -> None:
    assert result.scenario is not None
    unfolded = simulate(result.scenario, folded=False)
    assert unfolded.times.columns[0].shape[1] == 4
    assert len(ops_of(unfolded).sheets) == 2


def test_a_rank_with_more_ops_than_a_page_holds_is_refused(result: Result) -> None:
    with pytest.raises(DescriptionError, match="a page holds 10 ops, and one rank alone has"):
        ops_of(result, 10)


def test_a_flow_says_how_long_its_rank_waited(
    op: Callable[..., Any], program_of: Callable[..., tuple[Program, Array]]
) -> None:
    # Rank 1 comes 30 ticks later than rank 0.
    ops = [op(0, 10), op(1, 40), op(0, 5, "tp", (0,), "x"), op(1, 5, "tp", (1,), "x")]
    program, _ = program_of(ops)
    timeline = Timeline(np.array([0, 0, 40, 40]), np.array([10, 40, 45, 45]))
    columns = ops_columns(made := Result(program, timeline), ops_of(made))
    assert columns["wait"].tolist() == [0, 30, 0, 0]
    assert columns["members"].tolist() == [0, 2, 0, 2]


def test_an_op_of_no_stream_has_a_track(
    op: Callable[..., Any], program_of: Callable[..., tuple[Program, Array]]
) -> None:
    program, _ = program_of([op(0, 10), op(0, 5, None)])
    made = Result(program, Timeline(np.array([0, 0]), np.array([10, 5])))
    assert ops_of(made).tracks == ("compute", "no stream")


# Memory


def test_few_moments_are_all_kept() -> None:
    assert moments(np.arange(10), np.ones(10)).tolist() == list(range(10))


def test_of_many_moments_the_highest_of_each_piece_is_kept() -> None:
    ticks = np.arange(100_000)
    held = np.random.default_rng(0).random(len(ticks))
    kept = moments(ticks, held)
    assert len(kept) <= MOST_SAMPLES
    assert held.argmax() in kept
    assert {0, len(ticks) - 1} <= set(kept.tolist())


def test_memory_of_the_fullest_rank_is_shown_first_and_reaches_its_peak(result: Result) -> None:
    shown, columns = memory_of(result)
    rank = result.summary.peak_memory_rank
    assert shown[0]["rank"] == rank
    total = sum(columns[f"memory0.{part}"] for part in shown[0]["parts"])
    assert total.max() == pytest.approx(result.device_memory_bytes[rank], abs=10)


# Pages


def test_the_same_run_gives_the_same_page(result: Result) -> None:
    assert result.scenario is not None
    assert page_text([result]) == page_text([simulate(result.scenario)])


def test_a_page_loads_nothing_from_elsewhere(result: Result) -> None:
    text = page_text([result])
    assert "default-src 'none'" in text
    assert not re.search(r"(?:src|href)\s*=\s*[\"'](?!data:,|#)", text)
    assert not re.search(r"@import|url\(", text)


def test_a_name_cannot_break_out_of_its_page(result: Result) -> None:
    assert result.scenario is not None
    evil = "</script><script>alert(1)</script>"
    text = page_text([replace(result, scenario=replace(result.scenario, name=evil))])
    assert evil not in text
    data = re.search(r'<script type="application/json">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    assert json.loads(data[1])["about"]["name"] == evil


def test_numbers_of_a_page_are_those_of_the_report(result: Result) -> None:
    about = run_data(result)["about"]
    metrics = {metric["name"]: metric["value"] for metric in about["metrics"]}
    assert metrics["step time"] == result.step_time_s
    assert metrics["MFU"] == result.summary.mfu
    assert sum(about["meanShares"]) == pytest.approx(1.0)
    assert about["verdict"].lower() == result.summary.bottleneck.lower()


def test_a_bare_schedule_has_a_page(tmp_path: Path) -> None:
    simulate_schedule("1F1B", stages=3, microbatches=4).save_html(tmp_path / "bare.html")
    assert (tmp_path / "bare.html").stat().st_size > 100_000


@pytest.mark.parametrize(("name", "most"), [("llama-3-8b-3d", 3e6), ("gpt3-175b-1024gpu", 15e6)])
def test_a_page_of_many_ranks_is_small(name: str, most: float) -> None:
    assert len(page_text([simulate(load(name))])) < most


def test_a_page_of_64_ranks_that_all_differ_is_small() -> None:
    result = simulate(load("llama-3-8b-3d"))
    random = np.random.default_rng(0)
    rows, tiles = len(result.tiled.rank), result.tiled.num_tiles
    start, end = result.times.columns
    length = ((end - start) * (0.9 + 0.1 * random.random((rows, tiles)))).astype(np.int64)
    times = Timeline(start + np.zeros((1, tiles), np.int64), start + length, np.arange(tiles))
    assert len(page_text([replace(result, times=times)])) < 3e6


def test_two_runs_of_one_scenario_are_told_apart_by_their_names(
    trainsim: Callable[..., Any], tmp_path: Path
) -> None:
    change = "plan.microbatch_size=4"
    code, _, err = trainsim("compare", "gpt2-xl-1gpu", "--set", change, "--html", "both.html")
    assert (code, err) == (0, "")
    text = (tmp_path / "both.html").read_text(encoding="utf-8")
    title = re.search("<title>(.*)</title>", text)
    assert title is not None
    before, after = title[1].split(" against ")
    assert after == f"{before}, {change}"


def test_three_results_are_too_many(result: Result, tmp_path: Path) -> None:
    with pytest.raises(DescriptionError, match="one result or two side by side, not 3"):
        save_html([result] * 3, tmp_path / "a.html")


def test_a_page_must_be_called_html(result: Result, tmp_path: Path) -> None:
    with pytest.raises(DescriptionError, match=r"must end in \.html"):
        result.save_html(tmp_path / "page.pdf")


def test_the_command_writes_a_page(trainsim: Callable[..., Any], tmp_path: Path) -> None:
    code, _, err = trainsim("run", "gpt2-xl-1gpu", "--html", "run.html")
    assert (code, err) == (0, "")
    assert (tmp_path / "run.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_page_and_a_trace_cannot_be_one_file(trainsim: Callable[..., Any]) -> None:
    code, _, err = trainsim("run", "gpt2-xl-1gpu", "--html", "a.json", "--trace", "a.json")
    assert code == 2
    assert "must end in .html" in err


def test_a_measured_run_has_a_page_too(trainsim: Callable[..., Any], tmp_path: Path) -> None:
    traces = Path(__file__).parent / "traces"
    files = sorted(traces.glob("own_1f1b_m4_rank*.json"))
    code, _, err = trainsim("import", "kineto", *files, "--html", "measured.html")
    assert (code, err) == (0, "")
    assert "2 ranks" in (tmp_path / "measured.html").read_text(encoding="utf-8")
