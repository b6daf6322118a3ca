"""Sweeps: values and grids as people write them, points, rows, journals, workers."""

import io
import json
import sys
import threading
from concurrent.futures import Future
from itertools import pairwise

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import simulator as sim
from simulator.describe.change import changed
from simulator.errors import DescriptionError, TrainsimError
from simulator.explore.sweep import pools, workers
from simulator.explore.sweep.grid import Grid, axis, read_rows, zipped
from simulator.explore.sweep.journal import HEAD, Journal
from simulator.explore.sweep.point import point, resolver
from simulator.explore.sweep.row import Record, measure
from simulator.explore.sweep.run import grid_of, run_sweep
from simulator.explore.sweep.values import fill, parse_values


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1,2,4,...,64", [1, 2, 4, 8, 16, 32, 64]),
        ("8,16,24,...,48", [8, 16, 24, 32, 40, 48]),
        ("10,20,...,50", [10, 20, 30, 40, 50]),  # doubling passes 50
        ("64,32,16,...,2", [64, 32, 16, 8, 4, 2]),
        ("0.1,0.2,0.3,...,0.5", [0.1, 0.2, 0.3, 0.4, 0.5]),
        ("1,2,4,...,16,20,24,...,32", [1, 2, 4, 8, 16, 20, 24, 28, 32]),
        ("dgx-a100, dgx-h100", ["dgx-a100", "dgx-h100"]),
        ('"a, b",[1,2],{x=1,y=2}', ["a, b", [1, 2], {"x": 1, "y": 2}]),
        ("true,1 USD/h", [True, "1 USD/h"]),
    ],
)
def test_values_are_read_as_they_are_written(text, values):
    assert parse_values(f"key={text}") == ("key", values)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("1,2,...,64", "may go on by adding or by multiplying; write one more value, as 1,2,3,..."),
        ("1,2,4,...,63", "neither adds nor multiplies its way to 63"),
        ("1,...,8", "needs two values or more before it"),
        ("1,2,...", "needs a value behind it"),
        ("a,b,...,d", "fills between numbers"),
        ("1,,2", "a value is missing"),
        ("", "a value is missing"),
        ("0,1,2,...,1e9", "stands for 999,999,998 values"),
    ],
)
def test_values_that_say_nothing_certain_are_refused(text, complaint):
    with pytest.raises(DescriptionError, match=complaint):
        parse_values(f"key={text}")


@given(st.integers(-50, 50), st.integers(-9, 9).filter(bool), st.integers(4, 40))
def test_steps_that_add_are_filled(first, step, count):
    every = [first + step * k for k in range(count)]
    assert fill([*every[:3], ..., every[-1]]) == every


@given(st.integers(1, 9), st.integers(2, 5), st.integers(4, 12))
def test_steps_that_multiply_are_filled(first, ratio, count):
    every = [first * ratio**k for k in range(count)]
    filled = fill([*every[:3], ..., every[-1]])
    assert filled == every
    assert all(b == a * ratio for a, b in pairwise(filled))


def test_the_last_axis_varies_fastest_and_zipped_keys_go_together():
    grid = grid_of({"a": [1, 2], "b": [3, 4]}, {"c": [5, 6], "d": [7, 8]}, None)
    assert [tuple(p.values()) for p in grid][:5] == [
        (5, 7, 1, 3), (5, 7, 1, 4), (5, 7, 2, 3), (5, 7, 2, 4), (6, 8, 1, 3),
    ]  # fmt: skip
    assert len(grid) == 8
    assert grid.keys == grid.varied == ("c", "d", "a", "b")


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: Grid((axis("a", [1]), axis("a", [2]))), "'a' is given twice"),
        (lambda: zipped({"a": [1, 2], "b": [1]}), "equally many, but a has 2, b has 1"),
        (lambda: axis("a", []), "a: the list of values is empty"),
        (lambda: axis("a", "1,2"), "a: '1,2' is no list of values"),
        (lambda: grid_of({k: [*range(101)] for k in "abc"}, {}, None), "1,030,301 points"),
    ],
)
def test_grids_that_say_nothing_certain_are_refused(make, complaint):
    with pytest.raises(DescriptionError, match=complaint):
        make()


