"""What the ranks measured, read back: op times apart from steps, and the steps' spans."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.validate.torch.files import results_file
from simulator.validate.torch.job import Job, label

Float64 = npt.NDArray[np.float64]

NANO = 1e-9

COMPUTE = ("F", "B", "I", "W", "OPT")
"""Kinds of action that compute."""


class Op(NamedTuple):
    """Times of one kind of action of one stage."""

    seconds: float
    """Median of what the device computed for it."""
    variation: float
    """Standard deviation over mean."""
    wall_seconds: float
    """Median by the wall clock of the same, without sums with tp ranks."""
    samples: tuple[tuple[float, ...], ...]
    """What was computed each time that it was done, by part that works."""

    @classmethod
    def of(cls, times: npt.ArrayLike) -> Op:
        """Return the times of (times, parts, 2): busy and wall seconds."""
        busy, wall = np.moveaxis(np.array(times, float), 2, 0)
        whole = busy.sum(axis=1)
        return cls(
            float(np.median(whole)), float(whole.std() / whole.mean()),
            float(np.median(wall.sum(axis=1))), tuple(map(tuple, busy.tolist())),
        )  # fmt: skip


class Links(NamedTuple):
    """Seconds of messages and of all-reduces by size."""

    messages: tuple[tuple[float, float, float, float], ...]
    """(bytes, seconds, of them the sender computes, the receiver computes), ascending."""
    sums: tuple[tuple[float, float], ...]
    """Of gradients: (bytes, seconds), ascending."""
    peer_sums: tuple[tuple[float, float], ...] = ()
    """Of tp ranks, likewise."""

    def message(self, size: float) -> tuple[float, float, float]:
        """Return the seconds of a message, of the sender's own and of the receiver's own work."""
        if not self.messages:
            return 0.0, 0.0, 0.0
        sizes, *columns = np.array(self.messages).T
        seconds, send, receive = (float(np.interp(size, sizes, column)) for column in columns)
        return seconds, send, receive

    def sum(self, size: float) -> float:
        """Return the seconds of an all-reduce of gradients."""
        return _at(self.sums, size)

    def peer_sum(self, size: float) -> float:
        """Return the seconds of an all-reduce of tp ranks."""
        return _at(self.peer_sums, size)


def _at(table: Sequence[tuple[float, float]], size: float) -> float:
    if not table:
        return 0.0
    sizes, seconds = np.array(table).T
    return float(np.interp(size, sizes, seconds))


@dataclass(frozen=True)
class Recording:
    """What all ranks of a job measured, times of spans in nanoseconds."""

    job: Job
    machine: Mapping[str, Any]
    ops: Mapping[str, Op]
    """Measured apart from steps, by label; empty where nothing was."""
    ops_of_visits: tuple[Mapping[str, Op], ...]
    """The same, of each visit alone."""
    links: Links
    buckets: Mapping[int, tuple[float, ...]]
    """Bytes of the buckets of gradients of each stage, in the order in which they are summed."""
    steps: tuple[int, ...]
    """Numbers of the recorded steps that all ranks have done."""
    spans: tuple[npt.NDArray[np.int64], ...]
    """By rank: (steps, parts, 3): start, end, busy."""
    losses: tuple[Mapping[int, Mapping[int, float]], ...]
    """By replica x tp + index along tp, then step (all of them, also those that warm up), then
    microbatch."""
    memory: tuple[tuple[int, int], ...]
    """By rank: bytes held all the time, and most that were alive in one step that warms up; empty
    where no such step was done."""
    gap: float
    """Of a calibration: seconds from one kernel of no work to the next, median over ranks."""
    copies: tuple[tuple[float, float], ...]
    """Of a calibration, from the host to the device: (bytes, seconds), likewise."""
    kernels: tuple[Mapping[str, Any], ...]
    """Of a calibration: kinds of kernels with their sizes, and seconds as medians over ranks."""
    complete: bool
    """Whether all steps of the job were done."""

    @classmethod
    def read(cls, job: Job, folder: Path) -> Recording:
        """Return what lies in the folder of a job, also where its ranks were cut short."""
        texts = []
        for rank in range(job.world_size):
            path = results_file(folder, rank)
            texts.append(path.read_text(encoding="utf-8") if path.exists() else "")
        return cls.of(job, texts)

    @classmethod
    def of(cls, job: Job, texts: Sequence[str]) -> Recording:
        """Return what the ranks' files say."""
        lines = [[json.loads(x) for x in text.splitlines() if x.endswith("}")] for text in texts]
        heads = [rows[0] if rows else {} for rows in lines]
        visits = [[row["actions"] for row in rows if "actions" in row] for rows in lines]
        by_visit = [_pooled(tables) for tables in zip(*visits, strict=False)]
        done = [[row for row in rows if "step" in row] for rows in lines]
        common = set.intersection(*({r["step"] for r in rows} for rows in done))
        kept = [[r for r in rows if r["recorded"] and r["step"] in common] for rows in done]
        losses: list[dict[int, dict[int, float]]] = [{} for _ in range(job.dp * job.tp)]
        for rank, rows in enumerate(done):
            for row in rows:
                if row["losses"]:
                    replica, _, index = job.place(rank)
                    of_step = losses[replica * job.tp + index].setdefault(row["step"], {})
                    of_step |= {int(m): loss for m, loss in row["losses"].items()}
        buckets = {int(s): tuple(b) for h in heads for s, b in h.get("buckets", {}).items()}
        names = [r["step"] for r in kept[0]]
        return cls(
            job=job,
            machine=heads[0].get("machine", {}),
            ops=_ops(_pooled(by_visit)),
            ops_of_visits=tuple(map(_ops, by_visit)),
            links=_links(heads),
            buckets=buckets,
            steps=tuple(names),
            spans=tuple(
                np.array([r["spans"] for r in rows], np.int64).reshape(
                    len(names), len(job.parts(rank)), 3
                )
                for rank, rows in enumerate(kept)
            ),
            losses=tuple(losses),
            memory=_memory(lines),
            gap=float(np.median([head.get("gap", 0.0) for head in heads])),
            copies=_sums(heads, "copies"),
            kernels=_kernels(heads),
            complete=len(names) == job.visits * job.steps,
        )

    def busy(self, rank: int) -> Float64:
        """Return (steps, parts) seconds that a rank computed in each part."""
        seconds: Float64 = (self.spans[rank][:, :, 2] * NANO).astype(np.float64)
        return seconds

    def wall(self, rank: int) -> Float64:
        """Return (steps, parts) seconds of each part by the wall clock."""
        start, end = np.moveaxis(self.spans[rank][:, :, :2], 2, 0)
        seconds: Float64 = ((end - start) * NANO).astype(np.float64)
        return seconds

    def works(self, rank: int, kinds: Collection[str] = COMPUTE) -> npt.NDArray[np.bool_]:
        """Return which parts of a rank are work of some kinds of action."""
        return np.array([
            part.kind == "work" and action.kind in kinds
            for action, part in self.job.parts(rank)
        ])  # fmt: skip

    @property
    def step_seconds(self) -> Float64:
        """Return the wall clock of each step: from the first start on any rank to the last end."""
        start = np.min([s[:, 0, 0] for s in self.spans], axis=0)
        end = np.max([s[:, -1, 1] for s in self.spans], axis=0)
        seconds: Float64 = (end - start) * NANO
        return seconds

    def stretch(self) -> Float64:
        """Return for each step the worst rank's wall clock over busy time, in what computes."""
        ratios = []
        for rank in range(self.job.world_size):
            computes = self.works(rank, COMPUTE[:-1])
            busy, wall = self.busy(rank)[:, computes], self.wall(rank)[:, computes]
            ratios.append(wall.sum(axis=1) / busy.sum(axis=1))
        worst: Float64 = np.max(ratios, axis=0)
        return worst

    def measured(self) -> dict[str, Op]:
        """Return the times of actions in the recorded steps, by label."""
        found: dict[str, list[Float64]] = {}
        for rank in range(self.job.world_size):
            both = np.stack([self.busy(rank), self.wall(rank)], axis=-1)
            parts = self.job.parts(rank)
            for action in self.job.list_of(rank):
                if action.kind in COMPUTE:
                    at = [i for i, (a, p) in enumerate(parts) if a == action and p.kind == "work"]
                    found.setdefault(label(action), []).append(both[:, at])
        return {name: Op.of(np.concatenate(some)) for name, some in sorted(found.items())}


