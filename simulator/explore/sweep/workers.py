"""Who simulates what: scenarios go out to workers in chunks, and rows come back as they are done.

A chunk takes about `CHUNK_S`, and each worker has a few of them, so that none waits for the next. A
chunk whose worker dies is taken apart, and its scenarios are tried again one at a time: the one
that kills a worker on its own becomes a row that says so, and all others arrive.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from itertools import chain, islice

from simulator.errors import TrainsimError
from simulator.explore.sweep.pools import (
    RESUME,
    Answer,
    Chunk,
    Local,
    Pool,
    Remote,
    Task,
)
from simulator.explore.sweep.row import FAILED, Record, measure
from simulator.pool import cores, renewed_in_silence

CHUNK_S = 0.25
"""Seconds of a chunk: long beside what it costs to send, short beside what a kill loses."""

MOST_IN_CHUNK = 64

AHEAD = 2
"""Chunks that a worker has at a time: one in hand, the others waiting."""

ALONE_S = 1.0
"""Seconds that this process simulates at least before it starts others."""

PAYS_S = 6.0
"""Seconds of work left from which others pay: they take a second or two to start."""

DIED = "the process that simulated it died (out of memory?)"


def simulate_all(
    tasks: Iterator[Task], count: int, workers: int | None, scheduler: str | None
) -> Iterator[list[Record]]:
    """Simulate scenarios and yield their rows, some at a time, in whatever order they are done.

    Args:
        tasks: what to simulate; more of them are asked for when workers have room.
        count: how many they are at most.
        workers: processes of this machine; as many as it has processors when absent, and none but
            this one where that is quicker.
        scheduler: address of a Dask scheduler, whose workers simulate instead.

    Raises:
        DescriptionError: when the scheduler has no worker.
        TrainsimError: when a worker has another version, or the cluster has gone.
    """
    if scheduler is None and workers is None:
        yield from alone(tasks, count)
        first = next(tasks, None)
        if first is None:
            return
        tasks, workers = chain([first], tasks), cores()
    if scheduler is None and workers == 1:
        yield from alone(tasks)
        return
    pool: Pool = Remote(scheduler) if scheduler is not None else Local(workers or 1)
    done = False
    try:
        with renewed_in_silence():
            yield from _spread(tasks, pool)
        done = True
    finally:
        pool.close(now=not done)


def alone(tasks: Iterator[Task], count: int | None = None) -> Iterator[list[Record]]:
    """Simulate in this process; yield rows a chunk at a time.

    Args:
        tasks: what to simulate; what is left is not taken.
        count: how many they may be, where it is to end once others would be done sooner.
    """
    begin = since = last = time.perf_counter()
    batch: list[Record] = []
    times: list[float] = []
    for task in tasks:
        batch.append(measure(*task))
        now = time.perf_counter()
        times.append(now - last)
        last = now
        if now - since <= CHUNK_S:
            continue
        yield batch
        batch, since = [], now
        # The median, for the first ones load and compile what all others use.
        if count is not None and now - begin > ALONE_S:
            left = (count - len(times)) * statistics.median(times)
            if left > PAYS_S:
                break
    if batch:
        yield batch


def _spread(tasks: Iterator[Task], pool: Pool) -> Iterator[list[Record]]:
    """Simulate in a pool; yield rows as chunks are done."""
    flying: dict[Future[Answer], Chunk] = {}
    suspects: deque[Task] = deque()  # of chunks whose worker died
    size, broken = 1, False
    while True:
        while not suspects and len(flying) < AHEAD * pool.width():
            chunk = tuple(islice(tasks, size))
            if not chunk:
                break
            broken |= not _sent(pool, chunk, flying, suspects)
        tried_alone = bool(suspects) and not flying
        if tried_alone:
            if broken:
                pool.renew()
            broken = not _sent(pool, (suspects.popleft(),), flying, suspects)
        if not flying:
            if suspects:
                continue
            return
        done, _ = wait(flying, timeout=5, return_when=FIRST_COMPLETED)
        if not done:
            pool.check()
        for future in done:
            chunk = flying.pop(future)
            answer = _answer(future, pool)
            if answer is not None:
                seconds, records = answer
                size = max(1, min(MOST_IN_CHUNK, round(CHUNK_S * len(chunk) / max(seconds, 1e-6))))
                yield records
                continue
            broken = True
            if tried_alone:
                row = {"status": FAILED, "reason": DIED}
                yield [Record(chunk[0][0], row, is_final=False)]
            else:
                suspects.extend(chunk)


def _sent(
    pool: Pool, chunk: Chunk, flying: dict[Future[Answer], Chunk], suspects: deque[Task]
) -> bool:
    """Send a chunk, or keep it for later where the pool has just lost a worker; return which."""
    try:
        flying[pool.submit(chunk)] = chunk
    except pool.lost:
        suspects.extend(chunk)
        return False
    return True


def _answer(future: Future[Answer], pool: Pool) -> Answer | None:
    """Return what came of a chunk, or None where its worker died.

    Raises:
        TrainsimError: when workers have gone, or have no such package.
    """
    try:
        return future.result()
    except pool.lost:
        return None
    except CancelledError:
        raise TrainsimError(f"the workers have gone; {RESUME}") from None
    except ImportError as error:
        raise TrainsimError(f"a worker cannot run trainsim: {error}") from None
