"""Chakra execution traces as a program.

A collective is one of the n-th calls of a group on each of its ranks; a message is the n-th send
and the n-th receive of (source, destination, tag). Nodes of a rank are put in an order in which
they can run, by id where several can; what computes runs one after the other in that order, and so
do calls of a group.
"""

from __future__ import annotations

import gzip
import heapq
import json
import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from simulator.errors import DescriptionError
from simulator.exchange.chakra.nodes import (
    COLLECTIVE,
    COLLECTIVES,
    COMPUTE,
    METADATA,
    NODE_TYPES,
    RECV,
    SEND,
    Node,
    decode_file,
)
from simulator.exchange.chakra.written import LABELS
from simulator.program import ACTION_CODE, NONE, Cost, Flow, Groups, Kernel, Program, Work

_RANK = re.compile(r"\.(\d+)\.et(?:\.gz)?$")

MICROSECOND = 1e-6


class Labels(NamedTuple):
    """What a node says of itself beyond Chakra, or what its name lets guess."""

    action: str
    stage: int
    microbatch: int
    layer: int
    step: int
    stream: str
    """Empty where nothing says."""


@dataclass(frozen=True, eq=False)
class Traces:
    """A program out of traces."""

    program: Program
    name: str
    notes: tuple[str, ...]
    """What was guessed or joined, a sentence each."""


def read_chakra(
    paths: str | Path | Sequence[str | Path], *, priced: bool = False, precision: str = "bf16"
) -> Traces:
    """Return the program that execution traces describe.

    Args:
        paths: a prefix, as in ``PREFIX.0.et``, or the files of all ranks.
        priced: whether a cluster will price communication, and work that states operations and
            bytes but no duration; else every node must state its duration.
        precision: of work that states operations.

    Raises:
        DescriptionError: when a file is missing, cut short or of another schema, a node is of a
            kind that is not modelled, or what ranks send and receive does not fit.
    """
    files, prefix = _files([paths] if isinstance(paths, str | Path) else paths)
    ranks = [_ordered(path, _read(path)) for path in files]
    groups = _group_table(prefix)
    return _Builder(files, groups, priced, precision).build(ranks, f"Chakra traces {prefix.name}")


def _files(paths: Sequence[str | Path]) -> tuple[list[Path], Path]:
    """Return the files in the order of their ranks, and the prefix of their names.

    Raises:
        DescriptionError: when ranks are missing or there twice.
    """
    found: list[Path] = []
    for text in paths:
        path = Path(text)
        some = [path] if path.is_file() else sorted(
            p for p in path.parent.glob(f"{path.name}.*")
            if _RANK.fullmatch(p.name.removeprefix(path.name))
        )  # fmt: skip
        if not some:
            raise DescriptionError(f"there is no file {str(path)!r}, and none {path.name}.RANK.et")
        found += some
    ranks: dict[int, Path] = {}
    for path in found:
        match = _RANK.search(path.name)
        if match is None:
            raise DescriptionError(f"{str(path)!r} does not say its rank; name it PREFIX.RANK.et")
        if int(match[1]) in ranks:
            raise DescriptionError(
                f"{str(ranks[int(match[1])])!r} and {str(path)!r} are both of rank {match[1]}"
            )
        ranks[int(match[1])] = path
    missing = sorted(set(range(max(ranks) + 1)) - set(ranks))
    if missing:
        raise DescriptionError(
            f"there are traces of {len(ranks)} ranks up to {max(ranks)}, but none of "
            f"{', '.join(map(str, missing[:8]))}: a program needs all of them"
        )
    first = ranks[0]
    return [ranks[r] for r in sorted(ranks)], first.with_name(_RANK.sub("", first.name))


def _read(path: Path) -> list[Node]:
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        nodes = decode_file(data)
    except OSError as error:
        reason = error.strerror or "it does not unpack as gzip"
        raise DescriptionError(f"{str(path)!r} cannot be read ({reason})") from None
    except (ValueError, EOFError, zlib.error) as error:
        raise DescriptionError(
            f"{str(path)!r} is cut short or no Chakra execution trace: it {error}"
        ) from None
    return nodes


def _group_table(prefix: Path) -> dict[str, tuple[int, ...]]:
    """Return the ranks of groups, where a file beside the traces has them."""
    path = prefix.with_name(f"{prefix.name}.comm_groups.json")
    if not path.exists():
        return {}
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): tuple(int(r) for r in ranks) for name, ranks in table.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        raise DescriptionError(
            f'{str(path)!r} is no table of groups such as {{"0": [0, 1]}}'
        ) from None