Pairs = dict[str, list[list[list[float]]]]
"""(busy, wall) seconds of each part that works, each time that an action was done, by label."""


def _pooled(tables: Sequence[Pairs]) -> Pairs:
    pooled: Pairs = {}
    for table in tables:
        for name, pairs in table.items():
            pooled.setdefault(name, []).extend(pairs)
    return pooled


def _ops(pairs: Pairs) -> dict[str, Op]:
    return {name: Op.of(some) for name, some in sorted(pairs.items())}


def _memory(lines: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[tuple[int, int], ...]:
    rows = [row["memory"] for rows in lines for row in rows if "memory" in row]
    return tuple((r["held"], r["peak"]) for r in rows) if len(rows) == len(lines) else ()


def _kernels(heads: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    by_kind = zip(*(head.get("kernels", ()) for head in heads), strict=False)
    return tuple(
        {**kinds[0], "seconds": np.median([k["seconds"] for k in kinds], axis=0).tolist()}
        for kinds in by_kind
    )


def _links(heads: Sequence[Mapping[str, Any]]) -> Links:
    messages = sorted(
        (row["bytes"], row["seconds"], row["send"], row["receive"])
        for head in heads
        for row in head.get("messages", ())
    )
    return Links(tuple(messages), _sums(heads, "sums"), _sums(heads, "peer_sums"))


def _sums(heads: Sequence[Mapping[str, Any]], name: str) -> tuple[tuple[float, float], ...]:
    """Return the median over ranks of the seconds of sums, by size."""
    by_size: dict[float, list[float]] = {}
    for head in heads:
        for row in head.get(name, ()):
            by_size.setdefault(row["bytes"], []).append(row["seconds"])
    return tuple((size, float(np.median(some))) for size, some in sorted(by_size.items()))
