"""The README is a promise: every command and snippet in it is run."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\$ (trainsim .*)$", README, re.MULTILINE)
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
SCENARIOS = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder as a newcomer has it: with the repository's workloads in it."""
    (tmp_path / "workloads").symlink_to(ROOT / "workloads")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_readme_shows_commands_snippets_and_a_scenario():
    assert len(COMMANDS) >= 8
    assert len(SNIPPETS) == 1
    assert len(SCENARIOS) == 1


def test_the_first_two_commands_install_and_test():
    first, second, *_ = re.findall(r"^\$ (.*)$", README, re.MULTILINE)
    assert first.startswith("pip install . && trainsim run workloads/gpt2-xl-1f1b.toml")
    assert second == 'pip install ".[dev]" && pytest -n auto --dist loadfile'


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_readme_runs(command, folder):
    arguments = [sys.executable, "-m", "simulator", *shlex.split(command)[1:]]
    done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_python_snippet_runs(folder, capsys):
    exec(SNIPPETS[0], {})
    assert capsys.readouterr().out.rstrip().endswith("33.0")
    assert (folder / "pipeline.png").stat().st_size > 10_000


def test_the_scenario_of_the_readme_runs(folder):
    import simulator as sim

    path = folder / "mine.toml"
    path.write_text(SCENARIOS[0], encoding="utf-8")
    scenario = sim.load(path)
    assert scenario.plan.dp == 8
    assert scenario.cluster.node.device.memory == 96 * 2**30
