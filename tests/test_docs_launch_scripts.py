"""The page on launch scripts is a promise too: its commands run, its table is the code's."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from simulator.exchange.megatron.flags import FLAGS

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "launch-scripts.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\$ (trainsim .*)$", PAGE, re.MULTILINE)


def shown(flag):
    if flag.kind == "switch":
        return "off"
    if flag.default is None:
        return "-"
    return " ".join(flag.default) if isinstance(flag.default, tuple) else str(flag.default)


def test_every_flag_stands_on_the_page_with_its_default():
    rows = re.findall(r"^\| `--([\w-]+)` \| (.*) \| (.*) \|$", PAGE, re.MULTILINE)
    assert rows == [(name, shown(flag), flag.becomes) for name, flag in FLAGS.items()]


def test_the_commands_of_the_page_run(tmp_path):
    (tmp_path / "workloads").symlink_to(ROOT / "workloads")
    assert len(COMMANDS) >= 4
    for command in COMMANDS:
        arguments = [sys.executable, "-m", "simulator", *shlex.split(command)[1:]]
        done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr}"


@pytest.mark.parametrize("script", sorted((ROOT / "workloads" / "launch").iterdir()), ids=str)
def test_every_shipped_script_is_read_without_an_unknown_flag(script):
    from simulator.exchange.megatron import import_megatron

    if script.suffix == ".sh":
        assert import_megatron(script.read_text(encoding="utf-8")).unknown == ()


def test_every_setting_of_torchtitan_stands_on_the_page():
    from simulator.exchange.titan_keys import KEYS

    rows = re.findall(r"^\| `(\w+\.\w+)` \| (.*) \| (.*) \|$", PAGE, re.MULTILINE)
    assert [(name, becomes) for name, _, becomes in rows] == [
        (name, key.becomes) for name, key in KEYS.items()
    ]
