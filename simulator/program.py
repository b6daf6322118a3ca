"""The Program: every op of a run as columns, and the small nouns that its ops are made of.

An op is **work** (holds its stream for a time) or a **flow** (moves bytes between the ranks of a
group). What an op costs is described once in a cost table, whose entries thousands of ops share;
the hardware package turns entries into ticks. A flow is *joint*: each member rank has its own op,
all of them share a `joint` number, and they start together when the last member arrives. A
*one-sided* flow, to or from parameter servers, has an op on the first rank of its group only.

A program may be *tiled*: its columns then hold the ops of one tile (a pipeline replica), and a
`Tiling` says where the tiles lie and which of them meet in a joint op. Op `row x tiles + tile` of
the whole is row `row` of tile `tile`. A thousand replicas cost the memory of one.

An op may start when its predecessors have ended and when it is at the head of its stream; streams
are first-in-first-out by op id. Nothing else orders ops.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from simulator.budget import require
from simulator.kernels.order import order_units, successors

Int8: TypeAlias = npt.NDArray[np.int8]
Int16: TypeAlias = npt.NDArray[np.int16]
Int32: TypeAlias = npt.NDArray[np.int32]
Int64: TypeAlias = npt.NDArray[np.int64]

ACTIONS = (
    "F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "REDUCE_GRAD", "OPT",
)  # fmt: skip
"""Action kinds, spelled as torch.distributed.pipelining spells them; OPT is ours."""

ACTION_CODE = {name: code for code, name in enumerate(ACTIONS)}

NONE = -1
"""An absent stage, microbatch, layer, joint or stream."""


class Memory(NamedTuple):
    """Bytes of device memory by what they hold."""

    activations: float = 0.0
    """Kept from a forward to its backward."""
    transients: float = 0.0
    """Alive only while work runs: its outputs and gradients of activations, copies, workspaces."""
    gathered: float = 0.0
    """Weights in full, of which a rank holds a shard."""
    unreduced: float = 0.0
    """Gradients in full, of which a rank holds a shard."""
    holes: float = 0.0
    """What is free and stays reserved: too short for what comes next, with which most is."""

    @property
    def total(self) -> float:
        """All that is allocated."""
        return sum(self[: len(ALLOCATED)])


ALLOCATED = Memory._fields[:-1]
"""Parts that hold something."""


NOTHING = Memory()


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel of a device: what it computes and moves, not how long that takes."""

    name: str
    flops: float
    """Floating-point operations really executed (a multiply-add counts two)."""
    bytes: float
    """Bytes read and written in device memory."""
    dtype: str
    """Precision whose peak rate applies, a key of `Device.peak`, or one of `OFF_DEVICE`."""
    matmul: tuple[int, int, int, int] | None = None
    """(batch, m, n, k) of the kernel's matrix products; None where it has none."""
    count: int = 1
    """Times that it runs, one after the other."""
    algorithm: str = ""
    """`GROUPED`, or what a device states a rate for: a fused algorithm, a key of `Device.fused`, or
    a kind of kernel bound by memory, one of `MEMORY_KINDS`; empty where none is."""


GROUPED = "grouped"
"""Stands for the algorithm of products that are issued one for each expert: a batch of them."""

PRODUCTS = ("", GROUPED)
"""Algorithms of matrix products by themselves, a batch of them."""


OFF_DEVICE = ("copy", "host")
"""What stands for the precision of a copy to or from the host, and of an update in its memory."""


@dataclass(frozen=True, slots=True)
class Work:
    """Cost of an op that holds its stream: kernels one after the other, or a stated duration."""

    name: str
    kernels: tuple[Kernel, ...] = ()
    seconds: float | None = None
    """A stated (measured or idealised) duration; it overrides the kernels."""
    alloc: Memory = NOTHING
    """Device memory that comes alive when the op starts."""
    free: Memory = NOTHING
    """Device memory that is released when the op ends."""


@dataclass(frozen=True, slots=True)
class Flow:
    """Cost of a joint op: a collective or a point-to-point message within a group."""

    name: str
    """`all_reduce`, `send_recv`, ... as torch.distributed spells them."""
    bytes: float
    """Payload: the full buffer of one rank, as nccl-tests counts its size."""
    seconds: float | None = None
    """A stated duration; it overrides the network model."""
    count: int = 1
    """Times that it is done, one after the other."""
    servers: int = 0
    """Of `SERVED` flows: the lowest ranks of its group hold the sums, an equal part each."""
    alloc: Memory = NOTHING
    """Device memory of each member that comes alive when the flow starts."""
    free: Memory = NOTHING
    """Device memory of each member that is released when the flow ends."""
    storage: str = ""
    """Of `STORED` flows: from which of `Cluster.storage`, or to which; `count` requests."""


ONE_SIDED = ("push", "pull")
"""Flows of the first rank of their group: the others have no op in them and meet nobody."""

SERVED = ("push_pull", *ONE_SIDED)
"""Flows to and from parameter servers."""

STORED = ("read", "scattered_read", "write")
"""Flows between storage and the host of the first rank of their group."""

