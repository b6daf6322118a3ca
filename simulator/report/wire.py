"""Protocol-buffer messages from columns: a message for each row, all rows at once.

Every row is laid out with room for the longest, a column of bytes beside the other, and what a row
does not use is taken out at the end. So each column is made by a few operations over all rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Bools = npt.NDArray[np.bool_]

Column: TypeAlias = tuple[Bytes | int, Bools | bool]
"""A byte of each row, or the same of all, and which rows have it."""


class Field(Protocol):
    """A part of each row's message."""

    @property
    def sizes(self) -> Int64 | int:
        """Bytes of each row, or of every row where they are the same."""

    def columns(self) -> Iterator[Column]:
        """Yield its bytes from the first to the last."""


@dataclass(frozen=True, eq=False)
class Constant:
    """The same bytes in every row."""

    body: bytes

    @property
    def sizes(self) -> int:
        """Bytes of every row."""
        return len(self.body)

    def columns(self) -> Iterator[Column]:
        """Yield its bytes from the first to the last."""
        return ((byte, True) for byte in self.body)


@dataclass(frozen=True, eq=False)
class Number:
    """A number that is not below 0, as varint behind its head; only in rows where present."""

    head: bytes
    values: Int64
    present: Bools | bool = True

    @cached_property
    def sizes(self) -> Int64:
        """Bytes of each row."""
        sizes: Int64 = (_lengths(self.values) + len(self.head)) * self.present
        return sizes

    def columns(self) -> Iterator[Column]:
        """Yield its bytes from the first to the last."""
        return _within(self.present, _heading(self.head), _varint_columns(self.values))


@dataclass(frozen=True, eq=False)
class Fixed:
    """Eight bytes as they are, of a number or of a float, behind their head."""

    head: bytes
    values: Int64 | npt.NDArray[np.float64]
    present: Bools | bool = True

    @property
    def sizes(self) -> Int64:
        """Bytes of each row."""
        sizes: Int64 = np.int64(len(self.head) + 8) * np.asarray(self.present)
        return sizes

    def columns(self) -> Iterator[Column]:
        """Yield its bytes from the first to the last."""
        eight = np.ascontiguousarray(self.values).view(np.uint8).reshape(-1, 8)
        return _within(self.present, _heading(self.head), ((eight[:, k], True) for k in range(8)))


@dataclass(frozen=True, eq=False)
class Message:
    """A message within each row's, of fields of its own; only in rows where present."""

    head: bytes
    fields: Sequence[Field]
    present: Bools | bool = True

    @cached_property
    def _body(self) -> Int64:
        total = np.zeros(1, np.int64)
        for field in self.fields:
            total = total + field.sizes
        return total

    @cached_property
    def sizes(self) -> Int64:
        """Bytes of each row."""
        sizes: Int64 = (self._body + _lengths(self._body) + len(self.head)) * self.present
        return sizes

    def columns(self) -> Iterator[Column]:
        """Yield its bytes from the first to the last."""
        parts = (field.columns() for field in self.fields)
        return _within(self.present, _heading(self.head), _varint_columns(self._body), *parts)


def _heading(head: bytes) -> Iterator[Column]:
    return ((byte, True) for byte in head)


def _within(present: Bools | bool, *parts: Iterator[Column]) -> Iterator[Column]:
    """Yield the columns of parts in those rows only where they are present."""
    for part in parts:
        if present is True:
            yield from part
        else:
            yield from ((byte, present if there is True else there & present)
                        for byte, there in part)  # fmt: skip


def _lengths(values: Int64) -> Int64:
    """Return how many bytes each of some numbers takes."""
    lengths = np.ones(len(values), np.int64)
    bound, most = 1 << 7, int(values.max(initial=0))
    while bound <= most:
        lengths += values >= bound
        bound <<= 7
    return lengths


def _varint_columns(values: Int64) -> Iterator[Column]:
    """Yield the bytes of numbers, as many as the largest has."""
    most, least = int(values.max(initial=0)), int(values.min(initial=0))
    there: Bools | bool = True
    while most > 0x7F:
        more = values > 0x7F
        yield ((values & 0x7F) | (more * np.int64(0x80))).astype(np.uint8), there
        most, least = most >> 7, least >> 7
        values, there = values >> 7, True if least else more
    yield values.astype(np.uint8), there


def encoded(rows: int, *messages: Message) -> Bytes:
    """Return rows one after the other, each of several messages one after the other."""
    columns = [column for message in messages for column in message.columns()]
    data = np.empty((len(columns), rows), np.uint8)
    used = np.empty((len(columns), rows), np.bool_)
    for k, (byte, there) in enumerate(columns):
        data[k], used[k] = byte, there
    found: Bytes = data.T[used.T]
    return found
