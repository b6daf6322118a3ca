"""Nodes of MLCommons Chakra execution traces, schema 0.0.4 (et_def.proto of mlc-chakra 1.0.0)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from simulator.wire import (
    fields,
    framed,
    messages,
    number,
    signed,
    text,
    varint,
    whole_numbers,
)

VERSION = "0.0.4"

VERSIONS = (VERSION, "1.0.0")
"""Versions that are read; mlc-chakra 1.0.0 writes either, with the same messages."""

INVALID, METADATA, LOAD, STORE, COMPUTE, SEND, RECV, COLLECTIVE = range(8)
NODE_TYPES = ("invalid", "metadata", "memory load", "memory store", "computation", "send", "recv",
              "collective")  # fmt: skip

COLLECTIVES = (
    "all_reduce", "reduce", "all_gather", "gather", "scatter", "broadcast", "all_to_all",
    "reduce_scatter", "reduce_scatter_block", "barrier",
)  # fmt: skip
"""Types of collectives by their number."""

Value: TypeAlias = bool | int | float | str

_INT64, _UINT64, _BOOL, _STRING = 9, 13, 27, 29
UNSIGNED = ("tensor_size",)
"""Attributes that Chakra's own generator writes as uint64; other whole numbers are int64."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the graph of one rank."""

    id: int
    name: str
    type: int
    deps: tuple[int, ...] = ()
    """Ids of nodes that must end before; control and data dependencies together."""
    duration_us: int = 0
    attrs: Mapping[str, Value] = field(default_factory=dict)


def attribute(name: str, value: Value) -> bytes:
    """Return the message of an attribute."""
    if isinstance(value, bool):
        encoded = number(_BOOL, value)
    elif isinstance(value, int):
        encoded = number(_UINT64 if name in UNSIGNED else _INT64, value)
    else:
        encoded = text(_STRING, str(value).encode())
    return text(1, name.encode()) + encoded


def encode(node: Node) -> bytes:
    """Return the message of a node; dependencies are data dependencies, which all feeders read."""
    out = [number(1, node.id), text(2, node.name.encode()), number(3, node.type)]
    if node.deps:
        out.append(text(5, b"".join(map(varint, node.deps))))
    if node.duration_us:
        out.append(number(7, node.duration_us))
    out += [text(10, attribute(name, value)) for name, value in node.attrs.items()]
    return b"".join(out)


def encode_file(nodes: Iterable[Node]) -> Iterator[bytes]:
    """Yield the pieces of a file: what it is, then its nodes."""
    yield framed(text(1, VERSION.encode()))
    for node in nodes:
        yield framed(encode(node))


def decode_file(data: bytes) -> list[Node]:
    """Return the nodes of a file.

    Raises:
        ValueError: when it is no trace of schema 0.0.4, or is cut short.
    """
    parts = messages(data)
    said = next((value for key, value in fields(next(parts, b"")) if key == 1), b"")
    version = said.decode("utf-8", "replace") if isinstance(said, bytes) else ""
    if version not in VERSIONS:
        raise ValueError(f"states schema {version!r}, not {' or '.join(map(repr, VERSIONS))}")
    return [decode(part) for part in parts]


def decode(message: bytes) -> Node:
    """Return a node.

    Raises:
        ValueError: when a field is not what the schema says.
    """
    numbers = {1: 0, 3: 0, 7: 0}
    name, deps, attrs = "", [], dict[str, Value]()
    for key, value in fields(message):
        if key in numbers:
            if not isinstance(value, int):
                raise ValueError(f"has a node whose field {key} is no number")
            numbers[key] = value
        elif key in (4, 5) and not isinstance(value, float):
            deps += whole_numbers(value)
        elif key == 2 and isinstance(value, bytes):
            name = value.decode("utf-8", "replace")
        elif key == 10 and isinstance(value, bytes):
            attrs.update(_attribute(value))
    kind = numbers[3]
    if kind >= len(NODE_TYPES):
        raise ValueError(f"has a node of the unknown type {kind}")
    return Node(numbers[1], name, kind, tuple(dict.fromkeys(deps)), numbers[7], attrs)


def _attribute(message: bytes) -> dict[str, Value]:
    """Return the name and value of an attribute; one of a list is left out."""
    name, found = "", dict[int, int | float | bytes]()
    for key, value in fields(message):
        if key == 1 and isinstance(value, bytes):
            name = value.decode("utf-8", "replace")
        else:
            found[key] = value
    for key, value in found.items():
        if key in (3, 5) and isinstance(value, float):
            return {name: value}
        if key == _BOOL:
            return {name: bool(value)}
        if key in (7, _INT64, 11, _UINT64) and isinstance(value, int):
            return {name: value if key in (11, _UINT64) else signed(value)}
        if key == _STRING and isinstance(value, bytes):
            return {name: value.decode("utf-8", "replace")}
    return {}
