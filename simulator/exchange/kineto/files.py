"""Files of traces: which there are, and what each says of itself before its events are read."""

from __future__ import annotations

import glob
import gzip
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from simulator.budget import require
from simulator.errors import DescriptionError

SUFFIXES = (".json", ".json.gz")
"""How the name of a trace ends."""

GROWTH = 8
"""Bytes of memory for a byte of JSON text: 6.4 for 360,000 events, text, values and columns."""

_RANK_IN_NAME = re.compile(r"rank[-_.]?(\d+)", re.IGNORECASE)


class Group(NamedTuple):
    """A process group, as the file lists it."""

    description: str
    ranks: tuple[int, ...]
    """Global ranks; empty where the file does not say."""


class Document(NamedTuple):
    """A trace file that has been parsed."""

    path: Path
    events: list[Any]
    rank: int | None
    """None where neither the file nor its name says."""
    world_size: int | None
    groups: Mapping[str, Group]
    """By name."""
    base_ns: int
    """What times of events count from, in nanoseconds of the clock of the host."""


def find(paths: Sequence[str | Path]) -> list[Path]:
    """Return the files that paths, folders and patterns name, each once.

    Raises:
        DescriptionError: when one names no trace.
    """
    found: dict[Path, None] = {}
    problems = []
    for text in paths:
        path = Path(text)
        if path.is_dir():
            some = sorted(p for p in path.iterdir() if p.name.endswith(SUFFIXES) and p.is_file())
            wrong = f"the folder {str(path)!r} holds no file that ends in {' or '.join(SUFFIXES)}"
        elif path.exists():
            some, wrong = [path], ""
        elif any(c in str(text) for c in "*?["):
            some = [Path(p) for p in sorted(glob.glob(str(text), recursive=True))]
            wrong = f"no file matches {str(text)!r}"
        else:
            some, wrong = [], f"there is no file {str(path)!r}"
        if not some:
            problems.append(wrong)
        found |= dict.fromkeys(some)
    if problems or not found:
        raise DescriptionError(problems or "name at least one trace")
    return list(found)


def read(path: Path) -> Document:
    """Return a trace file, parsed.

    Raises:
        DescriptionError: when it cannot be read, is cut short, or is no trace.
    """
    data = _bytes(path)
    require(GROWTH * len(data), f"reading {str(path)!r}", "read fewer ranks or shorter profiles")
    try:
        document = json.loads(data)
    except ValueError as error:
        raise DescriptionError(f"{str(path)!r} {_fault(data, error)}") from None
    except RecursionError:
        raise DescriptionError(f"{str(path)!r} is no trace: it is nested too deeply") from None
    if isinstance(document, list):  # the other form of a Chrome trace
        document = {"traceEvents": document}
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        has = ", ".join(list(document)[:5]) if isinstance(document, dict) else ""
        raise DescriptionError(
            f"{str(path)!r} is JSON but no trace of torch.profiler: it has no list 'traceEvents'"
            + (f", only {has}" if has else "")
        )
    about = _table(document.get("distributedInfo"))
    in_name = _RANK_IN_NAME.search(path.name)
    named = int(in_name[1]) if in_name else None
    return Document(
        path=path,
        events=document["traceEvents"],
        rank=_whole(about.get("rank"), named),
        world_size=_whole(about.get("world_size"), None),
        groups=_groups(about.get("pg_config")),
        base_ns=_whole(document.get("baseTimeNanoseconds"), 0) or 0,
    )


def _bytes(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise DescriptionError(
            f"{str(path)!r} is cut short or damaged: it does not unpack as gzip"
        ) from None
    except OSError as error:
        raise DescriptionError(f"{str(path)!r} cannot be read ({error.strerror})") from None


def _fault(data: bytes, error: ValueError) -> str:
    """Say what is wrong with a text that is no JSON."""
    if not data.strip():
        return "is empty"
    if data.lstrip()[:1] not in (b"{", b"["):
        return "is no trace of torch.profiler: it does not begin as JSON does"
    if isinstance(error, json.JSONDecodeError):
        if error.pos >= len(error.doc.rstrip()) - 1 or data.rstrip()[-1:] not in (b"}", b"]"):
            return f"is cut short: its JSON ends within line {error.lineno}"
        return f"is no JSON at line {error.lineno}, column {error.colno} ({error.msg})"
    return "is no JSON: it is not UTF-8 text"


def _groups(config: object) -> dict[str, Group]:
    """Return the groups that a file lists; lists of ranks are absent for large ones."""
    groups = {}
    for row in config if isinstance(config, list) else ():
        if isinstance(row, dict) and "pg_name" in row:
            groups[str(row["pg_name"])] = Group(
                str(row.get("pg_desc", "")), whole_numbers(row.get("ranks"))
            )
    return groups


def whole_numbers(value: object) -> tuple[int, ...]:
    """Return a list of ranks, also one in a text such as ``[0, 1]``; empty when it is no list."""
    if isinstance(value, str):
        words = value.strip("[]() ").split(",")
        if not all(word.strip().isdigit() for word in words):  # "[0, 1, ..., 31]" says too little
            return ()
        return tuple(int(word) for word in words)
    if isinstance(value, list) and all(type(v) is int and v >= 0 for v in value):
        return tuple(value)
    return ()


def _table(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _whole(value: object, default: int | None) -> int | None:
    return value if type(value) is int and value >= 0 else default
