"""The protobuf wire format, as far as traces need it: varints, texts, fixed numbers.

A message is fields one after the other: a key (number x 8 + wire type), then its value. A file of
traces is messages, each behind its length.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

VARINT, FIXED64, TEXT, FIXED32 = 0, 1, 2, 5


def varint(value: int) -> bytes:
    """Return a whole number in groups of seven bits; a negative one as 64-bit two's complement."""
    value &= 2**64 - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def tag(field: int, wire_type: int) -> bytes:
    """Return the key that begins a field."""
    return varint(field << 3 | wire_type)


def number(field: int, value: int) -> bytes:
    """Return a field that holds a whole number or a truth value."""
    return tag(field, VARINT) + varint(value)


def text(field: int, value: bytes) -> bytes:
    """Return a field that holds a text or a message."""
    return tag(field, TEXT) + varint(len(value)) + value


def framed(message: bytes) -> bytes:
    """Return a message behind its length."""
    return varint(len(message)) + message


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number at a position and where the next thing begins.

    Raises:
        ValueError: when the data end within it, or it has more than 64 bits.
    """
    value = shift = 0
    while at < len(data) and shift < 64 + 7:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value & (2**64 - 1), at
        shift += 7
    raise ValueError("ends within a number" if at >= len(data) else "has a number of over 64 bits")


def messages(data: bytes) -> Iterator[bytes]:
    """Yield the messages of a file.

    Raises:
        ValueError: when it ends within one.
    """
    at = 0
    while at < len(data):
        length, at = read_varint(data, at)
        if at + length > len(data):
            raise ValueError("ends within a message")
        yield data[at : at + length]
        at += length


def fields(message: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """Yield the number and value of each field of a message.

    Raises:
        ValueError: when it is no message.
    """
    at = 0
    while at < len(message):
        key, at = read_varint(message, at)
        kind = key & 7
        value: int | float | bytes
        if kind == VARINT:
            value, at = read_varint(message, at)
        elif kind == TEXT:
            length, at = read_varint(message, at)
            value, at = message[at : at + length], at + length
        elif kind in (FIXED64, FIXED32):
            width = 8 if kind == FIXED64 else 4
            if at + width > len(message):
                raise ValueError("ends within a number")
            value = struct.unpack_from("<d" if width == 8 else "<f", message, at)[0]
            at += width
        else:
            raise ValueError(f"has a field of wire type {kind}, which protobuf does not use here")
        if at > len(message):
            raise ValueError("ends within a field")
        yield key >> 3, value


def whole_numbers(value: int | float | bytes) -> list[int]:
    """Return the numbers of a repeated field, packed into a text or single."""
    if isinstance(value, int):
        return [value]
    out, at = [], 0
    assert isinstance(value, bytes)  # no field of ours repeats fixed numbers
    while at < len(value):
        one, at = read_varint(value, at)
        out.append(one)
    return out


def signed(value: int) -> int:
    """Return a varint as the int64 that it stands for."""
    return value - 2**64 if value >= 2**63 else value
