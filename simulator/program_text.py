"""The text form of a Program, one line for each thing in it; it parses back to an equal one.

    program ranks=2 ops=3
    stream 0 compute
    stream 1 "send F +1"
    cost 0 work "layer F" alloc=4096
      kernel fc1 flops=2048 bytes=512 dtype=bf16 matmul=1x8x8x16
    cost 1 flow send_recv bytes=4096
    group 0 0,1
    joint 0 group=0
    desk 0 servers=2
    static 0 1000000
    static 1 1000000
    op 0 rank=0 compute     0F0      layer=0 step=0 cost=0  # "layer F"
    op 1 rank=0 "send F +1" 0SEND_F0 step=0 cost=1 @0 after=0  # send_recv
    op 2 rank=1 -           1RECV_F0 step=0 cost=1 @0  # send_recv
    end

A tiled program is written without its tiling, a line for every op. What is absent (a layer, a
stage, predecessors, a ``desk=0`` that an op queues at) is left out; an absent stream is ``-``.
Memory is given as activations,transients,gathered,unreduced,holes, without zeros at the end. Names
that are not plain words are quoted as in JSON. Blank lines and ``#`` comments mean nothing.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from simulator.errors import ProgramError, suggestion
from simulator.program import (
    ACTION_CODE,
    ACTIONS,
    NONE,
    Cost,
    Flow,
    Groups,
    Int64,
    Kernel,
    Memory,
    Program,
    Work,
)

_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
_TOKEN = re.compile(r'#.*|((?:[^\s"#]|"(?:[^"\\]|\\.)*")+)|(\S)')
_ACTION = re.compile(rf"([0-9]*)({'|'.join(sorted(ACTIONS, key=len, reverse=True))})([0-9]*)")
_COLUMNS = (
    "rank", "stream", "action", "stage", "microbatch", "layer", "step", "cost", "joint", "slot",
)  # fmt: skip
_DTYPES = {"action": np.int8, "stream": np.int16}
_INT32_END = 2**31


def format_program(program: Program) -> str:
    """Return the text of a program, which `parse_program` reads back."""
    program = program.flat
    streams = [_quote(name) for name in program.streams]
    lines = [f"program ranks={program.num_ranks} ops={len(program)}"]
    lines += [f"stream {number} {name}" for number, name in enumerate(streams)]
    for number, cost in enumerate(program.costs):
        lines += _cost_lines(number, cost)
    for number in range(len(program.groups)):
        lines.append(f"group {number} {_join(program.groups[number].tolist())}".rstrip())
    lines += [
        f"joint {number} group={group}" for number, group in enumerate(program.joint_group.tolist())
    ]
    lines += [f"desk {number} servers={count}" for number, count in enumerate(program.servers)]
    lines += [
        f"static {rank} {_real(size)}" for rank, size in enumerate(program.static_bytes.tolist())
    ]
    return "\n".join([*lines, *_op_lines(program, streams), "end", ""])


def _cost_lines(number: int, cost: Cost) -> list[str]:
    seconds = "" if cost.seconds is None else f" seconds={_real(cost.seconds)}"
    alloc, free = _memory("alloc", cost.alloc), _memory("free", cost.free)
    if isinstance(cost, Flow):
        size = f"bytes={_real(cost.bytes)}{seconds}{_times(cost.count)}"
        servers = f" servers={cost.servers}" if cost.servers else ""
        storage = f" storage={_quote(cost.storage)}" if cost.storage else ""
        return [f"cost {number} flow {_quote(cost.name)} {size}{servers}{alloc}{free}{storage}"]
    return [f"cost {number} work {_quote(cost.name)}{seconds}{alloc}{free}"] + [
        f"  kernel {_quote(k.name)} flops={_real(k.flops)} bytes={_real(k.bytes)} "
        f"dtype={_quote(k.dtype)}"
        + (f" matmul={'x'.join(map(str, k.matmul))}" if k.matmul is not None else "")
        + _times(k.count)
        + (f" algorithm={_quote(k.algorithm)}" if k.algorithm else "")
        for k in cost.kernels
    ]


def _memory(name: str, size: Memory) -> str:
    """Return bytes by what they hold, in the order of `Memory`, without zeros at the end."""
    sizes = list(map(_real, size))
    while sizes and sizes[-1] == "0":
        sizes.pop()
    return f" {name}={','.join(sizes)}" if sizes else ""


def _times(count: int) -> str:
    return "" if count == 1 else f" count={count}"


def _op_lines(program: Program, streams: list[str]) -> list[str]:
    columns = [getattr(program, name).tolist() or [NONE] * len(program) for name in _COLUMNS]
    offset, preds = program.pred_offset.tolist(), program.preds.tolist()
    width = max(map(len, streams), default=1)
    lanes = [name.ljust(width) for name in (*streams, "-")]  # NONE is -1, the last one
    names = [_quote(cost.name) for cost in program.costs]
    return [
        f"op {op} rank={rank} {lanes[stream]} "
        f"{_absent('', stage) + ACTIONS[action] + _absent('', microbatch):<8}"
        f"{_absent(' layer=', layer)} step={step} cost={cost}{_absent(' @', joint)}"
        f"{_absent(' desk=', slot)}"
        f"{' after=' if offset[op] < offset[op + 1] else ''}"
        f"{_join(preds[offset[op] : offset[op + 1]])}  # {names[cost]}"
        for op, (
            rank,
            stream,
            action,
            stage,
            microbatch,
            layer,
            step,
            cost,
            joint,
            slot,
        ) in enumerate(zip(*columns, strict=True))
    ]


def _absent(before: str, value: int) -> str:
    return "" if value == NONE else f"{before}{value}"


def _join(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))


def _real(value: float) -> str:
    return repr(float(value)).removesuffix(".0")


def _quote(name: str) -> str:
    return name if _WORD.fullmatch(name) else json.dumps(name)


@dataclass
class _Draft:
    """What has been read so far; helpers raise ValueError, to which the line number is added."""

    line: int = 0
    num_ranks: int = NONE
    num_ops: int = 0
    ended: bool = False
    streams: dict[str, int] = field(default_factory=dict)
    costs: list[Cost] = field(default_factory=list)
    groups: list[list[int]] = field(default_factory=list)
    joint_group: list[int] = field(default_factory=list)
    servers: list[int] = field(default_factory=list)
    static: list[float] = field(default_factory=list)
    ops: list[tuple[int, ...]] = field(default_factory=list)
    preds: list[list[int]] = field(default_factory=list)


def parse_program(text: str) -> Program:
    """Return the program that `format_program` writes as `text`, before any check of its meaning.

    Raises:
        ProgramError: when the text is no program; it names the line and what is wrong there.
    """
    draft = _Draft()
    try:
        for draft.line, line in enumerate(text.split("\n"), 1):
            if words := _words(line):
                _read(draft, words)
        if not draft.ended:
            done = (
                f"after {len(draft.ops)} of {draft.num_ops} ops, " if draft.num_ranks >= 0 else ""
            )
            raise ValueError(f"the text stops {done}before its line 'end'")
    except ValueError as error:
        raise ProgramError(f"line {draft.line}: {error}") from None
    return _program(draft)


def _program(draft: _Draft) -> Program:
    columns = list(zip(*draft.ops, strict=True)) or [()] * len(_COLUMNS)
    arrays: dict[str, Any] = {
        name: np.array(column, _DTYPES.get(name, np.int32))
        for name, column in zip(_COLUMNS, columns, strict=True)
    }
    if not draft.servers:
        arrays["slot"] = np.zeros(0, np.int32)
    return Program(
        **arrays,
        servers=tuple(draft.servers),
        pred_offset=_offsets(draft.preds),
        preds=np.array([pred for preds in draft.preds for pred in preds], np.int32),
        joint_group=np.array(draft.joint_group, np.int32),
        groups=Groups(
            _offsets(draft.groups), np.array([r for ranks in draft.groups for r in ranks], np.int32)
        ),
        costs=tuple(draft.costs),
        streams=tuple(draft.streams),
        num_ranks=draft.num_ranks,
        static_bytes=np.array(draft.static, np.float64),
    )


def _offsets(rows: list[list[int]]) -> Int64:
    return np.cumsum([0, *map(len, rows)], dtype=np.int64)


def _words(line: str) -> list[str]:
    """Return the words of a line, quotes kept, without its comment."""
    if '"' not in line:
        return line.partition("#")[0].split()
    found = _TOKEN.findall(line)
    if any(stray for _, stray in found):
        raise ValueError("a quoted name has no end")
    return [word for word, _ in found if word]


def _read(draft: _Draft, words: list[str]) -> None:
    keyword = words[0]
    if keyword not in _READERS:
        raise ValueError(f"unknown keyword {keyword!r}{suggestion(keyword, _READERS)}")
    if draft.ended:
        raise ValueError(f"{keyword!r} stands after the line 'end'")
    if (keyword == "program") != (draft.num_ranks == NONE):
        raise ValueError("the one line such as 'program ranks=4 ops=120' must come first")
    _READERS[keyword](draft, words[1:])


def _read_program(draft: _Draft, words: list[str]) -> None:
    fields = _fields(words, "the program", required=("ranks", "ops"))
    draft.num_ops = _whole(fields["ops"], "number of ops", _INT32_END)
    draft.num_ranks = _whole(fields["ranks"], "number of ranks", _INT32_END)


def _read_stream(draft: _Draft, words: list[str]) -> None:
    name = _unquote(_at(_numbered(words, "stream", len(draft.streams)), 0, "name", "a stream"))
    _none_left(words[2:], "a stream")
    if name in draft.streams:
        raise ValueError(f"stream {name!r} is there twice")
    draft.streams[name] = len(draft.streams)


def _read_cost(draft: _Draft, words: list[str]) -> None:
    words = _numbered(words, "cost", len(draft.costs))
    kind = _at(words, 0, "kind", "a cost")
    name = _unquote(_at(words, 1, "name", "a cost"))
    if kind == "flow":
        known = ("seconds", "count", "servers", "alloc", "free", "storage")
        fields = _fields(words[2:], "a flow", required=("bytes",), optional=known)
        size, seconds, count = _number(fields, "bytes"), _seconds(fields), _count(fields)
        servers = _whole(fields.get("servers", "0"), "number of servers", _INT32_END)
        alloc, free = _sizes(fields, "alloc"), _sizes(fields, "free")
        storage = _unquote(fields.get("storage", ""))
        draft.costs.append(Flow(name, size, seconds, count, servers, alloc, free, storage))
    elif kind == "work":
        fields = _fields(words[2:], "a work", optional=("seconds", "alloc", "free"))
        alloc, free = _sizes(fields, "alloc"), _sizes(fields, "free")
        draft.costs.append(Work(name, (), _seconds(fields), alloc, free))
    else:
        raise ValueError(f"cost kind {kind!r} is not one of work, flow")


def _read_kernel(draft: _Draft, words: list[str]) -> None:
    if not draft.costs or not isinstance(cost := draft.costs[-1], Work):
        raise ValueError("a kernel must follow the work that it is part of")
    name = _unquote(_at(words, 0, "name", "a kernel"))
    required = ("flops", "bytes", "dtype")
    optional = ("matmul", "count", "algorithm")
    fields = _fields(words[1:], "a kernel", required=required, optional=optional)
    shape = None
    if "matmul" in fields:
        sizes = [_whole(n, "size in matmul", 10**18) for n in fields["matmul"].split("x")]
        if len(sizes) != 4:
            raise ValueError(f"matmul {fields['matmul']!r} is not of the form BATCHxMxNxK")
        shape = (sizes[0], sizes[1], sizes[2], sizes[3])
    flops, size = _number(fields, "flops"), _number(fields, "bytes")
    algorithm, dtype = _unquote(fields.get("algorithm", "")), _unquote(fields["dtype"])
    kernel = Kernel(name, flops, size, dtype, shape, _count(fields), algorithm)
    draft.costs[-1] = replace(cost, kernels=(*cost.kernels, kernel))


def _read_group(draft: _Draft, words: list[str]) -> None:
    words = _numbered(words, "group", len(draft.groups))
    _none_left(words[1:], "a group")
    draft.groups.append(_list(words[0], "rank", draft.num_ranks) if words else [])


def _read_joint(draft: _Draft, words: list[str]) -> None:
    words = _numbered(words, "joint", len(draft.joint_group))
    fields = _fields(words, "a joint op", required=("group",))
    draft.joint_group.append(_whole(fields["group"], "group", len(draft.groups)))


def _read_desk(draft: _Draft, words: list[str]) -> None:
    words = _numbered(words, "desk", len(draft.servers))
    fields = _fields(words, "a desk", required=("servers",))
    draft.servers.append(_whole(fields["servers"], "number of servers", _INT32_END))


def _read_static(draft: _Draft, words: list[str]) -> None:
    words = _numbered(words, "static", len(draft.static))
    _whole(str(len(draft.static)), "rank", draft.num_ranks)
    draft.static.append(_number({"bytes": _at(words, 0, "bytes", "a static")}, "bytes"))
    _none_left(words[1:], "a static")


def _read_op(draft: _Draft, words: list[str]) -> None:
    _whole(str(len(draft.ops)), "op", draft.num_ops)
    words = _numbered(words, "op", len(draft.ops))
    lane = _at(words, 1, "stream", "an op")
    stream = NONE if lane == "-" else draft.streams.get(_unquote(lane))
    if stream is None:
        name = _unquote(lane)
        raise ValueError(f"unknown stream {name!r}{suggestion(name, draft.streams)}")
    label = _at(words, 2, "action", "an op")
    action = _ACTION.fullmatch(label)
    if action is None:
        raise ValueError(f"{label!r} is not an action; write for example 3F0 or 1SEND_F2")
    rest = [f"joint={w[1:]}" if w[0] == "@" else w for w in words[3:]]
    fields = _fields([words[0], *rest], "an op", required=("rank", "step", "cost"),
                     optional=("layer", "joint", "after", "desk"))  # fmt: skip
    draft.ops.append(
        (
            _whole(fields["rank"], "rank", draft.num_ranks),
            stream,
            ACTION_CODE[action[2]],
            _whole(action[1], "stage", _INT32_END) if action[1] else NONE,
            _whole(action[3], "microbatch", _INT32_END) if action[3] else NONE,
            _whole(fields["layer"], "layer", _INT32_END) if "layer" in fields else NONE,
            _whole(fields["step"], "step", _INT32_END),
            _whole(fields["cost"], "cost", len(draft.costs)),
            _whole(fields["joint"], "joint", len(draft.joint_group)) if "joint" in fields else NONE,
            _whole(fields["desk"], "desk", len(draft.servers)) if "desk" in fields else NONE,
        )
    )
    after = fields.get("after")
    draft.preds.append([] if after is None else _list(after, "predecessor", draft.num_ops))


def _read_end(draft: _Draft, words: list[str]) -> None:
    _none_left(words, "the end")
    if len(draft.ops) != draft.num_ops:
        raise ValueError(f"the end comes after {len(draft.ops)} of {draft.num_ops} ops")
    if len(draft.static) not in (0, draft.num_ranks):
        raise ValueError(
            f"static bytes are given for {len(draft.static)} of {draft.num_ranks} ranks"
        )
    draft.ended = True


_READERS: dict[str, Callable[[_Draft, list[str]], None]] = {
    "program": _read_program,
    "stream": _read_stream,
    "cost": _read_cost,
    "kernel": _read_kernel,
    "group": _read_group,
    "joint": _read_joint,
    "desk": _read_desk,
    "static": _read_static,
    "op": _read_op,
    "end": _read_end,
}


def _numbered(words: list[str], keyword: str, expected: int) -> list[str]:
    """Return the words after a number, which must be the next in order."""
    number = _at(words, 0, "number", f"a line {keyword!r}")
    if number != str(expected):
        raise ValueError(f"{keyword} {number} stands where {keyword} {expected} should")
    return words[1:]


def _at(words: list[str], index: int, what: str, owner: str) -> str:
    if index >= len(words):
        raise ValueError(f"{owner} lacks its {what}")
    return words[index]


def _none_left(words: list[str], owner: str) -> None:
    if words:
        raise ValueError(f"{owner} has no place for {words[0]!r}")


def _fields(
    words: list[str], owner: str, *, required: tuple[str, ...] = (), optional: tuple[str, ...] = ()
) -> dict[str, str]:
    """Return the values of words ``key=value`` by key, each at most once."""
    fields: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in required + optional:
            _none_left([word], owner)
        if key in fields:
            raise ValueError(f"{owner} has its {key} twice")
        fields[key] = value
    for key in required:
        if key not in fields:
            raise ValueError(f"{owner} lacks its {key}")
    return fields


def _whole(text: str, what: str, end: int) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{what} {text!r} is not a whole number")
    if len(text) > 19 or int(text) >= end:
        known = f"lies outside 0..{end - 1}" if end > 0 else "does not exist: there are none"
        raise ValueError(f"{what} {text} {known}")
    return int(text)


def _list(text: str, what: str, end: int) -> list[int]:
    return [_whole(number, what, end) for number in text.split(",")]


def _number(fields: dict[str, str], key: str) -> float:
    value = _finite(fields.get(key, "0"), key)
    if value < 0:
        raise ValueError(f"{key} {fields[key]} is not finite and at least 0")
    return value


def _finite(text: str, key: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{key} {text!r} is not a number") from None
    if not math.isfinite(value):
        raise ValueError(f"{key} {text} is not finite and at least 0")
    return value


def _sizes(fields: dict[str, str], key: str) -> Memory:
    """Return bytes by what they hold; parts that are not there are zero."""
    parts = fields.get(key, "0").split(",")
    if len(parts) > len(Memory._fields):
        raise ValueError(f"{key} {fields[key]} has more parts than {', '.join(Memory._fields)}")
    sizes = Memory(*(_finite(part, key) for part in parts))
    if round(sizes.total) < 0:  # what is joined may be rounded below
        raise ValueError(f"{key} {fields[key]} is not finite and at least 0")
    return sizes


def _count(fields: dict[str, str]) -> int:
    return _whole(fields.get("count", "1"), "count", _INT32_END)


def _seconds(fields: dict[str, str]) -> float | None:
    return _number(fields, "seconds") if "seconds" in fields else None


def _unquote(word: str) -> str:
    if not word.startswith('"'):
        return word
    try:
        return str(json.loads(word))
    except json.JSONDecodeError:
        raise ValueError(f"{word} is not a name in quotes") from None
