"""The site is built from the pages and docstrings without a warning, and asks no other host."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

for name in ("mkdocs", "material", "mkdocstrings", "mkdocs_click"):
    pytest.importorskip(name)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


def test_every_page_is_built(site):
    pages = {p.relative_to(ROOT / "docs").with_suffix(".html") for p in ROOT.glob("docs/**/*.md")}
    assert pages <= {p.relative_to(site) for p in site.glob("**/*.html")}


def test_no_page_fetches_anything_from_another_host(site):
    loads = re.compile(
        r"<(?:script|link|img|iframe)[^>]+(?:src|href)=[\"']?(?:https?:)?//[^\"'> ]+"
    )
    for page in site.glob("**/*.html"):
        assert not loads.search(page.read_text(encoding="utf-8")), page.name
    for sheet in site.glob("assets/**/*.css"):
        assert "url(http" not in sheet.read_text(encoding="utf-8")


def test_the_reference_has_every_verb_and_what_a_docstring_says(site):
    from simulator.cli import VERBS

    commands = (site / "reference/commands.html").read_text(encoding="utf-8")
    for verb in VERBS:
        assert f"trainsim {verb.name}" in commands
    python = (site / "reference/python.html").read_text(encoding="utf-8")
    assert "Run a scenario and return its result." in python
    for name in ("simulate_schedule", "register_schedule", "Scenario", "DeadlockError"):
        assert f">{name}<" in python
