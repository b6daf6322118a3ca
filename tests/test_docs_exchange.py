"""The page on traces is a promise too: its commands run, in their order, and its Python does."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from simulator.describe.loader import load_model
from simulator.lower.layers import num_parameters

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "exchange.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\$ (trainsim .*)$", PAGE, re.MULTILINE)
PYTHON, MODULE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exchange")
    shutil.copytree(ROOT / "tests" / "traces", folder / "traces")
    return folder


def run(folder, *arguments):
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


@pytest.mark.parametrize("command", [c for c in COMMANDS if "kineto" in c])
def test_a_command_on_measured_runs_works(folder, command):
    assert run(folder, "-m", "simulator", *shlex.split(command)[1:])


def test_what_is_written_as_chakra_is_read_again(folder):
    for command in (c for c in COMMANDS if "chakra" in c):
        assert run(folder, "-m", "simulator", *shlex.split(command)[1:])
    assert (folder / "pipeline.png").exists()


def test_the_module_of_the_page_becomes_a_model(folder):
    pytest.importorskip("torch")
    run(folder, "-c", MODULE)
    model = load_model(str(folder / "my-net.toml"))
    # 8 layers of 2 x 1024 + 2 x 1024 x 4096 + 4096 + 1024, and 10 x 1024 + 10
    assert num_parameters(model) == 8 * 8_395_776 + 10_250
    # the first layer's input is data, whose gradient nobody needs
    assert [layer.repeat for layer in model.layers] == [1, 7, 1]


def test_the_python_of_the_page_runs(folder):
    assert run(folder, "-c", PYTHON).startswith("0.19")
