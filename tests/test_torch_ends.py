"""However ranks and their command end: a sentence, no process left, no folder left for long."""

from __future__ import annotations

import importlib.util
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from test_torch_replay import tiny

from simulator.errors import TrainsimError
from simulator.validate.torch import launch
from simulator.validate.torch.launch import folder_of

__all__ = ["tiny"]  # the fixture

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed (extra: validate)"
)

COMMAND = (
    sys.executable, "-m", "simulator", "validate", "torch", "gpt-replay-2ranks",
    "--set", "model.hidden_size=64", "--set", "model.head_dim=16", "--set",
    "model.intermediate_size=64", "--set", "run.sequence_length=16",
)  # fmt: skip


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Return a folder of temporary files that is empty."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_folder_of_ranks_is_gone_when_they_are_done(tiny, temporary):
    with folder_of(tiny()) as folder:
        assert (folder / "job.json").is_file()
    assert list(temporary.iterdir()) == []


def test_a_folder_that_a_killed_command_has_left_is_removed_by_the_next_one(tiny, temporary):
    left = temporary / f"{launch.PREFIX}left"
    left.mkdir()
    (left / launch.LOCK).touch()
    with folder_of(tiny()):
        assert not left.exists()


def test_the_folder_of_a_command_that_still_runs_is_kept(tiny, temporary):
    with folder_of(tiny()) as running:
        script = (
            "import tempfile, sys; from pathlib import Path\n"
            "from simulator.validate.torch import launch\n"
            f"print(launch._abandoned(Path({str(running)!r}) / launch.LOCK))"
        )
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        )
        assert done.stdout == "False\n"
        with folder_of(tiny()):
            assert running.is_dir()


def test_a_folder_that_cannot_be_made_is_a_sentence(tiny, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with pytest.raises(TrainsimError, match=r"cannot keep the ranks' files in .*absent'"), \
            folder_of(tiny()):  # fmt: skip
        pass


def command(*more: str, where: Path, **options: Any) -> subprocess.Popen[str]:
    environment = os.environ | {"TMPDIR": str(where)}
    return subprocess.Popen(
        [*COMMAND, *more], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, **options,
    )  # fmt: skip


def ranks_in(where: Path) -> list[int]:
    """Return the processes that were started on a folder in another one."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if any(word.startswith(os.fsencode(where / launch.PREFIX)) for word in words):
            found.append(int(process.name))
    return found


def wait_for(what, seconds=60.0):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.05)


@needs_torch
def test_killing_the_command_leaves_no_rank_running(tmp_path):
    process = command("--visits", "1000", where=tmp_path)
    try:
        wait_for(lambda: list(tmp_path.glob(f"{launch.PREFIX}*/rank1.jsonl")))
        assert len(ranks_in(tmp_path)) == 2
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    wait_for(lambda: not ranks_in(tmp_path))


@needs_torch
def test_a_full_disk_is_a_sentence_and_leaves_nothing(tmp_path):
    limit = 64 * 1024  # bytes of a file: stands for a disk that has no more
    process = command(
        where=tmp_path,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 1
    assert "cannot keep its files: File too large" in errors
    assert "Traceback" not in errors
    assert ranks_in(tmp_path) == []
    assert list(tmp_path.glob(f"{launch.PREFIX}*")) == []