def test_rows_are_read_from_csv_and_from_toml(tmp_path):
    table, listed = tmp_path / "rows.csv", tmp_path / "rows.toml"
    table.write_text("plan.tp,plan.pp,cluster.node\n1,4,dgx-a100\n2,,dgx-h100\n")
    listed.write_text(
        '[[rows]]\nplan = { tp = 1, pp = 4 }\ncluster.node = "dgx-a100"\n'
        '[[rows]]\nplan.tp = 2\ncluster.node = "dgx-h100"\n'
    )
    wanted = (
        {"plan.tp": 1, "plan.pp": 4, "cluster.node": "dgx-a100"},
        {"plan.tp": 2, "cluster.node": "dgx-h100"},
    )
    assert read_rows(table) == read_rows(listed) == wanted


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("a.csv", "", "must name each key once|has no rows"),
        ("a.csv", "plan.tp,plan.tp\n1,2\n", "must name each key once"),
        ("a.csv", "plan.tp\n1,2\n", "row 1 has 2 cells, and the first line 1 keys"),
        ("a.toml", "plan.tp = 1\n", r"holds \[\[rows\]\], and nothing else"),
        ("a.toml", "rows = [1]\n", "rows must be tables"),
        ("a.txt", "", "must end in .csv or .toml"),
    ],
)
def test_a_wrong_table_of_rows_is_refused(tmp_path, name, text, complaint):
    (tmp_path / name).write_text(text)
    with pytest.raises(DescriptionError, match=complaint):
        read_rows(tmp_path / name)


SETTINGS = [
    {"plan.pp": 2},
    {"devices": 64, "plan.microbatch_size": 1},
    {"devices": 4, "samples_per_device": 16},
    {"cluster.node": "dgx-h100", "cluster.node.nic.bandwidth": "100 Gb/s"},
    {"run.precision": "fp16", "cost.device_price": "2 USD/h"},
    {"cluster.num_nodes": 2, "plan.zero": 1, "run.detail": "layer"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_scenario_and_its_file_make_the_same_point(settings):
    name = "gpt2-xl-1f1b-32gpu"
    ours, theirs = (point(resolver(base), settings) for base in (name, sim.load(name)))
    assert not ours.reason
    assert ours.scenario == theirs.scenario
    assert ours.key == theirs.key


def resolved(settings, base="gpt2-xl-1f1b-32gpu"):
    return point(resolver(base), settings)


def test_devices_fill_nodes_and_dp_fills_devices():
    found = resolved({"devices": 64, "plan.pp": 2}).scenario
    assert (found.cluster.num_nodes, found.cluster.devices_per_node, found.plan.dp) == (8, 8, 32)
    found = resolved({"devices": 4}).scenario
    assert (found.cluster.num_nodes, found.cluster.devices_per_node, found.plan.dp) == (1, 4, 1)


def test_samples_scale_the_batch_with_the_devices():
    assert resolved({"devices": 64, "samples_per_device": 4}).scenario.run.global_batch_size == 256
    fixed = resolved({"devices": 64, "samples_per_device": "fixed"}).scenario
    assert fixed.run.global_batch_size == 512


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"devices": 12}, "devices: 12 fill no whole number of nodes .*; 8 or 16 would"),
        ({"devices": "many"}, "devices: 'many' must be a whole number"),
        ({"samples_per_device": 0.3}, "0.3 x 32 devices = 9.6 is no whole batch"),
        ({"samples_per_device": "some"}, "must be 'fixed' or a number above 0"),
        ({"plan.tp": 3}, "plan.tp 3 does not divide"),
        ({"plan.ttp": 3}, "unknown key 'ttp', did you mean 'tp'?"),
    ],
)
@pytest.mark.parametrize("base", ["gpt2-xl-1f1b-32gpu", "scenario"])
def test_what_is_refused_says_why_in_one_line(settings, reason, base):
    import re

    found = resolved(settings, sim.load("gpt2-xl-1f1b-32gpu") if base == "scenario" else base)
    assert found.scenario is None
    assert re.search(reason.replace("?", r"\?"), found.reason), found.reason
    assert "\n" not in found.reason


def test_changed_values_are_held_to_the_rules_of_files():
    base = sim.load("gpt2-xl-ddp")
    assert changed(base, {"cluster.node.device.memory": "40 GB"}).cluster.node.device.memory == 40e9
    with pytest.raises(DescriptionError, match="memory: 40 has no unit"):
        changed(base, {"cluster.node.device.memory": 40})


def test_what_is_set_moves_the_key_and_nothing_else_does():
    keys = {resolved(s).key for s in ({}, {"plan.pp": 4}, {"run.detail": "stage"})}
    assert len(keys) == 1  # what the file and the sweep say anyway
    assert resolved({"plan.pp": 2}).key not in keys