def _ordered(path: Path, nodes: list[Node]) -> list[Node]:
    """Return nodes in an order in which they can run, the lowest id first of several.

    Raises:
        DescriptionError: when ids are there twice, or nodes wait for each other.
    """
    by_id = {node.id: node for node in nodes}
    if len(by_id) < len(nodes):
        twice = Counter(n.id for n in nodes).most_common(1)[0][0]
        raise DescriptionError(f"{str(path)!r} has two nodes with id {twice}")
    waits = {n.id: len([d for d in n.deps if d in by_id]) for n in nodes}
    users: dict[int, list[int]] = {}
    for node in nodes:
        for dep in node.deps:
            users.setdefault(dep, []).append(node.id)
    ready = [i for i, count in waits.items() if not count]
    heapq.heapify(ready)
    out = []
    while ready:
        out.append(by_id[heapq.heappop(ready)])
        for user in users.get(out[-1].id, ()):
            waits[user] -= 1
            if not waits[user]:
                heapq.heappush(ready, user)
    if len(out) < len(nodes):
        stuck = next(n for n in nodes if waits[n.id])
        raise DescriptionError(
            f"{str(path)!r}: {len(nodes) - len(out)} nodes wait for each other in a cycle, among "
            f"them {stuck.id} ({stuck.name})"
        )
    return out


