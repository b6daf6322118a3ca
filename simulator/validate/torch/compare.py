"""A replay beside what was predicted of it: op by op, and the step by two clocks kept apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from simulator.program import Program
from simulator.timeline import Timeline
from simulator.validate.torch.clock import Rebuilt, rebuilt
from simulator.validate.torch.job import Job
from simulator.validate.torch.predict import Calibrated, Prediction, calibrated
from simulator.validate.torch.recording import COMPUTE, NANO, Float64, Links, Op, Recording
from simulator.validate.torch.times import measured, shares, wall_spans

QUIET = 1.03
"""Most that the wall clock of a step's computing may exceed its busy time, on any rank."""

FEWEST = 5
"""Quiet steps below which there is no figure by the wall clock."""

COUNTED = {
    "cuda-shared": "torch.cuda.max_memory_allocated in one step that warms up",
    "cpu": "tensors alive, counted by storage in one step that warms up; gradients that were sent "
    "count no longer",
    "cuda": "torch.cuda.max_memory_allocated in one step that warms up",
}
"""How the peak of a device's memory is measured."""

TAKING_TURNS = ("cuda-shared",)
"""Devices whose ranks compute one at a time, so that the wall clock says nothing of a step."""

TOLERANCE = 1e-4
"""Largest difference of a loss, or of a gradient over the parameter's largest one, that fp32 sums
in another order explain."""


class Row(NamedTuple):
    """One kind of action of one stage."""

    label: str
    predicted: float
    measured: float
    variation: float
    times: int

    @property
    def error(self) -> float:
        """Signed: above zero, predicted too slow."""
        return self.predicted / self.measured - 1


class Figure(NamedTuple):
    """The step by one clock, in seconds."""

    clock: str
    measured: float
    """Median of the steps."""
    spread: float
    """Half the middle half of the steps, over the median."""
    steps: int
    calibrated: float
    """Predicted from op times that were measured apart, median over visits."""
    replayed: float
    """Median of what the engine says of each step with the op times of that step."""
    error: float
    """Signed error of the prediction: of each visit's op times against that visit's steps, so that
    both see the same phase of the host; median over visits."""
    visits: int

    @property
    def engine_error(self) -> float:
        """Signed error of the replayed step."""
        return self.replayed / self.measured - 1

    @property
    def cost_error(self) -> float:
        """Signed error that op times measured apart add to it."""
        return (1 + self.error) / (1 + self.engine_error) - 1


class Sameness(NamedTuple):
    """The replay beside one process that trains the same model."""

    loss: float
    """Largest difference of a microbatch's loss, in steps `steps`."""
    losses: int
    steps: int
    gradient: float
    """Largest difference of a gradient of the first step, over the parameter's largest one."""
    parameter: str
    """Where that is."""
    gradients: int

    @property
    def holds(self) -> bool:
        """Whether both are alike to the tolerance of fp32."""
        return max(self.loss, self.gradient) <= TOLERANCE


class Idle(NamedTuple):
    """A share of the step in which ranks do not compute, means over ranks and steps."""

    what: str
    predicted: float
    rebuilt: float
    """By the rebuilt clock."""
    wall: float | None
    """By the wall clock: of quiet steps where there is a figure, else of all; None where ranks take
    turns."""


class Held(NamedTuple):
    """Bytes of a rank."""

    predicted: float
    """At its peak: states, activations, and what is alive while an operator runs."""
    measured: int
    """Of tensors at its peak, as `COUNTED` says."""
    states: int
    """Of them, all the time: parameters, gradients, optimizer states."""

    @property
    def error(self) -> float:
        """Signed: above zero, predicted too much."""
        return self.predicted / self.measured - 1