BESIDE = ("worker", "storage", "pin", "copy", "snapshot", "write", "restore")
"""First words of the names of streams on which hosts load data, write checkpoints and read them:
what they do there ahead of steps or beside them is no part of a step."""

Cost: TypeAlias = Work | Flow


@dataclass(frozen=True, slots=True)
class Groups:
    """Ordered sets of ranks in compressed rows: set g is ``ranks[offset[g]:offset[g + 1]]``."""

    offset: Int64
    ranks: Int32

    def __len__(self) -> int:
        return len(self.offset) - 1

    def __getitem__(self, group: int) -> Int32:
        return self.ranks[self.offset[group] : self.offset[group + 1]]


@dataclass(frozen=True, slots=True, eq=False)
class Tiling:
    """Where the tiles of a program lie, and which of them meet in a joint op."""

    axes: tuple[tuple[str, int], ...]
    """Mesh axes that the tiles are counted along, outermost first, with their degrees."""
    ranks: Int32
    """(ranks of a tile, tiles): the rank that each one is."""
    classes: Int32
    """(partitions, tiles): a joint op of a partition joins the tiles of one class."""

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Tiling)
            and self.axes == other.axes
            and np.array_equal(self.ranks, other.ranks)
            and np.array_equal(self.classes, other.classes)
        )

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """Ops as columns (one row an op), with their dependencies and costs.

    The order of rows within one (rank, stream) is the order of that stream. Without `tiling` a row
    is an op of the whole and its number the op's id.
    """

    rank: Int32
    """Rank, or with tiling the rank within the tile."""
    stream: Int16
    """Index into `streams`, or NONE for an op that no stream orders."""
    action: Int8
    """Index into `ACTIONS`: the phase that the op belongs to."""
    stage: Int32
    microbatch: Int32
    layer: Int32
    step: Int32
    cost: Int32
    """Index into `costs`."""
    joint: Int32
    """Number of the joint op that this op is a member of, or NONE."""
    pred_offset: Int64
    """Row i starts after ``preds[pred_offset[i]:pred_offset[i + 1]]`` have ended."""
    preds: Int32
    joint_group: Int32
    """Group of each joint op; with tiling that of class 0, whose next ones follow it."""
    groups: Groups
    costs: tuple[Cost, ...]
    streams: tuple[str, ...]
    num_ranks: int
    """Ranks of the whole."""
    static_bytes: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    """Device memory alive during the whole run, by rank; empty when it is not modelled."""
    slot: Int32 = field(default_factory=lambda: np.zeros(0, np.int32))
    """Desk whose servers an op queues for, or NONE; empty when no op does."""
    servers: tuple[int, ...] = ()
    """Servers of each desk; with tiling every tile has desks of its own."""
    tiling: Tiling | None = None
    joint_partition: Int8 = field(default_factory=lambda: np.zeros(0, np.int8))
    """Partition of each joint op, a row of `Tiling.classes`; empty without tiling."""

    def __len__(self) -> int:
        return len(self.rank) * self.num_tiles

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Program):
            return NotImplemented
        return all(_same(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))

    __hash__ = None  # type: ignore[assignment]

    @property
    def num_tiles(self) -> int:
        """Tiles of the program; 1 without tiling."""
        return 1 if self.tiling is None else self.tiling.ranks.shape[1]

    @cached_property
    def tile_ranks(self) -> Int32:
        """(ranks of a tile, tiles): the rank that each one is."""
        if self.tiling is None:
            return np.arange(self.num_ranks, dtype=np.int32)[:, None]
        return self.tiling.ranks

    @cached_property
    def classes(self) -> Int32:
        """(partitions, tiles): which tiles meet in the joint ops of a partition."""
        return np.zeros((1, 1), np.int32) if self.tiling is None else self.tiling.classes

    @cached_property
    def partition(self) -> Int8:
        """Partition of each joint op."""
        if self.tiling is None:
            return np.zeros(len(self.joint_group), np.int8)
        return self.joint_partition

    def predecessors(self, op: int) -> Int32:
        """Return the rows that must end before row `op` may start, its stream apart."""
        return self.preds[self.pred_offset[op] : self.pred_offset[op + 1]]

    @cached_property
    def stream_previous(self) -> Int32:
        """The row just before each row in its stream, or NONE."""
        lane = self.rank.astype(np.int64) * (len(self.streams) + 1) + self.stream
        order = np.argsort(lane, kind="stable")
        previous = np.full(len(self.rank), NONE, np.int32)
        same = (lane[order][1:] == lane[order][:-1]) & (self.stream[order][1:] != NONE)
        previous[order[1:][same]] = order[:-1][same]
        return previous

    @cached_property
    def last_of_steps(self) -> Int64:
        """Rows, but for those beside steps, that no row of their step follows in their stream."""
        previous, step = self.stream_previous, self.step
        last = np.ones(len(step), bool)
        follows = np.flatnonzero(previous != NONE)
        last[previous[follows][step[previous[follows]] == step[follows]]] = False
        return np.flatnonzero(last & ~self.is_beside)

    @cached_property
    def joint_members(self) -> Groups:
        """Member rows of every joint op, by joint number, in order."""
        ops = np.flatnonzero(self.joint != NONE)
        order = ops[np.argsort(self.joint[ops], kind="stable")]
        count = np.bincount(self.joint[ops], minlength=len(self.joint_group))
        offset = np.concatenate([[0], np.cumsum(count)]).astype(np.int64)
        return Groups(offset, order.astype(np.int32))

    @cached_property
    def is_flow(self) -> npt.NDArray[np.bool_]:
        """Whether each row is a flow."""
        return np.array([isinstance(c, Flow) for c in self.costs], bool)[self.cost]

    @cached_property
    def is_beside(self) -> npt.NDArray[np.bool_]:
        """Whether each row is on a stream of `BESIDE`."""
        beside = [name.split(" ")[0] in BESIDE for name in self.streams]
        return np.array([*beside, False])[self.stream]  # NONE is the last

    @cached_property
    def nexts(self) -> tuple[Int64, Int32]:
        """Rows that wait for each row, in compressed rows (offset, rows)."""
        found: tuple[Int64, Int32] = successors(
            len(self.rank), self.pred_offset, self.preds, self.stream_previous
        )
        return found

    @cached_property
    def units(self) -> tuple[Int64, Int32]:
        """Rows in an order in which they can run, members of a joint op together (offset, rows).

        Rows that wait for themselves around a cycle are missing. What orders the rows of a tile
        orders the whole: a joint op meets the same rows on every tile.
        """
        members, (offset, rows) = self.joint_members, self.nexts
        found: tuple[Int64, Int32] = order_units(
            len(self.rank), self.pred_offset, self.stream_previous, offset, rows, self.joint,
            members.offset, members.ranks,
        )  # fmt: skip
        return found

    def flat_of(self, tiles: npt.NDArray[np.integer[Any]]) -> Program:
        """Return the ops of some tiles as a program without tiling.

        Joint ops keep the members that lie on these tiles; op ids count the tiles given.
        """
        if self.tiling is None:
            return self
        count = len(tiles)
        what = f"listing {len(self.rank) * count:,} ops one by one"
        require(100.0 * len(self.rank) * count, what, "choose ranks")
        tile = np.tile(np.arange(count), len(self.rank))
        degree = np.repeat(np.diff(self.pred_offset), count)
        offset = np.concatenate([[0], np.cumsum(degree)])
        source = ranges(np.repeat(self.pred_offset[:-1], count), degree)
        preds = self.preds[source] * count + np.repeat(tile, degree)
        classes = self.tiling.classes[:, tiles]
        width = classes.max(axis=1, initial=0)[self.partition].astype(np.int64) + 1
        base = np.concatenate([[0], np.cumsum(width)])
        has = self.joint != NONE
        joint = np.full((len(self.rank), count), NONE, np.int64)
        of = self.joint[has]
        joint[has] = base[of][:, None] + classes[self.partition[of]]
        group = np.repeat(self.joint_group - base[:-1], width) + np.arange(base[-1])
        desks = len(self.servers)
        slot = np.repeat(self.slot, count)
        if len(slot):
            slot = np.where(slot == NONE, NONE, slot + tile * desks).astype(np.int32)
        columns = ("stream", "action", "stage", "microbatch", "layer", "step", "cost")
        repeated: dict[str, Any] = {c: np.repeat(getattr(self, c), count) for c in columns}
        return replace(
            self,
            **repeated,
            rank=self.tiling.ranks[self.rank][:, tiles].ravel().astype(np.int32),
            joint=joint.ravel().astype(np.int32),
            pred_offset=offset.astype(np.int64),
            preds=preds.astype(np.int32),
            joint_group=group.astype(np.int32),
            slot=slot,
            servers=self.servers * count,
            tiling=None,
            joint_partition=np.zeros(0, np.int8),
        )

    @cached_property
    def flat(self) -> Program:
        """The same program without tiling: one row for every op."""
        return self.flat_of(np.arange(self.num_tiles))

    def label(self, op: int) -> str:
        """Return a short name of a row: its action and, where they say more, layer and cost."""
        action = ACTIONS[self.action[op]]
        name = self.costs[self.cost[op]].name
        text = action if self.stage[op] == NONE else f"{self.stage[op]}{action}"
        if self.microbatch[op] != NONE:
            text += str(self.microbatch[op])
        if self.layer[op] != NONE:
            text += f" layer {self.layer[op]}"
        return text if name in (action, "send_recv") else f"{text} {name}"


def ranges(first: Int64, count: Int64) -> Int64:
    """Return ``first[i], first[i] + 1, ...``, count[i] of them, for each i in turn."""
    ends = np.cumsum(count)
    total = int(ends[-1]) if len(ends) else 0
    numbers: Int64 = np.repeat(first - ends + count, count) + np.arange(total)
    return numbers


def _same(a: object, b: object) -> bool:
    if isinstance(a, Groups) and isinstance(b, Groups):
        return np.array_equal(a.offset, b.offset) and np.array_equal(a.ranks, b.ranks)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return np.array_equal(a, b)
    return bool(a == b)