def test_refused_plans_are_rows_and_equal_scenarios_run_once(tmp_path):
    grid = grid_of({"plan.tp": [1, 2], "plan.pp": [4, 4, 2]}, {}, None)
    swept = run_sweep("gpt2-xl-1f1b-32gpu", grid, out=tmp_path / "rows.csv")
    assert [row["status"] for row in swept.rows] == ["ok"] * 3 + ["refused"] * 3
    assert swept.simulated == 2
    assert swept.rows[0]["step_time_s"] == swept.rows[1]["step_time_s"]
    frame = pd.read_csv(tmp_path / "rows.csv")
    assert list(frame["plan.pp"]) == [4, 4, 2] * 2
    assert frame["reason"][3].startswith("plan.tp 2 does not divide")


def test_a_row_says_what_the_report_says():
    row = measure("k", resolved({}).scenario).row
    summary = sim.simulate(resolved({"run.detail": "layer"}).scenario).summary
    assert row["step_time_s"] == pytest.approx(summary.step_time_s, rel=1e-9)
    assert row["device_memory_bytes"] == pytest.approx(summary.device_memory_bytes)
    total = row["work_fraction"] + row["exposed_communication_fraction"] + row["bubble_fraction"]
    assert total == pytest.approx(1)


def test_a_plan_that_does_not_fit_is_a_row_with_the_reason():
    row = measure("k", resolved({"cluster.node.device.memory": "4 GB"}, "gpt2-xl-ddp").scenario).row
    assert (row["status"], row["fits"]) == ("ok", False)
    assert row["reason"].startswith("memory capacity: ")


def test_a_fault_of_the_simulator_is_a_row_and_stops_nothing(monkeypatch):
    def broken(scenario):
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr("simulator.explore.sweep.row.simulate", broken)
    record = measure("k", resolved({}).scenario)
    assert record.row == {"status": "failed", "reason": "ZeroDivisionError: by zero"}
    assert not record.is_final


def test_a_larger_sweep_goes_on_from_a_smaller_one(tmp_path):
    out = tmp_path / "rows.parquet"
    counts = []
    for values in ([1, 2], [1, 2], [1, 2, 4]):
        grid = grid_of({"plan.microbatch_size": values}, {}, None)
        counts.append(run_sweep("gpt2-xl-ddp", grid, out=out).simulated)
    assert counts == [2, 0, 1]
    assert list(pd.read_parquet(out)["microbatch_size"]) == [1, 2, 4]


def test_a_run_of_tokens_takes_its_steps(tmp_path):
    frame = sim.sweep(
        "gpt2-xl-generations", {"cost.device_price": ["3600 USD/h"]}, tokens=512 * 1024 * 10
    )
    step, run = frame["step_time_s"][0], frame["run_time_s"][0]
    assert run == pytest.approx(10 * step)  # a step has 512 samples of 1,024 tokens
    assert frame["run_devices_usd"][0] == pytest.approx(8 * run)  # 8 devices at a dollar a second


RECORDS = [Record(f"k{n}", {"status": "ok", "step_time_s": 0.1 * n}) for n in range(5)]


@given(st.integers(0, 400))
def test_a_journal_cut_off_anywhere_keeps_every_whole_line(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("journal") / "rows.csv.journal"
    with Journal(path) as journal:
        journal.add(RECORDS)
    text = path.read_bytes()
    cut = min(cut, len(text))
    path.write_bytes(text[:cut])
    whole = max(0, text[:cut].count(b"\n") - 1)
    with Journal(path) as journal:
        assert list(journal.rows) == [r.key for r in RECORDS[:whole]]
        journal.add(RECORDS)
    with Journal(path) as journal:
        assert journal.rows == {r.key: r.row for r in RECORDS}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("precious\n", "is not a journal of a sweep; move it away"),
        ("precious", "is not a journal of a sweep; move it away"),
        (f"{HEAD}\nnonsense\n", "line 2 is no row of a sweep"),
        (f"{HEAD}\n[1]\n", "line 2 is no row of a sweep"),
    ],
)
def test_what_is_no_journal_is_left_alone(tmp_path, text, complaint):
    path = tmp_path / "journal"
    path.write_text(text)
    with pytest.raises(DescriptionError, match=complaint):
        Journal(path)
    assert path.read_text() == text


def test_a_journal_belongs_to_one_sweep_at_a_time(tmp_path):
    with Journal(tmp_path / "j"), pytest.raises(DescriptionError, match="another sweep is writing"):
        Journal(tmp_path / "j")


class Lost(Exception):
    """A worker has died."""