class Gantt(NamedTuple):
    """A predicted step and a measured one, both of one program."""

    program: Program
    predicted: Timeline
    measured: Timeline
    clock: str
    """Of the measured one."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All that a replay says."""

    job: Job
    machine: Mapping[str, Any]
    rows: tuple[Row, ...]
    clock: Figure | None
    """By the rebuilt clock; None where no step was recorded, or ranks share cores."""
    wall: Figure | None
    """By the wall clock of quiet steps; None where these are too few."""
    quiet: int
    """Quiet steps."""
    steps: int
    """Recorded steps."""
    idle: tuple[Idle, ...]
    """Bubble and exposed communication; empty where times are left out."""
    memory: tuple[Held, ...]
    """By rank; empty where no step was counted."""
    gantt: Gantt | None
    """A predicted and a measured step; None where there are none."""
    sameness: Sameness | None
    """None where the replay was cut short before its first steps ended."""
    links: Links
    source: str
    """Where predicted op times come from."""
    shares_cores: str | None
    """Why times say nothing, where there are more ranks than cores."""

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values for JSON."""
        job = self.job
        return {
            "schema_version": 1,
            "job": asdict(job),
            "machine": dict(self.machine),
            "predicted_from": self.source,
            "ops": [{**row._asdict(), "error": row.error} for row in self.rows],
            "rebuilt_clock": _figure(self.clock),
            "wall_clock": _figure(self.wall),
            "idle": [row._asdict() for row in self.idle],
            "memory": [{**held._asdict(), "error": held.error} for held in self.memory],
            "quiet_steps": self.quiet,
            "steps": self.steps,
            "same_as_one_process": None if self.sameness is None else {
                **self.sameness._asdict(), "holds": self.sameness.holds,
            },
            "times_left_out": self.shares_cores,
        }  # fmt: skip


def _figure(figure: Figure | None) -> dict[str, Any] | None:
    if figure is None:
        return None
    return {
        **figure._asdict(), "engine_error": figure.engine_error, "cost_error": figure.cost_error,
    }  # fmt: skip


def compare(
    recording: Recording, visits: Sequence[Mapping[str, Op]], ops: Mapping[str, Op], links: Links,
    source: str, reference: Mapping[str, Any] | None, shares_cores: str | None = None,
) -> Comparison:  # fmt: skip
    """Return a replay beside what was predicted of it.

    Args:
        recording: of the replay.
        visits: op times measured apart from its steps, for each visit.
        ops: those of all visits together.
        links: times of messages and sums measured apart from its steps.
        source: where these come from, in words.
        reference: what `worker.compare_with_one_process` left; None where it did not run.
        shares_cores: why times are left out.
    """
    job, found = recording.job, recording.measured() if recording.steps else {}
    rows = tuple(
        Row(name, ops[name].seconds, op.seconds, op.variation, len(op.samples))
        for name, op in found.items()
        if name in ops
    )
    quiet = recording.stretch() <= QUIET if recording.steps else np.zeros(0, bool)
    quiet &= job.device not in TAKING_TURNS
    timed = bool(recording.steps) and shares_cores is None
    by_step: list[Rebuilt] = []
    apart: list[Calibrated] = []
    idle: tuple[Idle, ...] = ()
    gantt = None
    if timed:
        by_step = _by_step(recording)
        engine = Prediction(job, links, recording.buckets)
        apart = [calibrated(engine, own) for own in visits]
        idle, gantt = _idle(recording, engine.program, by_step, quiet, apart)
    every = np.ones(len(recording.steps), bool)
    return Comparison(
        job=job,
        machine=recording.machine,
        rows=rows if timed else (),
        clock=_of("rebuilt", recording, np.array([r.seconds for r in by_step]), every, apart)
        if timed else None,
        wall=_of("wall", recording, recording.step_seconds, quiet, apart)
        if timed and quiet.sum() >= FEWEST else None,
        quiet=int(quiet.sum()),
        steps=len(recording.steps),
        idle=idle,
        memory=tuple(
            Held(predicted, peak, held)
            for predicted, (held, peak) in zip(job.memory, recording.memory, strict=False)
        ),
        gantt=gantt,
        sameness=_sameness(recording, reference),
        links=links,
        source=source,
        shares_cores=shares_cores,
    )  # fmt: skip


def _by_step(recording: Recording) -> list[Rebuilt]:
    job = recording.job
    busy = [recording.busy(rank) for rank in range(job.world_size)]
    return [
        rebuilt(job, [b[n].tolist() for b in busy], recording.links, dict(recording.buckets))
        for n in range(len(recording.steps))
    ]


def _of(
    clock: str, recording: Recording, seconds: Float64, which: Any, apart: Sequence[Calibrated]
) -> Figure:  # fmt: skip
    """Return the figure of a clock over some steps."""
    job = recording.job
    times = _op_times(recording, clock, which)
    engine = Prediction(job, recording.links, recording.buckets)
    replayed = [
        engine.step(lambda rank, n=n: times[rank][n].tolist())  # type: ignore[misc]
        for n in range(int(np.sum(which)))
    ]
    visit = np.arange(len(recording.steps)) // job.steps
    errors = [
        apart[v].seconds / float(np.median(seconds[which & (visit == v)])) - 1
        for v in sorted(set(visit[which].tolist()))
    ]
    low, middle, high = np.quantile(seconds[which], (0.25, 0.5, 0.75)).tolist()
    return Figure(
        clock=clock,
        measured=middle,
        spread=(high - low) / 2 / middle,
        steps=int(np.sum(which)),
        calibrated=float(np.median([one.seconds for one in apart])),
        error=float(np.median(errors)),
        visits=len(errors),
        replayed=float(np.median(replayed)),
    )


def _op_times(recording: Recording, clock: str, which: Any) -> list[Float64]:
    """Return (steps, parts) seconds by rank that the engine replays, by a clock, of some steps.

    By the wall clock work takes what it took, and a sum of tp ranks from when its last rank has
    come to when its last rank has it; by the rebuilt clock what was measured apart, as there.
    """
    job, times = recording.job, []
    for rank in range(job.world_size):
        busy = recording.busy(rank)[which]
        sums = np.array([part.kind == "sum" for _, part in job.parts(rank)])
        if clock == "wall":
            works = recording.works(rank, COMPUTE[:-1])
            busy = np.where(works, recording.wall(rank)[which], busy)
            spans = np.stack([recording.spans[peer][which] for peer in job.peers(rank)])
            together = (spans[..., 1].max(0) - spans[..., 0].max(0)).clip(0) * NANO
            busy[:, sums] = together[:, sums]
        else:
            busy[:, sums] = [
                recording.links.peer_sum(part.bytes) for _, part in job.parts(rank)
                if part.kind == "sum"
            ]  # fmt: skip
        times.append(busy)
    return times


def _idle(
    recording: Recording, program: Program, by_step: Sequence[Rebuilt], quiet: Any,
    apart: Sequence[Calibrated],
) -> tuple[tuple[Idle, ...], Gantt]:  # fmt: skip
    """Return bubble and exposed communication, and a step of median length beside a predicted."""
    job, which = recording.job, np.flatnonzero(quiet)
    turns = job.device in TAKING_TURNS
    clock = "wall"
    if len(which) < FEWEST:
        clock, which = "rebuilt", np.arange(len(recording.steps))
    by_wall = [measured(job, program, wall_spans(recording, n)) for n in which.tolist()]
    by_clock = [measured(job, program, step.spans) for step in by_step]
    found = [
        np.median([shares(program, timeline) for timeline in some], axis=0)
        for some in (by_clock, by_wall)
    ]
    predicted = np.median([(one.bubble, one.exposed) for one in apart], axis=0)
    rows = tuple(
        Idle(what, float(predicted[i]), float(found[0][i]), None if turns else float(found[1][i]))
        for i, what in enumerate(("bubble", "exposed communication"))
    )
    shown = by_wall if clock == "wall" else by_clock
    order = np.argsort([timeline.makespan for timeline in shown], kind="stable")
    middle = shown[int(order[(len(order) - 1) // 2])]
    nearest = sorted(apart, key=lambda one: one.seconds)[(len(apart) - 1) // 2]
    return rows, Gantt(program, nearest.timeline, middle, clock)


def _sameness(recording: Recording, reference: Mapping[str, Any] | None) -> Sameness | None:
    if reference is None:
        return None
    job = recording.job
    differences = [
        abs(loss - recording.losses[replica * job.tp + index][step][m])
        for step, replicas in enumerate(reference["losses"])
        for replica, losses in enumerate(replicas)
        for m, loss in enumerate(losses)
        for index in range(job.tp)
    ]
    gradients = reference["gradients"]
    return Sameness(
        max(differences), len(differences), len(reference["losses"]),
        gradients["relative"], gradients["parameter"], gradients["compared"],
    )  # fmt: skip
