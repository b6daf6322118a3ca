"""Jitter as it is described, refused, printed and drawn; the page about it is run."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

import simulator as sim
from simulator.errors import DescriptionError
from simulator.jitter import study
from simulator.jitter.plot import jitter_figure
from simulator.operate import operate

PAGE = (Path(__file__).parent.parent / "docs/stragglers.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\$ trainsim (.*)$", PAGE, re.MULTILINE)
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
TABLES = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
HELD = {"period": "10 ms", "duration": "1 ms"}


@pytest.mark.parametrize(
    ("jitter", "sentence"),
    [
        ({"op_cv": -0.1}, "[jitter]: op_cv: -0.1 must be at least 0"),
        ({"op_cv": "5 %"}, "op_cv: '5 %' is not a number"),
        ({"op_vc": 0.1}, "unknown key 'op_vc', did you mean 'op_cv'?"),
        ({"flow_cv": 4}, "flow_cv: 4.0 must be at most 3"),
        ({"samples": 0}, "samples: 0 must be at least 1"),
        ({"seed": -1}, "seed: -1 must be at least 0"),
        ({"slow_gpus": [{"ranks": [3], "factor": 0.5}]}, "factor: 0.5 must be above 1"),
        ({"slow_gpus": [{"ranks": [3], "factor": 1}]}, "factor: 1.0 must be above 1"),
        ({"slow_gpus": [{"ranks": [], "factor": 2}]}, "the list is empty"),
        ({"slow_gpus": [{"ranks": [8], "factor": 2}]}, "there is no rank 8; ranks are 0 to 7"),
        ({"slow_gpus": [{"ranks": [1, 1], "factor": 2}]}, "rank 1 is named more than once"),
        ({"slow_links": [{"ranks": [-1], "factor": 2}]}, "ranks: -1 must be at least 0"),
        ({"random_slow_gpus": {"share": 0, "factor": 2}}, "share: 0.0 must be above 0"),
        ({"random_slow_gpus": {"share": 1.5, "factor": 2}}, "share: 1.5 must be at most 1"),
        ({"random_slow_links": {"share": 0.1}}, "key 'factor' is missing"),
        ({"interference": {**HELD, "period": "0 s"}}, "period: 0 seconds must be above 0"),
        ({"interference": {**HELD, "duration": "-1 ms"}}, "must be above 0"),
        ({"interference": {**HELD, "duration": "1"}}, "duration: '1' has no unit"),
        ({"interference": {**HELD, "duration": "10 ms"}}, "leaves no time for work"),
        ({"interference": {**HELD, "ranks": [9]}}, "there is no rank 9"),
    ],
)
def test_nonsense_is_refused_in_a_sentence(jitter, sentence):
    with pytest.raises(DescriptionError, match=re.escape(sentence)):
        sim.load("gpt2-xl-ddp", {"jitter": jitter})


@pytest.mark.parametrize(
    ("others", "sentence"),
    [
        ({"run.network": "fluid", "jitter.flow_cv": 0.1}, "links set their rates"),
        ({"run.network": "fluid", "jitter.slow_links": [{"ranks": [0], "factor": 2}]},
         "cluster.network.degraded"),
        ({"run.network": "fluid", "run.overlap_slowdown": 0.1, "jitter.op_cv": 0.1},
         "jitter is not modelled with run.overlap_slowdown"),
    ],
)  # fmt: skip
def test_what_is_not_modelled_is_refused(others, sentence):
    with pytest.raises(DescriptionError, match=sentence):
        sim.load("gpt2-xl-ddp", others)


def test_asynchronous_steps_are_refused(scenario_of):
    plan = {"dp": 2, "gradient_exchange": "parameter_server", "servers": 1, "staleness": 1}
    s = scenario_of(plan=plan)
    with pytest.raises(DescriptionError, match=r"not modelled with plan\.staleness"):
        type(s)(name="x", model=s.model, cluster=s.cluster, plan=s.plan, run=s.run,
                jitter=sim.load("gpt2-xl-ddp", {"jitter.op_cv": 0.1}).jitter)  # fmt: skip


def test_a_scenario_without_jitter_has_nothing_to_study():
    with pytest.raises(DescriptionError, match=r"no \[jitter\] table"):
        study(sim.simulate(sim.load("gpt2-xl-ddp")))


def test_longer_than_the_clock_is_refused():
    s = sim.load("gpt2-xl-ddp", {"jitter.interference": {"period": "1 s", "duration": "1 s"}
                                 | {"duration": "0.9999999999 s"}})  # fmt: skip
    with pytest.raises(DescriptionError, match="more than the clock"):
        study(sim.simulate(s), samples=1)


@pytest.mark.parametrize("option", [("--samples", 5), ("--jobs", 2), ("--plot", "jitter=a.png")])
def test_options_of_jitter_need_a_table(trainsim, tmp_path, option):
    code, out, err = trainsim("run", "gpt2-xl-ddp", *option)
    assert (code, out) == (2, "")
    assert "no [jitter] table" in err
    assert not list(tmp_path.iterdir())


def test_run_prints_saves_and_draws_what_it_sampled(trainsim, tmp_path):
    code, out, _ = trainsim(
        "run", "gpt2-xl-ddp", "--set", "jitter.op_cv=0.05", "--samples", "7",
        "--json", "a.json", "--plot", "jitter=a.png",
    )  # fmt: skip
    assert code == 0
    assert "jitter        7 samples, seed 0" in out
    document = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))["jitter"]
    assert len(document["step_times_s"]) == document["samples"] == 7
    assert document["undisturbed_step_time_s"] < document["mean_step_time_s"]
    assert len(document["ranks"]["slack_s"]) == 8
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_the_same_seed_gives_the_same_bytes(trainsim, tmp_path):
    texts = []
    for name in ("a", "b"):
        trainsim("run", "gpt2-xl-ddp", "--set", "jitter.op_cv=0.05", "--samples", "5",
                 "--json", f"{name}.json")  # fmt: skip
        texts.append((tmp_path / f"{name}.json").read_bytes())
    assert texts[0] == texts[1]


# A day of steps, each of which takes what a sample took: as many as their mean says.
def test_operations_run_on_sampled_steps():
    checkpoint = {"interval": "10 min", "write_time": "0 s"}
    changes = {"operations": {"checkpoint": checkpoint}, "jitter": {"op_cv": 0.1, "samples": 20}}
    s = sim.load("gpt2-xl-ddp", changes)
    o, j = operate(s, seeds=3, days=1), study(sim.simulate(s))
    assert o.step_times_s == tuple(j.step_s.tolist())
    assert o.step_time_s > o.step.step_time_s
    assert o.steps.tolist() == pytest.approx([86400 / j.mean_s] * 3, abs=2)
    assert o.goodput.tolist() == [1.0] * 3
    text = str(o)
    assert "mean of 20 simulated under jitter" in text
    assert "steps take what 20 samples under [jitter] took" in text


def test_operations_on_sampled_steps_are_the_same_by_any_engine_and_number_of_processes():
    part = {"name": "part", "mtbf": "6 h", "per": "node"}
    checkpoint = {"interval": "10 min", "write_time": "20 s", "asynchronous": True,
                  "snapshot_time": "1 s"}  # fmt: skip
    slow = {"mtbf": "1 d", "slowdown": 1.2, "detection_time": "2 h"}
    operations = {"checkpoint": checkpoint, "components": [part], "repair_time": "1 h",
                  "slow_node": slow}  # fmt: skip
    s = sim.load("gpt2-xl-ddp", {"operations": operations, "jitter.op_cv": 0.1})
    s = replace(s, jitter=replace(s.jitter, samples=5))
    texts = [
        json.dumps(operate(s, seeds=5, days=0.5, engine=engine, jobs=jobs).to_dict())
        for engine, jobs in (("compiled", 1), ("compiled", 2), ("compiled", 5), ("reference", 2))
    ]
    assert len(set(texts)) == 1


def test_a_result_says_that_it_is_undisturbed():
    assert "jitter does not disturb" in str(sim.simulate(sim.load("gpt2-xl-ddp", {"jitter": {}})))


@pytest.fixture(scope="module")
def figure():
    changes = {"jitter.op_cv": 0.05, "jitter.random_slow_gpus": {"share": 0.1, "factor": 1.2}}
    j = study(sim.simulate(sim.load("gpt2-xl-ddp", changes)), samples=40)
    return j, jitter_figure(j)


def test_the_histogram_holds_every_sample(figure):
    bars = [patch for patch in figure[1].axes[0].patches if patch.get_gid() == "samples"]
    assert sum(bar.get_height() for bar in bars) == 40


def test_the_undisturbed_step_is_drawn_where_it_lies(figure):
    (line,) = (x for x in figure[1].axes[0].lines if x.get_gid() == "undisturbed")
    name = figure[1].axes[0].get_xlabel()
    scale = {"step time (s)": 1, "step time (ms)": 1000}[name]
    assert line.get_xdata()[0] == pytest.approx(scale * figure[0].result.step_time_s)


def test_each_cause_has_a_bar_as_long_as_its_gain(figure):
    bars = [patch.get_width() for patch in figure[1].axes[1].patches if patch.get_gid() == "gain"]
    gains = [gain.mean_s for gain in figure[0].gains.values()]
    assert len(bars) == 2
    assert bars[1] / bars[0] == pytest.approx(gains[1] / gains[0])


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_runs(trainsim, command):
    code, out, err = trainsim(*shlex.split(command))
    assert code == 0, err
    assert "jitter  " in out


def test_the_snippet_of_the_page_runs(capsys):
    exec(SNIPPETS[0], {})
    assert "jitter  " in capsys.readouterr().out


def test_the_table_of_the_page_is_a_scenarios(tmp_path):
    path = tmp_path / "mine.toml"
    text = (Path(__file__).parent.parent / "workloads/llama-3-8b-3d.toml").read_text(
        encoding="utf-8"
    )
    path.write_text(f"{text}\n{TABLES[0]}", encoding="utf-8")
    jitter = sim.load(path).jitter
    assert jitter.interference.duration == 0.0005
    assert jitter.is_random
