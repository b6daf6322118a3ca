"""The order in which the ops of a tile can run: every op after what it waits for."""

from __future__ import annotations

import numpy as np

from simulator.kernels.jit import Kernel


@Kernel
def successors(pred_offset, preds, previous):  # type: ignore[no-untyped-def]  # compiled
    """Return, in compressed rows, the ops that wait for each op: dependents, and the next one."""
    n = len(previous)
    offset = np.zeros(n + 2, np.int64)
    for p in preds:
        offset[p + 2] += 1
    for q in previous:
        if q >= 0:
            offset[q + 2] += 1
    for i in range(n):
        offset[i + 2] += offset[i + 1]
    targets = np.empty(offset[n + 1], np.int32)
    for i in range(n):
        for k in range(pred_offset[i], pred_offset[i + 1]):
            p = preds[k]
            targets[offset[p + 1]] = i
            offset[p + 1] += 1
        q = previous[i]
        if q >= 0:
            targets[offset[q + 1]] = i
            offset[q + 1] += 1
    return offset[: n + 1], targets


@Kernel
def order_units(pred_offset, previous, next_offset, nexts, joint, member_offset, members):  # type: ignore[no-untyped-def]
    """Return units (an op, or all members of a joint op) so that each follows what it waits for.

    Units are compressed rows (offset, ops). Fewer ops than there are come back when some wait for
    themselves around a cycle.
    """
    n = len(previous)
    waiting = np.empty(n, np.int32)
    ready = np.empty(n, np.int32)  # first op of each ready unit
    missing = member_offset[1:] - member_offset[:-1]
    num_ready = 0
    for i in range(n):
        waiting[i] = pred_offset[i + 1] - pred_offset[i]
        if previous[i] >= 0:
            waiting[i] += 1
        if waiting[i] == 0:
            j = joint[i]
            if j >= 0:
                missing[j] -= 1
            if j < 0 or missing[j] == 0:
                ready[num_ready] = i
                num_ready += 1
    unit_offset = np.zeros(n + 1, np.int64)
    unit_ops = np.empty(n, np.int32)
    done = units = 0
    while units < num_ready:
        i = ready[units]
        j = joint[i]
        begin = done
        if j < 0:
            unit_ops[done] = i
            done += 1
        else:
            for k in range(member_offset[j], member_offset[j + 1]):
                unit_ops[done] = members[k]
                done += 1
        units += 1
        unit_offset[units] = done
        for m in range(begin, done):
            for k in range(next_offset[unit_ops[m]], next_offset[unit_ops[m] + 1]):
                t = nexts[k]
                waiting[t] -= 1
                if waiting[t] == 0:
                    jt = joint[t]
                    if jt >= 0:
                        missing[jt] -= 1
                    if jt < 0 or missing[jt] == 0:
                        ready[num_ready] = t
                        num_ready += 1
    return unit_offset[: units + 1], unit_ops[:done]
