"""The tutorial is a promise: its commands run, and print the lines that it shows."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parent.parent / "docs" / "tutorial.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
MINE = re.search(r"```toml\n(.*?)```", PAGE, re.DOTALL)[1]
REFUSED = "plan.tp=2"


def steps():
    """Commands with the lines that the page shows below each."""
    for block in BLOCKS:
        for part in block.split("$ ")[1:]:
            command, *shown = part.rstrip("\n").split("\n")
            yield pytest.param(command, [line for line in shown if line != "..."], id=command[:60])


@pytest.mark.parametrize(("command", "shown"), list(steps()))
def test_a_command_of_the_tutorial_prints_what_is_shown(command, shown, tmp_path):
    (tmp_path / "mine.toml").write_text(MINE, encoding="utf-8")
    arguments = [sys.executable, "-m", "simulator", *shlex.split(command)[1:]]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == (2 if REFUSED in command else 0), done.stderr
    printed = [line.rstrip() for line in (done.stdout + done.stderr).splitlines()]
    for line in shown:
        assert line.rstrip() in printed, done.stdout
    for file in re.findall(r"(?:[a-z]+=|--plot |--trace )([a-z]+\.(?:png|json))", command):
        assert (tmp_path / file).stat().st_size > 0


def test_the_tutorial_shows_output_of_most_commands():
    assert sum(bool(param.values[1]) for param in steps()) >= 6
