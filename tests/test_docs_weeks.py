"""The pages on data and on operations are promises too: commands, tables and snippets are run."""

import re
import shlex
from pathlib import Path

import pytest

import simulator as sim

DOCS = Path(__file__).parent.parent / "docs"
DATA, OPERATIONS = (
    (DOCS / name).read_text(encoding="utf-8") for name in ("data.md", "operations.md")
)
COMMANDS = re.findall(r"^\$ trainsim (.*)$", DATA + OPERATIONS, re.MULTILINE)
TABLES = re.findall(r"```toml\n(.*?)```", DATA, re.DOTALL)
SNIPPETS = re.findall(r"```python\n(.*?)```", OPERATIONS, re.DOTALL)
BASE = """
model = "gpt2-xl"
[cluster]
node = "dgx-a100"
[cluster.storage]
raid = "nvme-gen4"
[plan]
dp = 8
"""
RUN = '[run]\nglobal_batch_size = 64\nsequence_length = 1024\nnum_steps = 5\ndetail = "stage"\n'


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_pages_runs(trainsim, command):
    code, out, err = trainsim(*shlex.split(command.replace("--seeds 1000", "--seeds 20")))
    assert code == 0, err
    assert "assumed:" in out


def test_the_tables_of_the_page_on_data_are_a_scenarios(tmp_path):
    storage, data, checkpoint, evaluation = TABLES
    evaluation, run = evaluation.split("[run]")
    path = tmp_path / "mine.toml"
    path.write_text(BASE + storage + data + checkpoint + evaluation + RUN + run, encoding="utf-8")
    s = sim.load(path)
    assert s.cluster.storage["nfs"].request_bandwidth == 9e7
    assert s.data.sizes == (2e4, 9e4, 1.1e5, 6e5)
    assert (s.checkpoint.storage, s.checkpoint.before_step) == ("nfs", 3)
    assert (s.evaluation.batches, s.run.log_every) == (20, 10)
    text = str(sim.simulate(s))
    for line in ("data", "checkpoint", "evaluation", "logging", "host"):
        assert re.search(rf"^  {line}  ", text, re.MULTILINE)


def test_the_snippet_of_the_page_on_operations_runs(capsys):
    exec(SNIPPETS[0], {})
    assert "goodput" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "page", "number"),
    [
        (["run", "resnet50-loader"], DATA, "325 ms"),
        (["run", "resnet50-loader", "--set", "data.size_cv=0.8"], DATA, "369 ms"),
    ],
)
def test_steps_that_the_page_states_are_those_of_its_commands(trainsim, command, page, number):
    _, out, _ = trainsim(*command)
    step = float(re.search(r"^  step        ([\d.]+) ms", out, re.MULTILINE)[1])
    assert f"{round(step)} ms" == number
    assert number in page
