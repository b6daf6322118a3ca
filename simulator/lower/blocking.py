"""What blocks: messages between stages that are waited for, gradients that wait for all others."""

from __future__ import annotations

import numpy as np

from simulator.lower.grid import COMPLETING
from simulator.lower.pipeline import SUMS, Template
from simulator.lower.segments import COMPUTE
from simulator.program import ACTION_CODE, NONE, Int32, Int64

SENDS = (ACTION_CODE["SEND_F"], ACTION_CODE["SEND_B"])
MESSAGES = (*SENDS, ACTION_CODE["RECV_F"], ACTION_CODE["RECV_B"])


def gradients(t: Template) -> Int32:
    """Return (pairs, 2): sums of gradients, and the rank's last backward of the step.

    So gradients are reduced when all are complete: Megatron-LM without ``--overlap-grad-reduce``.
    """
    backward = np.isin(t.action, COMPLETING)
    sums = np.flatnonzero(backward & np.isin(t.stream, SUMS))
    works = np.flatnonzero(backward & (t.stream == COMPUTE))
    where = t.rank.astype(np.int64) * (int(t.step.max(initial=0)) + 1) + t.step
    last = np.full(int(where.max(initial=0)) + 1, NONE)
    np.maximum.at(last, where[works], works)
    found: Int32 = np.stack([sums, last[where[sums]]], axis=1).astype(np.int32)
    return found


def messages(t: Template, *, in_one_go: bool, eager: bool) -> Int32:
    """Return (pairs, 2): an op of a pipeline replica, and what it waits for because of blocking.

    A rank computes, then posts the sends of what it has computed and the receives of what it needs
    next, all at once, and computes again when all of them have ended: Megatron-LM's communication
    without ``--overlap-p2p-communication`` (megatron/core/pipeline_parallel/schedules.py). A pair
    of actions is computed in one go. So are, with `in_one_go`, a forward and the backward after it,
    as there with several chunks, but where a rank computes all its forwards first. With `eager`
    a receive is no reason for its sender to wait: it is posted from the beginning.
    """
    order = np.argsort(t.rank, kind="stable")
    rank, stream, action = t.rank[order], t.stream[order], t.action[order]
    works, sent = np.flatnonzero(stream == COMPUTE), np.flatnonzero(np.isin(action, MESSAGES))
    if not len(works) or not len(sent):
        return np.zeros((0, 2), np.int32)
    unit = _units(t, order[works], in_one_go)
    bounds = np.append(np.flatnonzero(np.diff(unit, prepend=NONE)), len(works))
    first, last = works[bounds[:-1]], works[bounds[1:] - 1]
    at = np.searchsorted(works, sent)
    behind = unit[np.minimum(at, len(works) - 1)] + (at == len(works))  # unit of the next work
    inside = (at > 0) & (at < len(works)) & (unit[np.maximum(at - 1, 0)] == behind)
    behind = behind + (inside & np.isin(action[sent], SENDS))  # a send: when all is computed
    nothing = np.array([NONE])
    posted = np.isin(action[sent], SENDS) | (not eager)  # when what is before it is computed
    pairs: Int64 = np.concatenate([
        np.stack([np.append(first, nothing)[behind], sent], axis=1),
        np.stack([sent, np.append(nothing, last)[behind]], axis=1)[posted],
    ])  # fmt: skip
    pairs = pairs[(pairs != NONE).all(axis=1)]
    pairs = pairs[rank[pairs[:, 0]] == rank[pairs[:, 1]]]
    found: Int32 = order[pairs].astype(np.int32)
    return found


def _units(t: Template, works: Int64, in_one_go: bool) -> Int64:
    """Return the number of the run of works that each work is computed in, from 0."""
    columns = [x[works] for x in (t.rank, t.listed, t.step)]
    changes = np.any([np.diff(x) != 0 for x in columns], axis=0)
    if in_one_go:
        rank, action, step = t.rank[works], t.action[works], t.step[works]
        forward, backward = action == ACTION_CODE["F"], action == ACTION_CODE["B"]
        place, where = np.arange(len(works)), rank * (int(step.max()) + 1) + step
        first = np.full(int(where.max()) + 1, len(works))
        last = np.full(len(first), NONE)
        np.minimum.at(first, where[backward], place[backward])
        np.maximum.at(last, where[forward], place[forward])
        pair = forward[:-1] & backward[1:] & (rank[:-1] == rank[1:])
        changes &= ~(pair & (first < last)[where[1:]])
    units: Int64 = np.concatenate([[0], np.cumsum(changes)])
    return units
