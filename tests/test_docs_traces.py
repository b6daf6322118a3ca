"""The page on traces is a promise too: its commands run and write what it says."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from simulator.report.trace import SUFFIXES

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "traces.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\$ (trainsim run .*)$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_runs_and_writes(command, tmp_path):
    words = shlex.split(command)
    arguments = [sys.executable, "-m", "simulator", *words[1:]]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    option = "--kineto" if "--kineto" in words else "--trace"
    assert [p.name for p in tmp_path.iterdir()] == [words[words.index(option) + 1]]


def test_the_page_names_every_form():
    for suffix in SUFFIXES:
        assert f"`{suffix.removesuffix('.gz')}`" in PAGE
