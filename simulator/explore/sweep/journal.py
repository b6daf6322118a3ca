"""The journal of a sweep: rows as they come, a JSON line each, so that a kill loses none.

Lines are only ever appended, a batch at a time, and are on the disk (fsync) before the next batch.
A kill in mid-write leaves a line without its end, which the next start cuts off. Rows are found by
the key of their scenario, whatever sweep they came from, so a larger sweep goes on from a smaller.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from simulator.errors import DescriptionError
from simulator.explore.sweep.row import Record, Row

HEAD = '{"trainsim": "journal of a sweep", "version": 1}'
"""First line of every journal."""

SUFFIX = ".journal"
"""What its name adds to that of the result."""


class Journal:
    """An open journal: rows by key, and more of them appended; one process at a time has it."""

    def __init__(self, path: Path) -> None:
        """Open the journal at a path, or begin it, and cut off what a kill left unfinished.

        Raises:
            DescriptionError: when it cannot be opened, is no journal, or another process has it.
        """
        self.path = path
        self.rows: dict[str, Row] = {}
        try:
            self._file: IO[bytes] = path.open("a+b")
        except OSError as error:
            raise DescriptionError(f"cannot write {str(path)!r}: {error.strerror}") from None
        try:
            _lock(self._file, path)
            self._read()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._file.close()

    def _read(self) -> None:
        self._file.seek(0)
        whole, _, torn = self._file.read().rpartition(b"\n")
        head, *lines = whole.split(b"\n") if whole else [torn if HEAD.encode() != torn else b""]
        if not HEAD.encode().startswith(head) or (whole and head != HEAD.encode()):
            raise DescriptionError(f"{self.path}: is not a journal of a sweep; move it away")
        if not whole:  # new, or killed before its first line was whole
            self._file.truncate(0)
            self._append([HEAD])
            return
        if torn:
            self._file.truncate(len(whole) + 1)
        for number, line in enumerate(lines, 2):
            try:
                record = json.loads(line)
                self.rows[record["key"]] = record["row"]
            except (ValueError, KeyError, TypeError):
                raise DescriptionError(
                    f"{self.path}: line {number} is no row of a sweep; delete that line, and its "
                    "row will be simulated again"
                ) from None

    def add(self, records: Sequence[Record]) -> None:
        """Append rows that another try would not change; they are on the disk when this returns.

        Raises:
            DescriptionError: when the disk takes no more.
        """
        final = [record for record in records if record.is_final]
        if final:
            self._append([json.dumps({"key": r.key, "row": r.row}) for r in final])
        self.rows.update((r.key, r.row) for r in final)

    def _append(self, lines: Sequence[str]) -> None:
        try:
            self._file.write("".join(f"{line}\n" for line in lines).encode())
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise DescriptionError(f"cannot write {str(self.path)!r}: {error.strerror}") from None


def _lock(file: IO[bytes], path: Path) -> None:
    """Take a file for this process alone, for as long as it lives or the file is open."""
    try:
        import fcntl
    except ImportError:  # not on Windows: there two sweeps into one file are nobody's business
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise DescriptionError(
            f"{path}: another sweep is writing it; wait for it, or give another --out"
        ) from None
