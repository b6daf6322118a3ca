"""Traces as torch.profiler's: what is read back is the run, and other tools' numbers are ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from simulator import load, simulate, simulate_schedule
from simulator.errors import DescriptionError
from simulator.exchange.kineto import read_kineto
from simulator.program import ACTIONS
from simulator.report.measured import overlap, result_of
from simulator.report.result import Result

Event = dict[str, Any]


def events(folder: Path, rank: int) -> list[Event]:
    found: list[Event] = json.loads((folder / f"rank{rank}.json").read_text())["traceEvents"]
    return found


@pytest.fixture(scope="module")
def result(scenario_of: Callable[..., Any], cluster_of: Callable[..., Any]) -> Result:
    plan = {"pp": 2, "tp": 2, "dp": 2}
    return simulate(scenario_of(plan=plan, cluster=cluster_of(2, 4), run={"num_steps": 2}))


@pytest.fixture(scope="module")
def folder(result: Result, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kineto") / "traces"
    result.save_kineto(folder)
    return folder


def spans(result: Result) -> list[tuple[int, ...]]:
    """Return rank, step, start and end in nanoseconds of every op that takes time."""
    p, t = result.program, result.timeline
    start, end = ((moment + 500) // 1000 for moment in (t.start, t.end))
    there = end > start
    columns = (p.rank[there], p.step[there], start[there], end[there])
    return sorted(zip(*(c.tolist() for c in columns), strict=True))


def test_every_op_comes_back_in_its_step_at_its_time(result: Result, folder: Path) -> None:
    assert spans(result_of(read_kineto(folder))) == spans(result)


def test_the_parts_of_a_step_come_back(result: Result, folder: Path) -> None:
    back = result_of(read_kineto(folder))
    assert back.step_time_s == pytest.approx(result.step_time_s, abs=2e-9)
    for category in ("forward", "backward", "optimizer", "tp", "pp"):
        found, known = (r.breakdown.of(category) for r in (back, result))
        assert found.tolist() == pytest.approx(known.tolist(), rel=2e-3)


def test_actions_come_back(result: Result, folder: Path) -> None:
    back = read_kineto(folder).program

    def counted(program: Any) -> dict[tuple[str, int, int], int]:
        compute = program.stream == program.streams.index("compute")
        labels = [ACTIONS[a] for a in program.action[compute].tolist()]
        keys = zip(labels, program.stage[compute].tolist(), program.microbatch[compute].tolist(),
                   strict=True)  # fmt: skip
        out: dict[tuple[str, int, int], int] = {}
        for key in keys:
            if key[0] in "FB":
                out[key] = out.get(key, 0) + 1
        return out

    assert counted(back) == counted(result.program)


def test_groups_come_back_with_their_axes_and_ranks(folder: Path) -> None:
    config = json.loads((folder / "rank5.json").read_text())["distributedInfo"]["pg_config"]
    found = {(g["pg_desc"], tuple(g["ranks"])) for g in config}
    # 2 nodes of 4, order dp, pp, tp: rank 5 is tp 1 of pp 0 of dp 1.
    assert found == {("tp", (4, 5)), ("dp", (1, 5)), ("pp", (5, 7)), ("embedding", (5, 7))}


def test_every_kernel_has_its_launch_and_its_operator(folder: Path) -> None:
    found = events(folder, 0)
    by_kind = {
        kind: sorted(e["args"][key] for e in found if e["cat"] == kind)
        for kind, key in (("kernel", "correlation"), ("cuda_runtime", "correlation"),
                          ("cpu_op", "External id"))
    }  # fmt: skip
    assert by_kind["kernel"] == by_kind["cuda_runtime"] == by_kind["cpu_op"] != []


def test_collectives_have_the_names_and_sizes_of_nccl(folder: Path) -> None:
    reduced = next(e for e in events(folder, 0) if e["name"] == "ncclDevKernel_AllReduce")
    assert reduced["args"]["Collective name"] == "allreduce"
    # One microbatch of 32 tokens x 64 wide.
    assert (reduced["args"]["In msg nelems"], reduced["args"]["dtype"]) == (2048, "BFloat16")


def test_messages_name_their_peers(folder: Path) -> None:
    found = [e["args"] for e in events(folder, 0) if e["name"] == "ncclDevKernel_SendRecv"]
    sides = {(a["Collective name"], a.get("Dst Rank"), a.get("Src Rank")) for a in found}
    assert sides == {("send", 2, None), ("recv", None, 2)}


def test_what_a_loader_does_is_the_hosts_and_its_copies_are_copies(tmp_path: Path) -> None:
    simulate(load("resnet50-loader")).save_kineto(tmp_path / "traces", [0])
    found = events(tmp_path / "traces", 0)
    assert any(e["cat"] == "gpu_memcpy" and "HtoD" in e["name"] for e in found)
    kernels = {e["name"] for e in found if e["cat"] == "kernel"}
    assert not {name for name in kernels if "decode" in name or "transform" in name}


def test_a_folder_with_files_is_refused_and_stays_as_it_is(result: Result, tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text("{}")
    with pytest.raises(DescriptionError, match="the folder is not empty; name a new one"):
        result.save_kineto(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["old.json"]


def test_a_rank_that_does_not_exist_leaves_nothing(result: Result, tmp_path: Path) -> None:
    with pytest.raises(DescriptionError, match=r"rank 8 lies outside 0\.\.7"):
        result.save_kineto(tmp_path / "traces", [0, 8])
    assert list(tmp_path.iterdir()) == []


def test_a_failure_while_writing_leaves_nothing(
    result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(DescriptionError, match="No space left on device"):
        result.save_kineto(tmp_path / "traces")
    assert list(tmp_path.iterdir()) == []


def test_the_command_writes_and_compares_what_it_wrote(
    trainsim: Callable[..., Any], tmp_path: Path
) -> None:
    code, _, err = trainsim("run", "gpt2-xl-1f1b", "--kineto", "traces")
    assert (code, err) == (0, "")
    assert sorted(p.name for p in (tmp_path / "traces").iterdir()) == [
        f"rank{r}.json" for r in range(4)
    ]
    _, out, _ = trainsim("compare", "./traces", "gpt2-xl-1f1b", "--json", "-")
    document = json.loads(out)
    assert abs(document["step_difference_ticks"]) < 1000  # a nanosecond
    code, _, err = trainsim("run", "gpt2-xl-1f1b", "--kineto", "traces")
    assert (code, "the folder is not empty" in err) == (2, True)


SCRIPT = """
import sys, json, warnings
warnings.simplefilter("ignore")
from hta.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_dir=sys.argv[1])
found = analysis.get_comm_comp_overlap(visualize=False)
busy = analysis.get_temporal_breakdown(visualize=False)
print("found", json.dumps({
    "overlap": found["comp_comm_overlap_pctg"].tolist(),
    "compute_us": busy["compute_time(us)"].tolist(),
}))
"""


@pytest.mark.skipif(find_spec("hta") is None, reason="extra oracles")
@pytest.mark.parametrize("name", ["1F1B", "gpt2-xl-1f1b", "llama-3-8b-3d"])
def test_the_overlap_of_holistic_trace_analysis_is_ours(name: str, tmp_path: Path) -> None:
    # 1F1B by hand, F 1 s, B 2 s, messages 0.5 s: rank 0 works beside the sends of F0 and F2 and the
    # receive of B1, rank 1 beside two of each: 1.5 and 2 of 4 s.
    if name == "1F1B":
        result = simulate_schedule("1F1B", stages=2, microbatches=4, latency=0.5)
    else:
        result = simulate(load(name, {"run.num_steps": 1}))
    ranks = list(range(min(4, result.tiled.num_ranks)))
    result.save_kineto(tmp_path / "traces", ranks)
    environment = {**os.environ, "HTA_DISABLE_NS_ROUNDING": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "traces")], env=environment,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    (line,) = (x for x in done.stdout.splitlines() if x.startswith("found "))
    theirs = json.loads(line.removeprefix("found "))
    back = read_kineto(tmp_path / "traces")
    over = overlap(measured=back, result=result_of(back))
    ours = 100 * over.hidden / over.communication
    assert theirs["overlap"] == pytest.approx(ours.tolist(), abs=0.006)  # two digits
    if name == "1F1B":
        assert theirs["overlap"] == [37.5, 50.0]
    work = result.breakdown.of("forward", "backward", "optimizer")[ranks] / 1e6
    assert theirs["compute_us"] == pytest.approx(work.tolist(), rel=1e-6)
