"""The step of a job as the engines run it, with op times that were measured.

The program is lowered from the job's own lists; only the times of its ops come from elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from simulator.describe.plan import AXES, Axis, Plan
from simulator.engine import run
from simulator.lower.bodies import CostTable, StageBodies, body
from simulator.lower.check import check
from simulator.lower.grid import to_grid
from simulator.lower.mesh import Mesh
from simulator.lower.pipeline import expand
from simulator.lower.replicate import replicate
from simulator.lower.segments import COMPUTE, DP, TP, Segment
from simulator.program import ACTIONS, Flow, Int64, Program, Work
from simulator.schedules import Action
from simulator.timeline import Timeline
from simulator.units import to_seconds, to_ticks
from simulator.validate.torch.job import Job, Part, label
from simulator.validate.torch.recording import Links, Op
from simulator.validate.torch.times import shares

MESSAGE_KINDS = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")

Seconds = Callable[[int], Sequence[float]]
"""Seconds of the parts of a rank, by position."""


class Prediction:
    """The engines over one job: the program is lowered once."""

    def __init__(
        self, job: Job, links: Links, buckets: Mapping[int, tuple[float, ...]],
        engine: str = "compiled",
    ) -> None:  # fmt: skip
        """Lower the program.

        Args:
            job: what the ranks do.
            links: measured times of messages and sums.
            buckets: bytes of the buckets of gradients of each stage.
            engine: one of `simulator.engine.ENGINES`.
        """
        self.job, self.links, self.buckets, self.engine = job, links, buckets, engine
        self.program = program_of(job, buckets)

    def step(self, seconds: Seconds) -> float:
        """Return the seconds of a step.

        Args:
            seconds: of each part: of those that compute, of messages what the rank itself computes
                for them, and of sums of tp ranks all that they take.
        """
        return to_seconds(self.timeline(seconds).makespan)

    def timeline(self, seconds: Seconds) -> Timeline:
        """Return when every op of such a step starts and ends."""
        ticks = _ticks(self.job, self.program, seconds, self.links, self.buckets)
        return run(self.program, ticks, self.engine)


class Calibrated(NamedTuple):
    """A step predicted from op times that were measured apart."""

    seconds: float
    """Median of the draws."""
    bubble: float
    """Share of a step, mean over ranks and draws; so is what follows."""
    exposed: float
    timeline: Timeline
    """Of the draw that is nearest to the median."""


DRAWS = 25
"""Steps whose median is the prediction from op times that were measured apart."""


def calibrated(engine: Prediction, ops: Mapping[str, Op]) -> Calibrated:
    """Return a step whose op times are drawn from those measured apart.

    Each action takes one of its label's times at random: ranks that wait for each other lose time
    to every slow op and win none back from quick ones, which medians would hide. The median of
    `DRAWS` such steps, from a fixed seed; without variation all of them are the same.
    """
    job, random = engine.job, np.random.default_rng(0)
    _, send, receive = engine.links.message(job.boundary_bytes)
    own = {"send": send, "receive": receive}
    samples = {name: np.array(op.samples) for name, op in ops.items()}

    def drawn(rank: int) -> list[float]:
        times: list[float] = []
        for action in job.list_of(rank):
            found = samples.get(label(action))
            works = iter([] if found is None else found[random.integers(len(found))].tolist())
            times += [
                engine.links.peer_sum(part.bytes) if part.kind == "sum"
                else next(works, 0.0) if part.kind == "work"
                else own.get(part.kind, 0.0)
                for part in job.parts_of(action)
            ]  # fmt: skip
        return times

    drawn_steps = [engine.timeline(drawn) for _ in range(DRAWS)]
    spent = np.array([to_seconds(timeline.makespan) for timeline in drawn_steps])
    median = float(np.median(spent))
    idle = np.mean([shares(engine.program, timeline) for timeline in drawn_steps], axis=0)
    nearest = drawn_steps[int(np.abs(spent - median).argmin())]
    return Calibrated(median, float(idle[0]), float(idle[1]), nearest)


def program_of(job: Job, buckets: Mapping[int, tuple[float, ...]]) -> Program:
    """Return the checked program of one step, an op an action, or a sum of gradients."""
    grid, table = to_grid(job.actions), CostTable()
    places = []
    for stage in grid.places[1].tolist():
        f, b, i, w, opt = (
            body(_segments(job, stage, kind), table) for kind in ("F", "B", "I", "W", "OPT")
        )
        sums = buckets.get(stage, ()) if len(job.holders[stage, 0]) > 1 else ()
        flows = [Segment(Flow("all_reduce", size, seconds=0.0), DP) for size in sums]
        places.append(StageBodies(f, b, b, body(flows, table), opt, f, i, w, w))
    message = table.number(Flow("send_recv", float(job.boundary_bytes), seconds=0.0))
    replica = expand(grid, tuple(places), message)
    strides = dict(zip(("dp", "pp", "tp"), job.strides, strict=True))
    order: tuple[Axis, ...] = tuple(sorted(AXES, key=lambda axis: -strides.get(axis, 0)))
    mesh = Mesh.of(Plan(pp=job.pp, dp=job.dp, tp=job.tp, order=order))
    return check(replicate(replica, mesh, tuple(table.costs), np.zeros(job.pp)))


def _segments(job: Job, stage: int, kind: str) -> list[Segment]:
    """Return work and sums of tp ranks of an action; one work where the stage has none of it."""
    action = Action(stage, kind)
    known = (stage, kind) in {(a.stage, a.kind) for row in job.actions for a in row}
    parts = job.parts_of(action) if known else (Part("work"),)
    return [
        Segment(Flow("all_reduce", part.bytes, seconds=0.0), TP)
        if part.kind == "sum"
        else Segment(Work(kind, seconds=0.0), COMPUTE)
        for part in parts
        if part.kind in ("sum", "work")
    ]


def _ticks(
    job: Job, program: Program, seconds: Seconds, links: Links,
    buckets: Mapping[int, tuple[float, ...]],
) -> Int64:  # fmt: skip
    """Return the ticks of every op; what a rank computes for a message goes to its next op."""
    message = to_ticks(links.message(job.boundary_bytes)[0])
    own = [_with_messages(job, rank, seconds(rank)) for rank in range(job.world_size)]
    tiles = [(d, t) for d in range(job.dp) for t in range(job.tp)]
    ticks = np.zeros((len(program.rank), len(tiles)), np.int64)
    seen: dict[tuple[int, int, int, int], int] = {}
    columns = (program.rank, program.action, program.stage, program.microbatch)
    for row, key in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        place, code, stage, microbatch = key
        if ACTIONS[code] in MESSAGE_KINDS:
            ticks[row] = message
            continue
        number = seen[key] = seen.get(key, -1) + 1
        if ACTIONS[code] == "REDUCE_GRAD":
            ticks[row] = to_ticks(links.sum(buckets[stage][number]))
        else:
            action = Action(stage, ACTIONS[code], microbatch)
            ticks[row] = [own[job.rank(d, place, t)][action][number] for d, t in tiles]
    return ticks if len(tiles) > 1 else ticks[:, 0]


def _with_messages(job: Job, rank: int, seconds: Sequence[float]) -> dict[Action, list[int]]:
    """Return the ticks of work and sums of a rank's actions."""
    ticks: dict[Action, list[int]] = {}
    more = 0.0
    for (action, part), spent in zip(job.parts(rank), seconds, strict=True):
        if part.kind == "sum":
            ticks[action].append(to_ticks(spent))
        elif part.kind == "work":
            ticks.setdefault(action, []).append(to_ticks(spent + more))
            more = 0.0
        elif part.kind != "wait":
            more += spent
    return ticks