class FragilePool:
    """Two workers that simulate nothing; chunks with the task `bad` kill them all."""

    lost = (Lost,)

    def __init__(self):
        self.broken, self.renewed = False, 0

    def width(self):
        return 2

    def submit(self, chunk):
        if self.broken:
            raise Lost
        future = Future()
        if any(key == "bad" for key, _ in chunk):
            self.broken = True
            future.set_exception(Lost())
        else:
            future.set_result((0.01, [Record(key, {"status": "ok"}) for key, _ in chunk]))
        return future

    def renew(self):
        self.broken, self.renewed = False, self.renewed + 1

    def check(self):
        """Never asked: chunks are done at once."""


def test_the_task_that_kills_its_worker_is_a_row_and_all_others_arrive():
    pool = FragilePool()
    tasks = [(f"k{n}", None) for n in range(40)]
    tasks.insert(20, ("bad", None))
    found = [record for batch in workers._spread(iter(tasks), pool) for record in batch]
    assert sorted(r.key for r in found) == sorted(key for key, _ in tasks)
    failed = [r for r in found if r.row["status"] == "failed"]
    assert [(r.key, r.row["reason"], r.is_final) for r in failed] == [("bad", workers.DIED, False)]
    assert pool.renewed >= 2


@pytest.mark.parametrize(("name", "is_heard"), [(pools.HANDS_OUT, True), ("another", False)])
def test_when_no_work_is_handed_out_any_more_a_sweep_ends_and_says_so(name, is_heard, monkeypatch):
    others = []
    monkeypatch.setattr(threading, "excepthook", others.append)
    pool = pools.Local(1)
    try:
        thread = threading.Thread(target=lambda: {}["lost"], name=name)
        thread.start()
        thread.join()
        if is_heard:
            with pytest.raises(TrainsimError, match=r"no work is handed out any more \(KeyError"):
                pool.check()
        else:
            pool.check()
        assert len(others) == (0 if is_heard else 1)
    finally:
        pool.close(now=True)


def test_the_command_writes_rows_and_says_why_some_are_refused(trainsim):
    code, out, err = trainsim(
        "sweep", "gpt2-xl-1f1b-32gpu", "--set", "plan.tp=1,2", "--json", "rows.json"
    )
    assert (code, err) == (0, "")  # no bar in a pipe
    assert out.startswith(
        "GPT-2 XL, 8 replicas of 4 stages of 1F1B on 32 A100: 2 points, 1 simulated, 1 refused\n"
    )
    assert "plan.tp=2 refused: plan.tp 2 does not divide" in out
    with open("rows.json", encoding="utf-8") as file:
        assert [row["status"] for row in json.load(file)["rows"]] == ["ok", "refused"]


def test_a_sweep_in_which_nothing_can_run_exits_with_3(trainsim):
    assert trainsim("sweep", "gpt2-xl-1f1b-32gpu", "--set", "plan.tp=3,7")[0] == 3


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--set", "plan.tp"], "write KEY=VALUE,..."),
        (["--set", "plan.tp=1", "--set", "plan.tp=2"], "'plan.tp' is given twice"),
        (["--set", "plan.tp=1,2", "--out", "rows.xlsx"], "must end in .parquet or .csv"),
        (["--set", "plan.tp=1,2", "--out", "no/rows.csv"], "there is no folder 'no'"),
        (["--set", "plan.tp=1,2", "--plot", "scaling=a.png"], "give --devices"),
        (["--devices", "1,2", "--plot", "pie=a.png"], "write one of scaling=FILE"),
        (["--devices", "1,2", "--set", "plan.pp=1,2,3,...,20", "--plot", "scaling=a.png"],
         "would hold 20 lines"),
        (["--set", "plan.tp=1", "--workers", "2", "--scheduler", "tcp://x:1"], "has its own"),
        (["--set", "plan.tp=1", "--scheduler", "nonsense"], "is no address of a Dask scheduler"),
        (["--rows", "none.csv"], "none.csv: cannot be read"),
    ],
)  # fmt: skip
def test_wrong_input_ends_in_one_sentence(trainsim, tmp_path, arguments, complaint):
    code, out, err = trainsim("sweep", "gpt2-xl-ddp", *arguments)
    assert (code, out) == (2, "")
    assert complaint in err
    assert list(tmp_path.iterdir()) == []


def test_a_terminal_sees_how_far_it_is(monkeypatch):
    from simulator.cli.sweep import _bar

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with _bar(3) as progress:
        progress(3)
    assert "3/3" in terminal.getvalue()
