"""The page on comparisons is a promise too: its commands run, and its verdict is what they say."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "compare.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\$ (trainsim .*)$", PAGE, re.MULTILINE)


def run(command, folder):
    words = [str(ROOT / w) if w.startswith("tests/") else w for w in shlex.split(command)[1:]]
    arguments = [sys.executable, "-m", "simulator", *words]
    done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


@pytest.mark.parametrize("command", COMMANDS[1:])
def test_a_command_of_the_page_runs(command, tmp_path):
    assert "sum: the step" in run(command, tmp_path)


def test_the_first_command_says_what_the_page_quotes(tmp_path):
    (said,) = re.findall(r"```text\n(.*)\n```", PAGE)
    assert said in run(COMMANDS[0], tmp_path)
    assert (tmp_path / "compare.png").exists()
