"""The page on searches and what-ifs is a promise too: its commands run, its table is the code's."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from simulator.explore.objective import OBJECTIVES
from simulator.explore.space import DEFAULTS

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "search.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\$ (trainsim .*)$", PAGE, re.MULTILINE)


def test_the_page_names_every_axis_and_objective():
    for name in (*DEFAULTS, *OBJECTIVES):
        assert f"`{name}`" in PAGE


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_runs(command, tmp_path):
    arguments = [sys.executable, "-m", "simulator", *shlex.split(command)[1:]]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
