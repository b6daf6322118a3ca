"""What one rank did, as columns: work of its device or its host, communication, copies."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from simulator.exchange.kineto.calls import IS_COMMUNICATION, Call, call_of
from simulator.exchange.kineto.events import Int64, Recorded, Spans, outermost, recorded
from simulator.exchange.kineto.files import Document
from simulator.exchange.kineto.labels import (
    BACKWARD,
    UPDATES,
    Actions,
    Labels,
    actions_of,
    label,
    step_numbers,
    steps_of,
)
from simulator.program import ACTION_CODE, ACTIONS, NONE

COMPUTE, BESIDE = "compute", "beside"
COPIES = {"HtoD": "copy HtoD", "DtoH": "copy DtoH"}
"""Streams of copies between host and device, by what their names say."""

GLOO_RECEIVE = "gloo:recv"
GLOO_SUMS = ("gloo:all_reduce", "gloo:reduce_scatter")
POSTS = re.compile(r"PP:\d+RECV_[FB]\d+")
PASSES = re.compile(r"PP:\d+[FBI]\d+")

MESSAGES = {"SEND_F": "send F", "RECV_F": "recv F", "SEND_B": "send B", "RECV_B": "recv B"}


@dataclass(slots=True)
class RankOps:
    """Ops of a rank; times in nanoseconds of its host's clock."""

    rank: int
    names: list[str]
    start: Int64
    end: Int64
    launched: Int64
    """When the host launched each op, or -1 where nothing says."""
    labels: Labels
    lanes: list[str]
    """Stream of each op."""
    calls: list[Call | None]
    steps: dict[int, int]
    """When each step of the profiler began, by its number."""
    notes: list[str]
    """What is worth knowing of this trace, without the rank."""


def rank_ops(document: Document, rank: int, axes: Mapping[str, str]) -> RankOps:
    """Return what a rank did.

    Where there are kernels of a device, they are the ops; else ranges that name actions; else the
    operators of the host that lie in no other one.
    """
    events = recorded(document)
    actions = actions_of(events.ranges)
    if len(events.device):
        spans, launched, notes = _of_device(events)
    elif len(actions):
        spans, launched, notes = _of_actions(events, actions)
    else:
        spans, launched, notes = _of_host(events)
    notes += [f"{events.skipped} events have no name or no times"] * (events.skipped > 0)
    calls = _calls(spans, events, document, axes)
    when = np.where(launched == NONE, spans.start, launched)
    labels = label(events, actions, when, np.array([c is None for c in calls], bool))
    sums = set(actions.spans.start[_sums(events, actions)].tolist())
    lanes, calls = _placed(spans, calls, labels, rank, sums)
    steps = steps_of(events.ranges)
    return RankOps(
        rank=rank, names=spans.names, start=spans.start, end=spans.end, launched=launched,
        labels=labels, lanes=lanes, calls=calls,
        steps=dict(zip(step_numbers(steps).tolist(), steps.start.tolist(), strict=True)),
        notes=notes,
    )  # fmt: skip


def _of_device(events: Recorded) -> tuple[Spans, Int64, list[str]]:
    launched = events.launched()
    lost = int((launched == NONE).sum())
    notes = []
    if lost:
        notes.append(
            f"{lost} of {len(launched)} kernels have no launch; they count to where they ran"
        )
    devices = {a.get("device") for a in events.device.args} - {None}
    if len(devices) > 1:
        notes.append(f"kernels of {len(devices)} devices count as one rank's")
    return events.device, launched, notes


def _of_actions(events: Recorded, actions: Actions) -> tuple[Spans, Int64, list[str]]:
    """Return the ranges of actions, with sums of gloo and updates that these do not name."""
    ranges = events.ranges
    chosen = dict.fromkeys(actions.spans.names)
    if not _sums(events, actions).any():
        chosen |= dict.fromkeys(
            n for n in ranges.names if n.startswith("gloo:") and n[5:9] not in ("send", "recv")
        )
    if ACTION_CODE["OPT"] not in actions.action:
        chosen |= dict.fromkeys(n for n in ranges.names if n.startswith(UPDATES))
    spans = ranges.some(np.array([name in chosen for name in ranges.names], bool))
    cut = _waits_cut(spans, ranges.some(np.array([n == GLOO_RECEIVE for n in ranges.names], bool)))
    return spans, np.full(len(spans), NONE, np.int64), [
        "no kernels: ops are the ranges that name actions, with all that ran inside them"
        + (f"; {cut} of them begin where the message was there that they waited for" if cut
           else ", waits too")
    ]  # fmt: skip


def _waits_cut(spans: Spans, receives: Spans) -> int:
    """Take waits for messages off the head of passes, in place, and return of how many.

    Torch's pipeline runtime posts a receive in a range of its own, ``PP:1RECV_F0``, and waits for
    it at the head of the pass that needs it; gloo's own range lasts until the wait is over.
    """
    cut = 0
    for i, (name, start, end) in enumerate(
        zip(spans.names, spans.start.tolist(), spans.end.tolist(), strict=True)
    ):
        if POSTS.fullmatch(name):
            inside = (receives.start >= start) & (receives.start < end)
            spans.end[i] = max([end, *receives.end[inside].tolist()])
        elif PASSES.fullmatch(name):
            waited = (receives.start < start) & (receives.end > start) & (receives.end < end)
            spans.start[i] = max([start, *receives.end[waited].tolist()])
            cut += int(waited.any())
    return cut


