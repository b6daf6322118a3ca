"""What one rank did, as columns: work of its device or its host, communication, copies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from simulator.exchange.kineto.calls import IS_COMMUNICATION, Call, call_of
from simulator.exchange.kineto.events import Int64, Recorded, Spans, outermost, recorded
from simulator.exchange.kineto.files import Document
from simulator.exchange.kineto.labels import (
    BACKWARD,
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
    lanes, calls = _placed(spans, calls, labels, rank)
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
    """Return the ranges of actions, and collectives of gloo that these do not name."""
    ranges = events.ranges
    chosen = dict.fromkeys(actions.spans.names)
    if ACTION_CODE["REDUCE_GRAD"] not in actions.action:
        chosen |= dict.fromkeys(
            n for n in ranges.names if n.startswith("gloo:") and n[5:9] not in ("send", "recv")
        )
    spans = ranges.some(np.array([name in chosen for name in ranges.names], bool))
    return spans, np.full(len(spans), NONE, np.int64), [
        "no kernels: ops are the ranges that name actions, with all that ran inside them, waits too"
    ]  # fmt: skip


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
    spans: Spans, calls: list[Call | None], labels: Labels, rank: int
) -> tuple[list[str], list[Call | None]]:
    """Return the stream of each op; messages and sums that ranges name become calls."""
    lanes, found = [], []
    for i, (name, call) in enumerate(zip(spans.names, calls, strict=True)):
        kind = ACTIONS[labels.action[i]]
        if call is None and name.startswith("PP:") and kind in MESSAGES:
            call = Call(kind.partition("_")[0].lower(), "", (), "pp", 0.0)
        elif call is None and name.startswith("PP:") and kind == "REDUCE_GRAD":
            call = Call("all_reduce", "", (), "dp", 0.0)
        elif call is not None:
            labels.action[i] = ACTION_CODE[_action(call, kind, rank)]
        found.append(call)
        lanes.append(_lane(name, call, ACTIONS[labels.action[i]]))
    return lanes, found


def _action(call: Call, kind: str, rank: int) -> str:
    """Return the action of a call: messages go forward to higher ranks, sums of dp reduce."""
    if call.operation in ("send", "recv"):
        if kind in MESSAGES or call.peer is None:
            forward = kind != "SEND_B" and kind != "RECV_B"
        else:
            forward = (call.peer > rank) == (call.operation == "send")
        return f"{call.operation.upper()}_{'F' if forward else 'B'}"
    if call.axis == "dp" and call.operation in ("all_reduce", "reduce_scatter") and kind == "B":
        return "REDUCE_GRAD"
    return kind


def _lane(name: str, call: Call | None, kind: str) -> str:
    if call is None:
        return next((lane for word, lane in COPIES.items() if word in name), COMPUTE)
    if call.axis == "pp" and kind in MESSAGES:
        return MESSAGES[kind]
    return f"{call.axis} {call.group}".rstrip()
