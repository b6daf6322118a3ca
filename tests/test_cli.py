"""The command line as a user meets it: codes, streams, and nothing half-written."""

import json
import os
import subprocess
import sys

import pytest

from simulator.describe import catalog

GOOD = (catalog.root() / "workloads/gpt2-xl-1f1b.toml").read_text(encoding="utf-8")
SMALL = ("--set", "run.global_batch_size=8", "--set", "model.num_hidden_layers=4")


def test_a_run_prints_its_report(trainsim):
    code, out, err = trainsim("run", "gpt2-xl-1f1b", *SMALL)
    assert (code, err) == (0, "")
    for word in ("step", "MFU", "bubble", "exposed", "memory", "bottleneck", "assumed"):
        assert word in out


def test_json_goes_to_stdout_alone(trainsim):
    code, out, _ = trainsim("run", "gpt2-xl-1f1b", *SMALL, "--json", "-")
    document = json.loads(out)
    assert code == 0
    assert document["schema_version"] == 1
    assert len(document["ranks"]["bubble_fraction"]) == 4


def test_the_same_input_gives_the_same_bytes(trainsim):
    arguments = ("run", "gpt2-xl-1f1b", *SMALL, "--json", "-")
    assert trainsim(*arguments) == trainsim(*arguments)


def test_all_outputs_are_written(trainsim, tmp_path):
    code, _, _ = trainsim(
        "run", "gpt2-xl-1f1b", *SMALL, "--json", "r.json", "--trace", "t.json",
        "--plot", "p.png", "--plot", "memory=m.svg", "--plot", "breakdown=b.pdf",
    )  # fmt: skip
    assert code == 0
    names = {"r.json", "t.json", "p.png", "m.svg", "b.pdf"}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_a_plan_that_does_not_fit_ends_with_3_and_its_report(trainsim):
    code, out, _ = trainsim("run", "gpt2-xl-1gpu", "--set", "plan.microbatch_size=64")
    assert code == 3
    assert "DOES NOT FIT" in out
    assert "memory capacity" in out


@pytest.mark.parametrize("what", ["memory", "topology", "program"])
def test_show_answers_for_a_scenario(trainsim, what):
    code, out, _ = trainsim("show", what, "gpt2-xl-1f1b", *SMALL)
    assert code == 0
    assert len(out.splitlines()) > 4


def test_show_schedule_prints_the_grid_and_both_bubbles(trainsim):
    code, out, _ = trainsim("show", "schedule", "gpipe", "--stages", "2", "--microbatches", "2")
    # F0 F1 on rank 0, then two backwards of 2 s on rank 1 first: T = (2 + 2 - 1) x 3 = 9
    assert code == 0
    assert out.splitlines() == [
        "rank 0 |F0 F1 .  .  .  B0=== B1===",
        "rank 1 |.  F0 F1 B0=== B1=== .  .",
        "",
        "step 9 s; bubble 0.3333 of the step, 0.5000 of the work",
        "activations in flight by rank: 2 2",
        "idle of the rank that idles most: 3 s; paper: (p-1)(F+B) with free messages: 3 s",
        "activations of one stage kept by rank, paper: m: 2 2",
    ]


def test_fewer_microbatches_than_stages_are_warned_of(trainsim):
    _, out, _ = trainsim("show", "schedule", "1F1B", "--stages", "6", "--microbatches", "3")
    assert "step 24 s; bubble 0.6250" in out
    assert "(M<P): bubble 62.5%; use M>=24 for <=17.2%" in out


def test_show_schedule_lists_the_names(trainsim):
    _, out, _ = trainsim("show", "schedule")
    table, _, legend = out.partition("\n\n")
    names = [line.split()[0] for line in table.splitlines() if line[0] != " "]
    assert names[:4] == ["naive", "GPipe", "1F1B", "PipeDream"]
    assert {"ZB-H1", "ZBVZeroBubble", "DualPipe", "DualPipeV", "ZB-auto", "V-Half"} < set(names)
    assert "bubble (p-1)(F+I-W) for m >= p and F >= W; kept min(p, m)" in table
    assert "p ranks, m microbatches" in legend


# p=2, m=2, v=2, chunks of 1/2 + 1: (2 x 2 + 1) x 1.5 s; by hand in test_schedules.
def test_show_schedule_prints_the_stages_of_chunks(trainsim):
    size = ("--stages", "2", "--chunks", "2", "--microbatches", "2")
    code, out, _ = trainsim("show", "schedule", "Interleaved1F1B", *size)
    assert code == 0
    assert out.splitlines()[0].startswith("rank 0 |0F0 0F1 2F0 2F1 ")
    assert "step 7.5 s" in out


