"""Steps as the simulator's own nouns: a Timeline of the program that the engine runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simulator.program import ACTIONS, Int64, Program
from simulator.report.breakdown import COMMUNICATION, breakdown
from simulator.schedules import Action
from simulator.timeline import Timeline
from simulator.units import to_ticks
from simulator.validate.torch.job import Job
from simulator.validate.torch.recording import Recording

Spans = Sequence[Sequence[tuple[float, float]]]
"""By rank and part: begin and end in seconds."""


def wall_spans(recording: Recording, step: int) -> Spans:
    """Return the spans of one step by the wall clock, from its first start on any rank."""
    begin = min(int(spans[step, 0, 0]) for spans in recording.spans)
    return [((spans[step, :, :2] - begin) * 1e-9).tolist() for spans in recording.spans]


def measured(job: Job, program: Program, spans: Spans) -> Timeline:
    """Return when every op of a program started and ended in a step that was measured.

    Work begins with the messages that its rank sends right before it, to which the engine adds
    their time too. A sum moves from when its last rank has come, a message from when it is sent to
    when it is received or waited for no longer, sums of gradients until they are not waited for.
    """
    works, flows = _works(job, spans), _flows(job, spans)
    tiles = [(d, t) for d in range(job.dp) for t in range(job.tp)]
    start, end = (np.zeros((len(program.rank), len(tiles)), np.int64) for _ in range(2))
    seen: dict[tuple[int, int, int, int], int] = {}
    columns = (program.rank, program.action, program.stage, program.microbatch)
    for row, key in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        place, code, stage, microbatch = key
        number = seen[key] = seen.get(key, -1) + 1
        action = Action(stage, ACTIONS[code], microbatch)
        for tile, (d, t) in enumerate(tiles):
            rank = job.rank(d, place, t)
            if action.kind == "REDUCE_GRAD":
                span = flows[rank, Action(stage, "REDUCE_GRAD")]
            elif (rank, action) in flows:
                span = flows[rank, action]
            else:
                span = works[rank, action][number]
            start[row, tile], end[row, tile] = map(to_ticks, span)
    if program.tiling is None:
        return Timeline(start[:, 0], end[:, 0])
    return Timeline(start, end, np.arange(len(tiles)))


def _works(job: Job, spans: Spans) -> dict[tuple[int, Action], list[tuple[float, float]]]:
    """Return work and sums of each action of each rank, in order."""
    found: dict[tuple[int, Action], list[tuple[float, float]]] = {}
    for rank in range(job.world_size):
        since = None
        for i, (action, part) in enumerate(job.parts(rank)):
            begin, end = spans[rank][i]
            if part.kind in ("send", "launch"):
                since = begin if since is None else since
            elif part.kind == "work":
                begin = begin if since is None else since
                found.setdefault((rank, action), []).append((begin, end))
                since = None
            elif part.kind == "sum":
                come = max(spans[peer][i][0] for peer in job.peers(rank))
                found[rank, action].append((min(come, end), end))
            else:
                since = None
    return found


def _flows(job: Job, spans: Spans) -> dict[tuple[int, Action], tuple[float, float]]:
    """Return messages at both ends, and the sums of gradients of each stage."""
    begins = {
        (rank, action): spans[rank][i]
        for rank in range(job.world_size)
        for i, (action, part) in enumerate(job.parts(rank))
        if part.kind in ("send", "receive", "launch", "wait")
    }
    found: dict[tuple[int, Action], tuple[float, float]] = {}
    for (rank, action), (begin, end) in begins.items():
        if action.kind.startswith("SEND"):
            to = job.peer(rank, action), job.other_side(action)
            both = begin, max(end, begins[to][1])
            found[rank, action] = found[to] = both
        elif action.kind == "REDUCE_GRAD":
            sharers = job.sharers(rank, action.stage)
            come = max(begins[r, Action(action.stage, "REDUCE_GRAD")][0] for r in sharers)
            over = begins.get((rank, Action(action.stage, "OPT")), (come, come))[1]
            found[rank, action] = come, max(come, over)
    return found


def shares(program: Program, timeline: Timeline) -> tuple[float, float]:
    """Return the shares of a step that are bubble and exposed communication, means over ranks."""
    begin: Int64 = timeline.columns[0].min()
    parts = breakdown(program, timeline, int(begin), timeline.makespan)
    exposed = parts.of(*COMMUNICATION) / parts.window
    return float(parts.bubble_fraction.mean()), float(exposed.mean())
