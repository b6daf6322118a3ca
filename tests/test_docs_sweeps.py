"""The page on sweeps is a promise too: its commands and its snippet run."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from simulator.explore.sweep.frame import RUN_COLUMNS
from simulator.explore.sweep.row import COLUMNS

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "sweeps.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\$ (trainsim .*)$", PAGE, re.MULTILINE)
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_runs_and_writes_what_it_names(command, tmp_path):
    words = shlex.split(command)[1:]
    arguments = [sys.executable, "-m", "simulator", *words]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / words[words.index("--out") + 1]).exists()


def test_the_snippet_of_the_page_runs(capsys):
    exec(SNIPPETS[0], {})
    assert capsys.readouterr().out.count("\n") == 9  # a head and eight rows


def test_every_column_that_the_page_names_is_there():
    named = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)`", PAGE)) - {"samples_per_device"}
    assert named <= {*COLUMNS, *RUN_COLUMNS}, named - {*COLUMNS, *RUN_COLUMNS}
