"""The step of a job as the engines run it, with op times that were measured.

The program is lowered from the job's own lists; only the times of its ops come from elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from simulator.describe.plan import AXES, Axis, Plan
from simulator.engine import run
from simulator.lower.bodies import CostTable, StageBodies, body
from simulator.lower.check import check
from simulator.lower.grid import to_grid
from simulator.lower.mesh import Mesh
from simulator.lower.pipeline import expand
from simulator.lower.replicate import replicate
from simulator.lower.segments import COMPUTE, DP, Segment
from simulator.program import ACTION_CODE, ACTIONS, Flow, Int64, Program, Work
from simulator.schedules import Action
from simulator.units import to_seconds, to_ticks
from simulator.validate.torch.job import Job, label
from simulator.validate.torch.recording import Links, Op

MESSAGE_KINDS = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")

Seconds = Callable[[int, Action], float]
"""Seconds of an action on a rank."""


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
            seconds: of each action: of those that compute, and of messages what the rank itself
                computes for them.
        """
        ticks = _ticks(self.job, self.program, seconds, self.links, self.buckets)
        return to_seconds(run(self.program, ticks, self.engine).makespan)


DRAWS = 25
"""Steps whose median is the prediction from op times that were measured apart."""


def calibrated(engine: Prediction, ops: Mapping[str, Op]) -> float:
    """Return the seconds of a step whose op times are drawn from those measured apart.

    Each action takes one of its label's times at random: ranks that wait for each other lose time
    to every slow op and win none back from quick ones, which medians would hide. The median of
    `DRAWS` such steps, from a fixed seed; without variation all of them are the same.
    """
    job, random = engine.job, np.random.default_rng(0)
    _, send, receive = engine.links.message(job.boundary_bytes)
    own = {"SEND_F": send, "SEND_B": send, "RECV_F": receive, "RECV_B": receive}

    def seconds(rank: int, action: Action) -> float:
        if action.kind in own:
            return own[action.kind]
        found = ops.get(label(action))
        return 0.0 if found is None else float(random.choice(found.samples))

    return float(np.median([engine.step(seconds) for _ in range(DRAWS)]))


def program_of(job: Job, buckets: Mapping[int, tuple[float, ...]]) -> Program:
    """Return the checked program of one step, an op an action, or a sum of gradients."""
    grid, table = to_grid(job.actions), CostTable()
    f, b, i, w, opt = (
        body([Segment(Work(kind, seconds=0.0), COMPUTE)], table)
        for kind in ("F", "B", "I", "W", "OPT")
    )
    places = []
    for stage in grid.places[1].tolist():
        sums = buckets.get(stage, ()) if len(job.holders[stage]) > 1 else ()
        flows = [Segment(Flow("all_reduce", size, seconds=0.0), DP) for size in sums]
        places.append(StageBodies(f, b, b, body(flows, table), opt, f, i, w, w))
    message = table.number(Flow("send_recv", float(job.boundary_bytes), seconds=0.0))
    replica = expand(grid, tuple(places), message)
    inner = sorted(("dp", "pp"), key=lambda axis: job.strides[axis == "pp"], reverse=True)
    order: tuple[Axis, ...] = tuple(axis for axis in (*inner, *AXES[2:]) if axis in AXES)
    mesh = Mesh.of(Plan(pp=job.pp, dp=job.dp, order=order))
    return check(replicate(replica, mesh, tuple(table.costs), np.zeros(job.pp)))


def _ticks(
    job: Job, program: Program, seconds: Seconds, links: Links,
    buckets: Mapping[int, tuple[float, ...]],
) -> Int64:  # fmt: skip
    """Return the ticks of every op; what a rank computes for a message goes to its next op."""
    message = to_ticks(links.message(job.boundary_bytes)[0])
    own = [_with_messages(job, rank, seconds) for rank in range(job.world_size)]
    ticks = np.zeros((len(program.rank), job.dp), np.int64)
    summed: dict[tuple[int, int], int] = {}
    columns = (program.rank, program.action, program.stage, program.microbatch)
    for row, (place, code, stage, microbatch) in enumerate(
        zip(*(c.tolist() for c in columns), strict=True)
    ):
        if ACTIONS[code] in MESSAGE_KINDS:
            ticks[row] = message
        elif code == ACTION_CODE["REDUCE_GRAD"]:
            number = summed[place, stage] = summed.get((place, stage), -1) + 1
            ticks[row] = to_ticks(links.sum(buckets[stage][number]))
        else:
            action = Action(stage, ACTIONS[code], microbatch)
            ticks[row] = [own[job.rank(d, place)][action] for d in range(job.dp)]
    return ticks if job.dp > 1 else ticks[:, 0]


def _with_messages(job: Job, rank: int, seconds: Seconds) -> dict[Action, int]:
    """Return the ticks of a rank's computing actions."""
    ticks, more = {}, 0.0
    for action in job.list_of(rank):
        spent = seconds(rank, action)
        if action.kind in (*MESSAGE_KINDS, "REDUCE_GRAD"):
            more += spent
        else:
            ticks[action] = to_ticks(spent + more)
            more = 0.0
    return ticks
