"""The page on pages is a promise too: its commands and its snippet run."""

import re
import shlex
from pathlib import Path

import pytest

from simulator.report.html.density import BINS
from simulator.report.html.ops import MOST_OPS

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "report.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\$ trainsim (.*)$", PAGE, re.MULTILINE)
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_writes_a_page(command, trainsim, tmp_path):
    words = shlex.split(command)
    code, _, err = trainsim(*words)
    assert (code, err) == (0, "")
    assert (tmp_path / words[-1]).stat().st_size > 100_000


def test_the_snippet_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(SNIPPETS[0], {})
    assert {path.name for path in tmp_path.iterdir()} == {"run.html", "both.html"}


def test_the_page_states_what_is_kept():
    assert f"{MOST_OPS:,} ops" in PAGE
    assert f"{BINS} pieces" in PAGE


def test_the_screenshot_is_light():
    assert (ROOT / "docs" / "report.png").stat().st_size < 200_000