class _Builder:
    """Rows of a program as nodes are gone through."""

    def __init__(
        self, files: Sequence[Path], groups: Mapping[str, tuple[int, ...]], priced: bool,
        precision: str,
    ) -> None:  # fmt: skip
        self.files, self.groups = files, groups
        self.priced, self.precision = priced, precision
        self.every = tuple(range(len(files)))
        self.costs: dict[Cost, int] = {}
        self.joints: dict[tuple[object, ...], int] = {}
        self.joint_ranks: list[tuple[int, ...]] = []
        self.sizes: dict[int, tuple[float, str]] = {}
        self.streams: dict[str, int] = {"compute": 0}
        self.rows: list[tuple[int, ...]] = []
        self.deps: list[list[int]] = []
        self.notes: dict[str, None] = {}

    def build(self, ranks: Sequence[list[Node]], name: str) -> Traces:
        for rank, nodes in enumerate(ranks):
            row_of: dict[int, int] = {}
            counts: Counter[object] = Counter()
            for node in nodes:
                row_of[node.id] = len(self.rows)
                lost = [d for d in node.deps if d not in row_of]
                if lost:
                    self.notes["dependencies on nodes that no trace has are left out"] = None
                self.deps.append([row_of[d] for d in node.deps if d in row_of])
                self.rows.append(self._row(rank, node, counts))
        self._check_members()
        return Traces(self._program(), name, tuple(self.notes))

    def _fault(self, rank: int, node: Node, what: str) -> DescriptionError:
        return DescriptionError(f"{str(self.files[rank])!r} node {node.id} ({node.name}): {what}")

    def _row(self, rank: int, node: Node, counts: Counter[object]) -> tuple[int, ...]:
        """Return rank, stream, action, stage, microbatch, layer, step, cost and joint of a node."""
        labels = _labels(node)
        if labels.stream == "" and node.type != METADATA:
            self.notes["actions are guessed from the names of nodes, axes of groups are dp"] = None
        joint = NONE
        if node.type == METADATA:
            cost: Cost = Work(node.name, seconds=0.0)
            lane = "compute"
        elif node.type == COMPUTE:
            cost, lane = self._work(rank, node), "compute"
            if node.attrs.get("is_cpu_op", True):
                lane = "cpu"
        elif node.type == COLLECTIVE:
            cost, joint, lane = self._collective(rank, node, counts)
        elif node.type in (SEND, RECV):
            cost, joint, lane = self._message(rank, node, counts)
        else:
            raise self._fault(rank, node, f"a {NODE_TYPES[node.type]} node is not modelled")
        stream = NONE
        if labels.stream != "-":  # what no stream orders
            stream = self.streams.setdefault(labels.stream or lane, len(self.streams))
        number = self.costs.setdefault(cost, len(self.costs))
        return (rank, stream, ACTION_CODE[labels.action], *labels[1:5], number, joint)

    def _work(self, rank: int, node: Node) -> Work:
        flops, size = (float(node.attrs.get(k, 0) or 0) for k in ("num_ops", "tensor_size"))
        if node.duration_us or not (flops or size):
            return Work(node.name, seconds=node.duration_us * MICROSECOND)
        if LABELS in node.attrs:  # shorter than half a microsecond
            return Work(node.name, seconds=0.0)
        if not self.priced:
            raise self._fault(
                rank, node, "it states operations and bytes but no duration; give --cluster"
            )
        self.notes[
            f"work without a duration is priced by its operations in {self.precision} and its bytes"
        ] = None
        return Work(node.name, (Kernel(node.name, flops, size, self.precision),))

    def _collective(
        self, rank: int, node: Node, counts: Counter[object]
    ) -> tuple[Flow, int, str]:  # fmt: skip
        kind = node.attrs.get("comm_type")
        if not isinstance(kind, int) or not 0 <= kind < len(COLLECTIVES):
            raise self._fault(rank, node, f"comm_type {kind!r} is none of 0 to 9")
        name = COLLECTIVES[kind].removesuffix("_block")
        group = str(node.attrs.get("pg_name", ""))
        ranks = self.groups.get(group, self.every)
        if group and group not in self.groups:
            self.notes[f"group {group!r} has no list of ranks and is taken to be all"] = None
        if rank not in ranks:
            raise self._fault(rank, node, f"rank {rank} is not in group {group!r}, {list(ranks)}")
        share = self._size(rank, node)
        size = share * len(ranks) if name == "all_gather" else share
        key = ("group", group, counts["group", group])
        counts["group", group] += 1
        joint = self._joint(key, ranks)
        self._agree(rank, node, joint, size, name)
        return self._flow(rank, node, name, size), joint, f"dp {group}".rstrip()

    def _message(self, rank: int, node: Node, counts: Counter[object]) -> tuple[Flow, int, str]:
        ends = [node.attrs.get(key) for key in ("comm_src", "comm_dst")]
        tag = node.attrs.get("comm_tag", 0)
        if not all(isinstance(e, int) and 0 <= e < len(self.files) for e in ends):
            raise self._fault(rank, node, f"comm_src and comm_dst {ends} are not two of the ranks")
        source, target = (int(e) for e in ends if isinstance(e, int))
        sends = node.type == SEND
        peer = target if sends else source
        key = ("message", source, target, tag)
        number = counts[key, sends]
        counts[key, sends] += 1
        joint = self._joint((*key, number), tuple(sorted((source, target))))
        size = self._size(rank, node)
        self._agree(rank, node, joint, size, "message")
        lane = f"{'send' if sends else 'recv'} {peer}"
        return self._flow(rank, node, "send_recv", size), joint, lane

    def _size(self, rank: int, node: Node) -> float:
        size = node.attrs.get("comm_size")
        if isinstance(size, str | bool) or size is None or size < 0:
            raise self._fault(rank, node, f"comm_size {size!r} is no number of bytes")
        return float(size)

    def _flow(self, rank: int, node: Node, name: str, size: float) -> Flow:
        if self.priced:
            return Flow(name, size)
        if not node.duration_us and LABELS not in node.attrs:
            raise self._fault(rank, node, "communication states no duration; give --cluster")
        return Flow(name, size, seconds=node.duration_us * MICROSECOND)

    def _joint(self, key: tuple[object, ...], ranks: tuple[int, ...]) -> int:
        joint = self.joints.setdefault(key, len(self.joints))
        if joint == len(self.joint_ranks):
            self.joint_ranks.append(ranks)
        return joint

    def _agree(self, rank: int, node: Node, joint: int, size: float, what: str) -> None:
        """Check that all members of a joint op move the same."""
        first = self.sizes.setdefault(joint, (size, f"{what} of {size:.0f} bytes on rank {rank}"))
        if first[0] != size or not first[1].startswith(f"{what} "):
            raise self._fault(
                rank, node, f"a {what} of {size:.0f} bytes meets a {first[1]}; a peer would hang"
            )

    def _check_members(self) -> None:
        """Check that every joint op has a member on each of its ranks."""
        there: dict[int, set[int]] = {}
        for row in self.rows:
            there.setdefault(row[-1], set()).add(row[0])
        for key, joint in self.joints.items():
            absent = set(self.joint_ranks[joint]) - there[joint]
            if absent:
                raise DescriptionError(
                    f"{' '.join(map(str, key[:-1]))}, call {key[-1]}: rank {min(absent)} has no "
                    f"node of it, but rank {min(there[joint])} has"
                )

    def _program(self) -> Program:
        columns = np.array(self.rows, np.int64).reshape(-1, 9).T
        sets = {ranks: i for i, ranks in enumerate(dict.fromkeys(self.joint_ranks))}
        return Program(
            rank=columns[0].astype(np.int32),
            stream=columns[1].astype(np.int16),
            action=columns[2].astype(np.int8),
            stage=columns[3].astype(np.int32),
            microbatch=columns[4].astype(np.int32),
            layer=columns[5].astype(np.int32),
            step=columns[6].astype(np.int32),
            cost=columns[7].astype(np.int32),
            joint=columns[8].astype(np.int32),
            pred_offset=np.cumsum([0, *map(len, self.deps)]).astype(np.int64),
            preds=np.array([d for some in self.deps for d in some], np.int32),
            joint_group=np.array([sets[ranks] for ranks in self.joint_ranks], np.int32),
            groups=Groups(
                np.cumsum([0, *map(len, sets)]).astype(np.int64),
                np.array([r for ranks in sets for r in ranks], np.int32),
            ),
            costs=tuple(self.costs),
            streams=tuple(self.streams),
            num_ranks=len(self.files),
        )


_GUESSES = (("OPT", r"optim|adam|sgd|update"), ("B", r"back|grad|bwd"))


_SAID = re.compile(r"(\w+) (-?\d{1,9}) (-?\d{1,9}) (-?\d{1,9}) (\d{1,9}) (\S.*)")


def _labels(node: Node) -> Labels:
    said = _SAID.fullmatch(str(node.attrs.get(LABELS, "")))
    if said and said[1] in ACTION_CODE:
        return Labels(said[1], int(said[2]), int(said[3]), int(said[4]), int(said[5]), said[6])
    low = node.name.lower()
    action = next((a for a, pattern in _GUESSES if re.search(pattern, low)), "F")
    return Labels(action, NONE, NONE, NONE, 0, "")
