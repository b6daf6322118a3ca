"""Starting the ranks, watching them, and ending all of them whatever happens."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from simulator.errors import DeadlockError, DescriptionError, TrainsimError
from simulator.validate.torch.files import POSITION, position_file
from simulator.validate.torch.job import Job

try:
    import fcntl
except ImportError:  # as on Windows
    fcntl = None  # type: ignore[assignment]

POLL = 0.05
"""Seconds between two looks at the ranks."""

STARTUP = 120.0
"""Seconds that ranks may take until their first action, which is mostly importing torch."""

WORKER = "simulator.validate.torch.rank"

TAIL = 3
"""Lines of a crashed rank's errors that are shown."""


def require_torch() -> None:
    """Check that torch is there, without importing it.

    Raises:
        DescriptionError: when it is not.
    """
    if importlib.util.find_spec("torch") is None:
        raise DescriptionError('torch is not installed: pip install "trainsim[validate]" brings it')


@contextmanager
def folder_of(job: Job) -> Iterator[Path]:
    """Give a temporary folder with a job in it, and remove it afterwards.

    Those that killed commands have left are removed first: a command holds a lock in its own.
    """
    where = Path(tempfile.gettempdir())
    try:
        for left in where.glob(f"{PREFIX}*"):
            if _abandoned(left / LOCK):
                shutil.rmtree(left, ignore_errors=True)
        with (
            tempfile.TemporaryDirectory(prefix=PREFIX) as name,
            (Path(name) / LOCK).open("wb") as lock,
        ):
            _take(lock)
            job.write(Path(name) / "job.json")
            yield Path(name)
    except OSError as error:
        reason = error.strerror or error
        raise TrainsimError(f"cannot keep the ranks' files in {str(where)!r}: {reason}") from None


PREFIX, LOCK = "trainsim-ranks-", "lock"
"""How the folders of ranks begin, and the file that their command keeps locked."""


def _abandoned(lock: Path) -> bool:
    """Return whether a command's lock is there, ours, and held no longer."""
    try:
        with lock.open("r+b") as file:
            return _take(file)
    except OSError:  # another user's, or just made
        return False


def _take(file: BinaryIO) -> bool:
    """Lock a file if nobody does; return whether it is locked now, False where there are none."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


class Ranks:
    """The processes of a job; leaving the block ends those that still run."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.job, self.folder = job, folder
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Ranks:
        for rank in range(self.job.world_size):
            self.processes.append(start(self.folder, rank, self.job.world_size))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for process in self.processes:
            process.wait()
            if process.stdin is not None:
                process.stdin.close()

    def position(self, rank: int) -> tuple[int, int]:
        """Return the step of a rank and the number of its action; (0, -1) before the first."""
        path = position_file(self.folder, rank)
        data = path.read_bytes() if path.exists() else b""
        return POSITION.unpack(data) if len(data) == POSITION.size else (0, -1)

    def wait(self, timeout: float, progress: Callable[[int], None] = lambda step: None) -> None:
        """Wait until all ranks have ended.

        Args:
            timeout: seconds that all ranks together may stay where they are.
            progress: is told the steps that all ranks have done, as they come.

        Raises:
            DeadlockError: when no rank has moved on for so long.
            TrainsimError: when a rank has crashed.
        """
        ranks = range(self.job.world_size)
        begin = moved = time.monotonic()
        last: list[tuple[int, int]] = []
        while True:
            codes = [process.poll() for process in self.processes]
            if any(codes):
                raise TrainsimError(self._crash(codes))
            if not any(code is None for code in codes):
                return
            now, places = time.monotonic(), [self.position(r) for r in ranks]
            if places != last:
                moved, last = now, places
                progress(min(step for step, _ in places))
            started = any(place != (0, -1) for place in places)
            if now - moved > timeout and (started or now - begin > max(timeout, STARTUP)):
                raise DeadlockError(self._stuck(timeout, places))
            time.sleep(POLL)

    def _crash(self, codes: list[int | None]) -> str:
        first = next(rank for rank, code in enumerate(codes) if code)
        code = codes[first]
        assert code is not None  # it has ended
        how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        step, position = self.position(first)
        where = f" at {self._place(first, position)} of step {step}" if position >= 0 else ""
        errors = errors_of(self.folder, first).splitlines()[-TAIL:]
        said = "".join(f"\n  {line}" for line in errors)
        return f"rank {first} {how}{where}; the other ranks were ended{said}"

    def _stuck(self, timeout: float, places: list[tuple[int, int]]) -> str:
        lines = [
            f"\n  rank {rank}: {self._place(rank, position)}, step {step}"
            for rank, (step, position) in enumerate(places)
        ]
        return f"no rank has moved on for {timeout:g} s; all were ended{''.join(lines)}"

    def _place(self, rank: int, position: int) -> str:
        row = self.job.list_of(rank)
        if position < 0:
            return "between steps"
        return f"action {position + 1} of {len(row)}, {row[position]}"


def start(folder: Path, rank: int, world: int) -> subprocess.Popen[bytes]:
    """Start a rank; it ends when this process does, since its standard input then closes."""
    environment = os.environ | {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
        "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
    }  # fmt: skip
    if any(name == "lo" for _, name in socket.if_nameindex()):
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    here = str(Path(__file__).resolve().parents[3])
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, (here, os.environ.get("PYTHONPATH", "")))
    )
    with (folder / f"errors{rank}").open("wb") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", WORKER, str(folder)], env=environment, stdin=subprocess.PIPE,
            stdout=errors, stderr=errors,
        )  # fmt: skip


def errors_of(folder: Path, rank: int) -> str:
    """Return what a rank has printed."""
    path = folder / f"errors{rank}"
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def check_against_one_process(job: Job, folder: Path) -> None:
    """Let one process train the same model, and leave ``reference.json`` beside the ranks' files.

    Raises:
        TrainsimError: when it fails.
    """
    import dataclasses

    dataclasses.replace(job, mode="reference").write(folder / "job.json")
    process = start(folder, job.world_size, 1)
    try:
        process.wait()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        if process.stdin is not None:
            process.stdin.close()
    if process.returncode:
        lines = errors_of(folder, job.world_size).splitlines()[-TAIL:]
        said = "".join(f"\n  {line}" for line in lines)
        raise TrainsimError(f"the single process that checks losses failed{said}")
