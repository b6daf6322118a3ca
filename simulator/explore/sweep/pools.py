"""Workers that simulate: local processes, or those of a Dask cluster; both take chunks."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from concurrent.futures import Future
from typing import Any, Protocol, TypeAlias

from simulator import __version__
from simulator.describe.scenario import Scenario
from simulator.errors import DescriptionError, TrainsimError
from simulator.explore.sweep.row import Record, measure

Task: TypeAlias = tuple[str, Scenario]
"""The key of a scenario, and the scenario."""

Chunk: TypeAlias = tuple[Task, ...]

Answer: TypeAlias = tuple[float, list[Record]]
"""Seconds that a chunk took, and its rows."""

CONNECT_S = 10.0
"""Seconds that a Dask scheduler has to answer."""

PATIENCE_S = 30.0
"""Seconds that a Dask cluster may be without a worker."""

ADDRESS = re.compile(r"((tcp|tls|ws|wss|ucx)://)?[^/\s]+:\d+/?")
"""Of a Dask scheduler."""

RESUME = "what is done is kept where the sweep has an --out: the same command goes on from there"


class Pool(Protocol):
    """Workers that take chunks."""

    lost: tuple[type[BaseException], ...]
    """Errors of a chunk that say that its worker died."""

    def width(self) -> int:
        """Return how many chunks are simulated at a time."""

    def submit(self, chunk: Chunk) -> Future[Answer]:
        """Send a chunk."""

    def renew(self) -> None:
        """Make the pool whole again after a worker has died."""

    def check(self) -> None:
        """Look whether there still are workers, when none has answered for some seconds.

        Raises:
            TrainsimError: when there are none, and none have come for a while.
        """

    def close(self, *, now: bool) -> None:
        """Let workers go; `now` whatever they are doing."""


def simulate_chunk(version: str, chunk: Chunk) -> Answer:
    """Simulate a chunk, in a worker.

    Raises:
        TrainsimError: when the worker has another version of this package.
    """
    if version != __version__:
        raise TrainsimError(f"the worker has trainsim {__version__}, and the sweep {version}")
    begin = time.perf_counter()
    records = [measure(*task) for task in chunk]
    return time.perf_counter() - begin, records


HANDS_OUT = "ExecutorManagerThread"
"""The thread of loky that hands out chunks and takes in rows."""


class Local:
    """Processes of this machine, by joblib's loky."""

    def __init__(self, workers: int) -> None:
        from joblib.externals.loky.process_executor import BrokenProcessPool

        self.lost: tuple[type[BaseException], ...] = (BrokenProcessPool,)
        self._fault: BaseException | None = None
        self._before, threading.excepthook = threading.excepthook, self._heard
        self._workers, self._executor = workers, _processes(workers)

    def _heard(self, ended: threading.ExceptHookArgs) -> None:
        """Keep what ended loky's thread, which Ctrl-C may; it is no traceback for anybody."""
        if ended.thread is not None and ended.thread.name == HANDS_OUT:
            self._fault = ended.exc_value or ended.exc_type()
        else:
            self._before(ended)

    def width(self) -> int:
        """Return the number of processes."""
        return self._workers

    def submit(self, chunk: Chunk) -> Future[Answer]:
        """Send a chunk."""
        future: Future[Answer] = self._executor.submit(simulate_chunk, __version__, chunk)
        return future

    def renew(self) -> None:
        """Start all processes anew: the death of one ends the work of all."""
        self._executor.shutdown(wait=True, kill_workers=True)
        self._executor = _processes(self._workers)

    def check(self) -> None:
        """Look whether chunks are still handed out; a process that dies is noticed at once.

        Raises:
            TrainsimError: when they are not.
        """
        if self._fault is not None:
            raise TrainsimError(f"no work is handed out any more ({self._fault!r}); {RESUME}")

    def close(self, *, now: bool) -> None:
        """End the processes."""
        self._executor.shutdown(wait=True, kill_workers=now)
        threading.excepthook = self._before


def _processes(workers: int) -> Any:
    from joblib.externals.loky import ProcessPoolExecutor

    return ProcessPoolExecutor(workers, initializer=_prepare, initargs=(os.getpid(),))


def _prepare(parent: int) -> None:
    """Let a worker leave Ctrl-C to its parent, and end when the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class Remote:
    """The workers of a Dask cluster."""

    def __init__(self, address: str) -> None:
        if not ADDRESS.fullmatch(address):
            raise DescriptionError(
                f"--scheduler {address!r}: is no address of a Dask scheduler, as tcp://host:8786"
            )
        try:
            from distributed import Client
            from distributed.scheduler import KilledWorker
        except ImportError:
            raise DescriptionError(
                f"--scheduler {address!r}: Dask is not installed; pip install 'trainsim[dask]'"
            ) from None
        try:
            connect: Any = Client
            self._client = connect(address, timeout=CONNECT_S, set_as_default=False)
            self._client.wait_for_workers(1, timeout=PATIENCE_S)
        except (OSError, ValueError) as error:
            raise DescriptionError(
                f"--scheduler {address!r}: no Dask cluster with a worker answers there; start one "
                f"with 'dask scheduler' and 'dask worker {address}' ({error})"
            ) from None
        # What goes wrong with the connection is said in a sentence, not in Dask's tracebacks.
        self._loud = [(h, h.level) for h in logging.getLogger("distributed").handlers]
        for handler, _ in self._loud:
            handler.setLevel(logging.CRITICAL)
        self.lost: tuple[type[BaseException], ...] = (KilledWorker,)
        self._address, self._executor = address, self._client.get_executor(pure=False)
        self._asked = self._seen = -1.0
        self._threads = 1

    def width(self) -> int:
        """Return the threads of all workers, as of a moment ago."""
        if time.monotonic() - self._asked > 1:
            self.check()
        return self._threads

    def submit(self, chunk: Chunk) -> Future[Answer]:
        """Send a chunk."""
        future: Future[Answer] = self._executor.submit(simulate_chunk, __version__, chunk)
        return future

    def renew(self) -> None:
        """Do nothing: the scheduler has other workers."""

    def check(self) -> None:
        """Count workers.

        Raises:
            TrainsimError: when none has been there for a while.
        """
        alive = self._client.status == "running"
        try:
            threads = sum(self._client.nthreads().values()) if alive else 0
        except OSError:  # of a connection that has just closed
            alive, threads = False, 0
        self._asked = now = time.monotonic()
        if threads:
            self._seen, self._threads = now, threads
        elif now - self._seen > PATIENCE_S:
            gone = "no worker is left at" if alive else "nobody answers at"
            raise TrainsimError(f"{gone} the scheduler {self._address}; {RESUME}")

    def close(self, *, now: bool) -> None:
        """Leave the cluster; `now` without waiting for what it does for this sweep."""
        if now:
            self._executor.shutdown(wait=False)
        self._client.close()
        for handler, level in self._loud:
            handler.setLevel(level)