def _sums(events: Recorded, actions: Actions) -> npt.NDArray[np.bool_]:
    """Return which ranges of actions sum gradients: a sum of gloo begins inside them."""
    sums = np.array([
        start for name, start in zip(events.ranges.names, events.ranges.start, strict=True)
        if name in GLOO_SUMS
    ], np.int64)  # fmt: skip
    return np.array([
        kind == ACTION_CODE["REDUCE_GRAD"] and bool(((sums >= start) & (sums < end)).any())
        for kind, start, end in zip(
            actions.action.tolist(), actions.spans.start.tolist(), actions.spans.end.tolist(),
            strict=True,
        )
    ], bool)  # fmt: skip


def _of_host(events: Recorded) -> tuple[Spans, Int64, list[str]]:
    operators = events.operators.some(outermost(events.operators))
    operators = operators.some(
        np.array([not n.startswith(("c10d::", "record_param")) for n in operators.names], bool)
    )
    calls = events.ranges.some(np.array([n.startswith("gloo:") for n in events.ranges.names], bool))
    rows = [
        *zip(operators.start.tolist(), operators.end.tolist(), operators.names,
             operators.threads, operators.args, strict=True),
        *zip(calls.start.tolist(), calls.end.tolist(), calls.names, calls.threads, calls.args,
             strict=True),
    ]  # fmt: skip
    rows.sort(key=lambda row: row[:2])
    start, end, names, threads, args = zip(*rows, strict=True) if rows else ([], [], [], [], [])
    spans = Spans([n.removeprefix(f"{BACKWARD}: ") for n in names], np.array(start, np.int64),
                  np.array(end, np.int64), list(threads), list(args))  # fmt: skip
    return spans, np.full(len(spans), NONE, np.int64), [
        "no kernels: ops are the operators of the host; time between them is the interpreter's, "
        "and counts as stall"
    ]  # fmt: skip


def _calls(
    spans: Spans, events: Recorded, document: Document, axes: Mapping[str, str]
) -> list[Call | None]:
    """Return what each span that communicates is; arguments may lie at its operator."""
    said: dict[Any, Mapping[str, Any]] = {
        a["External id"]: a
        for name, a in zip(events.operators.names, events.operators.args, strict=True)
        if name == "record_param_comms" and "External id" in a
    }
    calls: list[Call | None] = []
    for name, args in zip(spans.names, spans.args, strict=True):
        if "Collective name" not in args and not IS_COMMUNICATION.search(name):
            calls.append(None)
            continue
        more = said.get(args.get("External id"), {})
        calls.append(call_of(name, {**more, **args}, document.groups, axes))
    return calls


def _placed(
    spans: Spans, calls: list[Call | None], labels: Labels, rank: int, sums: set[int]
) -> tuple[list[str], list[Call | None]]:
    """Return the stream of each op; messages and sums that ranges name become calls.

    `sums` are when ranges begin that sum gradients.
    """
    lanes, found = [], []
    for i, (name, call) in enumerate(zip(spans.names, calls, strict=True)):
        kind = ACTIONS[labels.action[i]]
        if call is None and name.startswith("PP:") and kind in MESSAGES:
            call = Call(kind.partition("_")[0].lower(), "", (), "pp", 0.0)
        elif call is None and name.startswith("PP:") and int(spans.start[i]) in sums:
            call = Call("all_reduce", "", (), "dp", 0.0)
        elif call is not None:
            labels.action[i] = ACTION_CODE[_action(name, call, kind, rank)]
        found.append(call)
        lanes.append(_lane(name, call, ACTIONS[labels.action[i]]))
    return lanes, found


def _action(name: str, call: Call, kind: str, rank: int) -> str:
    """Return the action of a call: messages go forward to higher ranks, sums of dp reduce.

    Gloo's own thread may begin a sum after the backward that asked for it.
    """
    if call.operation in ("send", "recv"):
        if kind in MESSAGES or call.peer is None:
            forward = kind != "SEND_B" and kind != "RECV_B"
        else:
            forward = (call.peer > rank) == (call.operation == "send")
        return f"{call.operation.upper()}_{'F' if forward else 'B'}"
    if (
        call.axis == "dp"
        and call.operation in ("all_reduce", "reduce_scatter")
        and (kind == "B" or (kind == "OPT" and name.startswith("gloo:")))
    ):
        return "REDUCE_GRAD"
    return kind


def _lane(name: str, call: Call | None, kind: str) -> str:
    if call is None:
        return next((lane for word, lane in COPIES.items() if word in name), COMPUTE)
    if call.axis == "pp" and kind in MESSAGES:
        return MESSAGES[kind]
    return f"{call.axis} {call.group}".rstrip()
