"""The door of joblib: a function over items, in processes on this machine."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
U = TypeVar("U")


def cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def renewed_in_silence() -> Iterator[None]:
    """Let joblib replace a process that has grown by 300 MB without a word.

    What grows is caches of what scenarios share. joblib warns of it in the thread that replaces the
    process: where warnings are errors, that thread would end, and the caller would wait for ever.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "A worker stopped while some jobs", UserWarning)
        yield


def mapped(function: Callable[[T], U], items: Sequence[T], jobs: int) -> Iterator[U]:
    """Yield what a function makes of items, in their order; with several jobs in processes.

    The function must be importable; workers stay warm from one call to the next.
    """
    if jobs <= 1 or len(items) <= 1:
        yield from map(function, items)
        return
    from joblib import Parallel, delayed

    pool = Parallel(n_jobs=min(jobs, len(items)), backend="loky", return_as="generator")
    with renewed_in_silence():
        yield from pool(delayed(function)(item) for item in items)
