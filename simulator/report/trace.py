"""Trace files of results: Chrome's JSON, and Perfetto's protocol buffers for large ones."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from simulator.errors import DescriptionError
from simulator.files import check_writable, write_whole
from simulator.report.trace_columns import Trace, trace_of
from simulator.report.trace_json import trace_json
from simulator.report.trace_perfetto import trace_perfetto

if TYPE_CHECKING:
    from simulator.report.result import Result

MANY_RANKS = 64
"""Ranks above which a trace shows one of each stage unless told otherwise."""

PERFETTO = ".pftrace"

SUFFIXES = (".json", ".json.gz", PERFETTO, f"{PERFETTO}.gz")
"""How the name of a trace ends."""


def write_trace(result: Result, path: Path, ranks: Sequence[int] | None = None) -> None:
    """Write the trace of a result; gzip it when the path ends in ``.gz``.

    Args:
        result: a program that has run.
        path: a new or old file whose name ends in one of `SUFFIXES`, which says what is written.
        ranks: the ranks to show; all of them when absent.

    Raises:
        DescriptionError: when the file cannot be written there, or a rank does not exist.
    """
    check_writable(path, SUFFIXES)
    shown = np.zeros(result.tiled.num_ranks, np.bool_)
    for rank in range(len(shown)) if ranks is None else ranks:
        if type(rank) is not int or not 0 <= rank < len(shown):
            raise DescriptionError(f"rank {rank!r} lies outside 0..{len(shown) - 1}")
        shown[rank] = True
    encode = _perfetto if PERFETTO in path.suffixes else trace_json
    write_whole(path, partial(_write, encode, trace_of(result, shown)))


def _perfetto(trace: Trace) -> Iterator[memoryview]:
    return (part.data for part in trace_perfetto(trace))


def _write(
    encode: Callable[[Trace], Iterator[bytes | memoryview]], trace: Trace, path: Path
) -> None:
    parts = encode(trace)
    with path.open("wb") as file:
        if path.suffix == ".gz":
            # No name and no time inside: the same trace is the same bytes.
            with gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=file, mtime=0) as z:
                for part in parts:
                    z.write(part)
        else:
            for part in parts:
                file.write(part)
