"""The Program: every op of a run as columns, and the small nouns that its ops are made of.

An op is **work** (holds its stream for a time) or a **flow** (moves bytes between the ranks of a
group). What an op costs is described once in a cost table, whose entries thousands of ops share;
the hardware package turns entries into ticks. A flow is *joint*: each member rank has its own op,
all of them share a `joint` number, and they start together when the last member arrives.

An op may start when its predecessors have ended and when it is at the head of its stream; streams
are first-in-first-out by op id. Nothing else orders ops.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

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


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel of a device: what it computes and moves, not how long that takes."""

    name: str
    flops: float
    """Floating-point operations really executed (a multiply-add counts two)."""
    bytes: float
    """Bytes read and written in device memory."""
    dtype: str
    """Precision whose peak rate applies, a key of `Device.peak`."""
    matmul: tuple[int, int, int, int] | None = None
    """(batch, m, n, k) where the kernel is a matrix product."""


@dataclass(frozen=True, slots=True)
class Work:
    """Cost of an op that holds its stream: kernels one after the other, or a stated duration."""

    name: str
    kernels: tuple[Kernel, ...] = ()
    seconds: float | None = None
    """A stated (measured or idealised) duration; it overrides the kernels."""
    alloc_bytes: float = 0.0
    """Device memory that comes alive when the op starts."""
    free_bytes: float = 0.0
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


@dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """Ops as columns (one row an op, its id the row), with their dependencies and costs.

    The order of rows within one (rank, stream) is the order of that stream.
    """

    rank: Int32
    stream: Int16
    """Index into `streams`, or NONE for an op that no stream orders."""
    action: Int8
    """Index into `ACTIONS`: the phase that the op belongs to."""
    stage: Int16
    microbatch: Int16
    layer: Int16
    step: Int16
    cost: Int32
    """Index into `costs`."""
    joint: Int32
    """Number of the joint op that this op is a member of, or NONE."""
    pred_offset: Int64
    """Op i starts after ``preds[pred_offset[i]:pred_offset[i + 1]]`` have ended."""
    preds: Int32
    joint_group: Int32
    """Group of each joint op, by joint number."""
    groups: Groups
    costs: tuple[Cost, ...]
    streams: tuple[str, ...]
    num_ranks: int
    static_bytes: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    """Device memory alive during the whole run, by rank; empty when it is not modelled."""

    def __len__(self) -> int:
        return len(self.rank)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Program):
            return NotImplemented
        return all(_same(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))

    __hash__ = None  # type: ignore[assignment]

    def predecessors(self, op: int) -> Int32:
        """Return the ops that must end before `op` may start, its stream apart."""
        return self.preds[self.pred_offset[op] : self.pred_offset[op + 1]]

    @cached_property
    def stream_previous(self) -> Int32:
        """The op just before each op in its stream, or NONE."""
        lane = self.rank.astype(np.int64) * (len(self.streams) + 1) + self.stream
        order = np.argsort(lane, kind="stable")
        previous = np.full(len(self), NONE, np.int32)
        same = (lane[order][1:] == lane[order][:-1]) & (self.stream[order][1:] != NONE)
        previous[order[1:][same]] = order[:-1][same]
        return previous

    @cached_property
    def joint_members(self) -> Groups:
        """Member ops of every joint op, by joint number, in order of op id."""
        ops = np.flatnonzero(self.joint != NONE)
        order = ops[np.argsort(self.joint[ops], kind="stable")]
        count = np.bincount(self.joint[ops], minlength=len(self.joint_group))
        offset = np.concatenate([[0], np.cumsum(count)]).astype(np.int64)
        return Groups(offset, order.astype(np.int32))

    @cached_property
    def is_flow(self) -> npt.NDArray[np.bool_]:
        """Whether each op is a flow."""
        return np.array([isinstance(c, Flow) for c in self.costs], bool)[self.cost]

    def label(self, op: int) -> str:
        """Return a short name of an op: its action and, where they say more, layer and cost."""
        action = ACTIONS[self.action[op]]
        name = self.costs[self.cost[op]].name
        text = action if self.stage[op] == NONE else f"{self.stage[op]}{action}"
        if self.microbatch[op] != NONE:
            text += str(self.microbatch[op])
        if self.layer[op] != NONE:
            text += f" layer {self.layer[op]}"
        return text if name in (action, "send_recv") else f"{text} {name}"


def _same(a: object, b: object) -> bool:
    if isinstance(a, Groups) and isinstance(b, Groups):
        return np.array_equal(a.offset, b.offset) and np.array_equal(a.ranks, b.ranks)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return np.array_equal(a, b)
    return bool(a == b)
