"""The pages on figures and notebooks: commands run, and tables name all there is."""

import re
import shlex
from pathlib import Path

import pytest

from simulator.report.plots import FIGURES

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "figures.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\$ trainsim (.*)$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_draws_its_figure(command, trainsim, tmp_path):
    code, _, err = trainsim(*shlex.split(command))
    assert code == 0, err
    assert (tmp_path / command.rpartition("=")[2]).stat().st_size > 20_000


def test_the_table_names_every_figure_of_a_run():
    table = PAGE.partition("| `NAME` |")[2].partition("\n\n")[0]
    named = re.findall(r"^\| `([a-z]+)`", table, re.MULTILINE)
    assert {*named} == {*FIGURES, "jitter"}


def test_every_notebook_is_listed_with_its_question():
    page = (ROOT / "docs" / "notebooks.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.MULTILINE))
    nbformat = pytest.importorskip("nbformat")
    titles = {
        path.stem: nbformat.read(path, 4).cells[0].source.partition("\n")[0].removeprefix("# ")
        for path in (ROOT / "notebooks").glob("*.ipynb")
    }
    assert listed == titles
