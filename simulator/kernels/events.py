"""Start and end of every op by events in order of (tick, op): for programs in which ops queue.

Ops are numbered op of the tile x columns + column, so their order is that of op ids. At one tick
all ops that end are completed first, with whatever starts and ends at that tick because of them;
then free servers are granted to the requests that wait, first come first served by (tick of
request, op id); and so on until nothing is left of the tick.
"""

from __future__ import annotations

import numpy as np

from simulator.kernels.jit import prepared_numba

njit = prepared_numba().njit


@njit(cache=True, inline="always")
def _push(heap_tick, heap_op, size, tick, op):  # type: ignore[no-untyped-def]
    """Add to a four-way heap of (tick, op)."""
    i = size
    while i > 0:
        up = (i - 1) >> 2
        if heap_tick[up] < tick or (heap_tick[up] == tick and heap_op[up] < op):
            break
        heap_tick[i] = heap_tick[up]
        heap_op[i] = heap_op[up]
        i = up
    heap_tick[i] = tick
    heap_op[i] = op


@njit(cache=True, inline="always")
def _pop(heap_tick, heap_op, size):  # type: ignore[no-untyped-def]
    """Remove the first of a heap that holds `size`; what was first is no longer in it."""
    last = size - 1
    tick = heap_tick[last]
    op = heap_op[last]
    i = 0
    while True:
        low = 4 * i + 1
        if low >= last:
            break
        best = low
        for k in range(low + 1, min(low + 4, last)):
            if heap_tick[k] < heap_tick[best] or (
                heap_tick[k] == heap_tick[best] and heap_op[k] < heap_op[best]
            ):
                best = k
        if tick < heap_tick[best] or (tick == heap_tick[best] and op < heap_op[best]):
            break
        heap_tick[i] = heap_tick[best]
        heap_op[i] = heap_op[best]
        i = best
    heap_tick[i] = tick
    heap_op[i] = op


@njit(cache=True)
def prepare(pred_offset, previous, member_offset, class_size, joint_partition, columns):  # type: ignore[no-untyped-def]
    """Return what each op still waits for, and the members that each joint instance misses.

    Instance (joint, class) is number joint x columns + class; its members are the joint op's ops
    on every column of the class.
    """
    n = len(previous)
    waiting = np.empty(n * columns, np.int32)
    for i in range(n):
        count = pred_offset[i + 1] - pred_offset[i] + (1 if previous[i] >= 0 else 0)
        for c in range(columns):
            waiting[i * columns + c] = count
    joints = len(joint_partition)
    missing = np.zeros(joints * columns, np.int32)
    for j in range(joints):
        ops = member_offset[j + 1] - member_offset[j]
        for k in range(columns):
            missing[j * columns + k] = ops * class_size[joint_partition[j], k]
    return waiting, missing


@njit(cache=True)
def run_events(  # type: ignore[no-untyped-def]
    budget, state, waiting, missing, next_offset, nexts, joint, member_offset, members,
    joint_partition, class_of_column, class_offset, class_columns, slot, free, queue_offset,
    queue_size, queue_tick, queue_op, heap_tick, heap_op, ready, ticks, start, end,
):  # fmt: skip
    """Run until no event is left, or `budget` ops have ended; return the ops that ended.

    `state` is (heap size, 1 when the first ops have been made ready, the tick): it carries a run
    from one call to the next, so that the caller can listen to interrupts between them.
    """
    columns = start.shape[1]
    stride = 1 if ticks.shape[1] > 1 else 0
    size = state[0]
    slots = len(free)
    completed = 0
    num_ready = 0
    now = state[2]
    requests = 0
    for s in range(slots):
        requests += queue_size[s]
    if state[1] == 0:
        state[1] = 1
        for op in range(len(waiting)):
            if waiting[op] == 0:
                ready[num_ready] = op
                num_ready += 1
    while True:
        # Start what is ready: alone, or when the last member of a joint op has come.
        while num_ready > 0:
            num_ready -= 1
            op = ready[num_ready]
            i = op // columns
            c = op - i * columns
            j = joint[i]
            if j >= 0:
                partition = joint_partition[j]
                k = class_of_column[partition, c]
                instance = j * columns + k
                missing[instance] -= 1
                if missing[instance] == 0:
                    for m in range(member_offset[j], member_offset[j + 1]):
                        o = members[m]
                        for x in range(class_offset[partition, k], class_offset[partition, k + 1]):
                            d = class_columns[partition, x]
                            start[o, d] = now
                            _push(
                                heap_tick,
                                heap_op,
                                size,
                                now + ticks[o, d * stride],
                                o * columns + d,
                            )
                            size += 1
            elif slot[i] >= 0:
                s = slot[i] * columns + c
                base = queue_offset[s]
                view_tick = queue_tick[base : queue_offset[s + 1]]
                view_op = queue_op[base : queue_offset[s + 1]]
                _push(view_tick, view_op, queue_size[s], now, op)
                queue_size[s] += 1
                requests += 1
            else:
                start[i, c] = now
                _push(heap_tick, heap_op, size, now + ticks[i, c * stride], op)
                size += 1
        if requests > 0 and (size == 0 or heap_tick[0] > now):
            # The tick is quiet: grant servers, each queue in order of (tick of request, op id).
            for s in range(slots):
                base = queue_offset[s]
                view_tick = queue_tick[base : queue_offset[s + 1]]
                view_op = queue_op[base : queue_offset[s + 1]]
                while free[s] > 0 and queue_size[s] > 0:
                    op = view_op[0]
                    _pop(view_tick, view_op, queue_size[s])
                    queue_size[s] -= 1
                    free[s] -= 1
                    requests -= 1
                    i = op // columns
                    c = op - i * columns
                    start[i, c] = now
                    _push(heap_tick, heap_op, size, now + ticks[i, c * stride], op)
                    size += 1
        if size == 0 or completed >= budget:
            state[0] = size
            state[2] = now
            return completed
        now = heap_tick[0]
        op = heap_op[0]
        _pop(heap_tick, heap_op, size)
        size -= 1
        completed += 1
        i = op // columns
        c = op - i * columns
        end[i, c] = now
        if slot[i] >= 0:
            free[slot[i] * columns + c] += 1
        for k in range(next_offset[i], next_offset[i + 1]):
            t = nexts[k] * columns + c
            waiting[t] -= 1
            if waiting[t] == 0:
                ready[num_ready] = t
                num_ready += 1