def test_show_schedule_refuses_uneven_rounds(trainsim):
    size = ("--stages", "2", "--chunks", "2", "--microbatches", "5")
    code, out, err = trainsim("show", "schedule", "Interleaved1F1B", *size)
    assert (code, out) == (2, "")
    assert "takes 5 microbatches through 2 ranks" in err


@pytest.mark.parametrize("folder", ["devices", "nodes", "models", "scenarios"])
def test_show_catalog_lists_every_folder(trainsim, folder):
    _, out, _ = trainsim("show", "catalog")
    places = {"devices": "topologies/devices", "nodes": "topologies/nodes",
              "models": "workloads/models", "scenarios": "workloads"}  # fmt: skip
    files = (catalog.root() / places[folder]).iterdir()
    names = sorted(path.stem for path in files if path.suffix in (".toml", ".json"))
    assert f"{folder}: {', '.join(names)}\n" in out


def test_check_counts_ranks_and_ops(trainsim):
    code, out, _ = trainsim("check", "gpt2-xl-1f1b")
    assert code == 0
    assert "ok, 4 ranks" in out


def broken(text="", **files):
    return {"bad.toml": text, **files}


BAD_INPUTS = {
    "truncated toml": (broken(GOOD[:60] + "[plan"), (), "bad.toml: is not valid TOML"),
    "truncated json": (
        broken(GOOD.replace('"gpt2-xl"', '"./m.json"'), **{"m.json": '{"model_type": "gpt2", '}),
        (),
        "m.json: is not valid JSON",
    ),
    "json that is no object": (
        broken(GOOD.replace('"gpt2-xl"', '"./m.json"'), **{"m.json": "[1, 2]"}),
        (),
        "the top level is not an object",
    ),
    "empty file": (broken(""), (), "key 'model' is missing"),
    "not a text": ({"bad.toml": b"\xff\xfe\x00"}, (), "is not a UTF-8 text"),
    "no such file": ({}, (), "no file 'bad.toml'"),
    "a folder": ({"bad.toml/x": ""}, (), "no file 'bad.toml'"),
    "wrong suffix": ({"bad.yaml": "a: 1"}, ("./bad.yaml",), "a scenario is a TOML file"),
    "unknown name": ({}, ("gpt2-xl-1f2b",), "did you mean 'gpt2-xl-1f1b'"),
    "negative bandwidth": (
        broken(GOOD), ("--set", "cluster.node.link.bandwidth=-3 GB/s"), "must be above 0"),
    "unit missing": (broken(GOOD), ("--set", "cluster.node.nic.bandwidth=200"), "has no unit"),
    "unit unknown": (
        broken(GOOD), ("--set", "cluster.node.nic.bandwidth=200 Gbps"), "unknown unit 'Gbps'"),
    "tp 3 on 25 heads": (broken(GOOD), ("--set", "plan.tp=3"), "num_attention_heads 25"),
    "0 microbatches": (broken(GOOD), ("--set", "run.global_batch_size=1"), "is not a multiple of"),
    "batch 0": (broken(GOOD), ("--set", "run.global_batch_size=0"), "0 must be at least 1"),
    "unknown schedule": (broken(GOOD), ("--set", "plan.schedule=2F2B"), "is not one of naive"),
    "unknown key": (broken(GOOD), ("--set", "plan.ppp=4"), "did you mean 'pp'?"),
    "world size": (broken(GOOD), ("--set", "plan.dp=3"), "= 12 ranks, but the cluster has"),
    "override without value": (broken(GOOD), ("--set", "plan.pp"), "write KEY=VALUE"),
    "a text for a number": (broken(GOOD), ("--set", "plan.pp=four"), "'four' is not a whole"),
    "infinity": (broken(GOOD), ("--set", "cluster.node.link.efficiency=inf"), "must be at most 1"),
    "not a number": (broken(GOOD), ("--set", "cluster.node.link.efficiency=nan"), "must be"),
    "absent folder": (broken(GOOD), ("--json", "none/r.json"), "there is no folder 'none'"),
    "absent trace folder": (broken(GOOD), ("--trace", "none/t.json"), "there is no folder 'none'"),
    "output is a folder": (broken(GOOD), ("--json", "."), "it is a folder"),
    "unknown figure": (broken(GOOD), ("--plot", "pie=p.png"), "no figure 'pie'"),
    "unknown picture": (broken(GOOD), ("--plot", "p.xyz"), "p.xyz"),
    "unknown trace": (broken(GOOD), ("--trace", "t.xyz"), "t.xyz"),
    "absent node": (broken(GOOD.replace("dgx-a100", "dgx-b300")), (), "catalogue of nodes"),
    "more stages than layers": (
        broken(GOOD), ("--set", "plan.pp=49", "--set", "cluster.num_nodes=49", "--set",
        "cluster.devices_per_node=1"), "is more than the 48 layers"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_bad_input_gives_one_sentence_and_2_and_no_file(trainsim, tmp_path, case):
    files, arguments, sentence = BAD_INPUTS[case]
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    before = sorted(tmp_path.rglob("*"))
    named = arguments and not arguments[0].startswith("--")
    code, out, err = trainsim("run", *(arguments if named else ("bad.toml", *arguments)))
    assert (code, out) == (2, "")
    assert sentence in err
    assert "Traceback" not in err
    assert all(line.startswith("trainsim: ") for line in err.splitlines())
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "arguments",
    [("--stages", "0"), ("--microbatches", "-1"), ("--forward", "-1"), ("--latency", "nan")],
)
def test_a_schedule_out_of_range_is_refused(trainsim, arguments):
    code, _, err = trainsim("show", "schedule", "1F1B", *arguments)
    assert code == 2
    assert "at least" in err


def test_an_unknown_option_is_a_usage_error(trainsim):
    code, _, err = trainsim("run", "gpt2-xl-1f1b", "--plott", "p.png")
    assert code == 2
    assert "--plot" in err


def process(*arguments, **options):
    command = [sys.executable, "-m", "simulator", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def test_python_m_simulator_is_the_same_command():
    assert "Usage: " in process("--help").stdout


def shell(command):
    line = command.replace("trainsim", f"{sys.executable} -m simulator")
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)


def test_a_closed_pipe_ends_quietly():
    done = shell("trainsim show program gpt2-xl-1f1b | head -n 1; exit ${PIPESTATUS[0]}")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_full_standard_output_is_said():
    done = shell("trainsim show catalog > /dev/full")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "cannot write to standard output: No space left" in done.stderr


def test_a_closed_standard_output_is_no_traceback():
    assert "Traceback" not in shell("trainsim show catalog >&-").stderr


def test_an_unwritable_folder_is_refused(tmp_path):
    done = process("run", "gpt2-xl-1f1b", "--json", "/proc/r.json", cwd=tmp_path)
    assert done.returncode == 2
    assert "cannot write" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_link_is_followed_and_a_mode_kept(trainsim, tmp_path):
    target = tmp_path / "kept.json"
    target.write_text("old")
    target.chmod(0o640)
    (tmp_path / "link.json").symlink_to(target)
    assert trainsim("run", "gpt2-xl-1f1b", *SMALL, "--json", "link.json")[0] == 0
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads(target.read_text())["schema_version"] == 1
    assert target.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("kind", ["fifo", "read-only"])
def test_what_is_no_plain_writable_file_is_not_replaced(trainsim, tmp_path, kind):
    path = tmp_path / "r.json"
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.write_text("keep")
        path.chmod(0o444)
    code, _, err = trainsim("run", "gpt2-xl-1f1b", *SMALL, "--json", path.name)
    assert code == 2
    assert ("not a plain file" if kind == "fifo" else "read-only") in err
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--json", "a.json", "--trace", "t.json", "--trace-ranks", "99"), "ranks from 0 to 3"),
        (("--trace-ranks", "0"), "give --trace too"),
        (("--json", ""), "need the name of a file"),
        (("--json", "x.json", "--trace", "x.json"), "the same name"),
        (("--set", "plan.pp=4\ntp=2"), "more than one value"),
        (("--set", "cluster.num_nodes=1000000000000"), "of memory"),
    ],
)
def test_options_that_cannot_be_meant_are_refused_before_anything_is_written(
    trainsim, tmp_path, arguments, sentence
):
    code, out, err = trainsim("run", "gpt2-xl-1f1b", "--set", "run.global_batch_size=4000000000000",
                              *arguments) if "num_nodes" in " ".join(arguments) else trainsim(
                              "run", "gpt2-xl-1f1b", *arguments)  # fmt: skip
    assert (code, out) == (2, "")
    assert sentence in err
    assert list(tmp_path.iterdir()) == []


def test_a_schedule_is_drawn_as_the_figure_that_was_named(trainsim, tmp_path):
    code, _, _ = trainsim("show", "schedule", "1F1B", "--plot", "breakdown=b.png")
    assert (code, [p.name for p in tmp_path.iterdir()]) == (0, ["b.png"])
