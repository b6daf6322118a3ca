"""To which step, action, stage and microbatch each span of a rank belongs.

Ranges named as torch.distributed.pipelining names them (``PP:0F1``), and ``Forward 1`` of its
simpler schedules, say it. Elsewhere what autograd's engine launches is backward, what an
optimizer's step or anything after a step's last backward launches is optimizer, the rest is
forward; a turn from backward to forward begins the next microbatch.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.exchange.kineto.events import Int64, Recorded, Spans, innermost
from simulator.program import ACTION_CODE, NONE

PIPELINE = re.compile(
    r"PP:(\d+)(SEND_F|SEND_B|RECV_F|RECV_B|REDUCE_GRAD|SF|SB|RF|RB|AR|OPT|F|B|I|W)(\d*)"
)
SIMPLE = re.compile(r"(F)orward (\d+)|(B)ackward (\d+)")
STEP = re.compile(r"ProfilerStep#(\d+)")

KINDS = {"SF": "SEND_F", "SB": "SEND_B", "RF": "RECV_F", "RB": "RECV_B", "AR": "REDUCE_GRAD"}
"""Short names of actions."""

UPDATES = ("Optimizer.step#", "Optimizer.zero_grad#")
BACKWARD = "autograd::engine::evaluate_function"

FORWARD, BACK, UPDATE = ACTION_CODE["F"], ACTION_CODE["B"], ACTION_CODE["OPT"]
PASSES = [ACTION_CODE[kind] for kind in ("B", "I", "W")]


class Actions(NamedTuple):
    """Ranges of a rank that name actions."""

    spans: Spans
    action: Int64
    stage: Int64
    microbatch: Int64
    occurrence: Int64
    """How often the same name came before."""

    def __len__(self) -> int:
        return len(self.spans)


class Labels(NamedTuple):
    """An entry for each span."""

    step: Int64
    """Number that the profiler gave it, or of the occurrence of its action; NONE outside all."""
    action: Int64
    stage: Int64
    microbatch: Int64


def actions_of(ranges: Spans) -> Actions:
    """Return the ranges that name actions, in the order in which they began."""
    rows, at, seen = [], [], dict[str, int]()
    for i, name in enumerate(ranges.names):
        parsed = _parse(name)
        if parsed is not None:
            rows.append((*parsed, seen.get(name, 0)))
            seen[name] = seen.get(name, 0) + 1
            at.append(i)
    mask = np.zeros(len(ranges), bool)
    mask[at] = True
    columns = np.array(rows, np.int64).reshape(-1, 4).T
    return Actions(ranges.some(mask), *columns)


def _parse(name: str) -> tuple[int, int, int] | None:
    """Return the action, stage and microbatch that a range's name says."""
    if found := PIPELINE.fullmatch(name):
        kind = KINDS.get(found[2], found[2])
        number = NONE if kind == "OPT" or not found[3] else int(found[3])
        return ACTION_CODE[kind], int(found[1]), number
    if found := SIMPLE.fullmatch(name):
        return ACTION_CODE[found[1] or found[3]], NONE, int(found[2] or found[4])
    return None


def steps_of(ranges: Spans) -> Spans:
    """Return the ranges of the profiler's steps."""
    return ranges.some(np.array([bool(STEP.fullmatch(name)) for name in ranges.names], bool))


def step_numbers(steps: Spans) -> Int64:
    """Return the number in the name of each step."""
    return np.array([int(name.partition("#")[2]) for name in steps.names], np.int64)


def label(
    recorded: Recorded, actions: Actions, when: Int64, computes: npt.NDArray[np.bool_]
) -> Labels:
    """Return the labels of spans.

    Args:
        recorded: the rank.
        actions: its ranges that name actions.
        when: the host launched each span, in order or not.
        computes: which spans compute; only these make turns.
    """
    ranges = recorded.ranges
    steps = steps_of(ranges)
    named = innermost(actions.spans, when)
    has = named != NONE
    updating = ranges.some(np.array([n.startswith(UPDATES) for n in ranges.names], bool))
    engine = recorded.operators.some(
        np.array([n.startswith(BACKWARD) for n in recorded.operators.names], bool)
    )
    action = np.where(innermost(engine, when) != NONE, BACK, FORWARD)
    action[innermost(updating, when) != NONE] = UPDATE
    action[has] = actions.action[named[has]]
    stage, microbatch = np.full(len(when), NONE), np.full(len(when), NONE)
    stage[has], microbatch[has] = actions.stage[named[has]], actions.microbatch[named[has]]
    if len(steps):
        at = innermost(steps, when)
        step = np.where(at == NONE, NONE, step_numbers(steps)[at])
    elif len(actions):
        step = np.where(has, actions.occurrence[named], NONE)
    else:
        step = np.zeros(len(when), np.int64)
    if not len(actions):
        action, microbatch = _by_turns(step, action, when, computes)
    return Labels(step, action, stage, microbatch)


def _by_turns(
    step: Int64, action: Int64, when: Int64, computes: npt.NDArray[np.bool_]
) -> tuple[Int64, Int64]:
    """Return actions and microbatches of a step without names: a turn from B to F begins the next.

    What comes after the last backward of its step is the optimizer's: clipping, averages.
    """
    order = np.lexsort((when, step))
    action, microbatch = action.copy(), np.full(len(when), NONE, np.int64)
    for number in np.unique(step).tolist():
        mine = order[step[order] == number]
        last = np.flatnonzero(action[mine] == BACK)
        if len(last):
            after = mine[last[-1] + 1 :]
            action[after[action[after] == FORWARD]] = UPDATE
        passes = mine[action[mine] != UPDATE]
        turning = passes[computes[passes]]
        turns = np.flatnonzero((action[turning][:-1] == BACK) & (action[turning][1:] == FORWARD))
        microbatch[passes] = np.searchsorted(when[turning[turns + 1]], when[passes], side="right")
    return action, microbatch
