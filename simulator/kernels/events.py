"""Start and end of every op by events in order of (tick, number): for programs in which ops queue
at desks or flows share links.

Ops are numbered op of the tile x columns + column, so their order is that of op ids. At one tick
all ops that end are completed first, with whatever starts and ends at that tick because of them.
When the tick has come to rest, free servers are granted to the requests that wait, first come
first served by (tick of request, op id); and so on until nothing is left of the tick. Then flows
whose links were entered or left have their rates set anew, with those that they share links with.
"""

from __future__ import annotations

import numpy as np

from simulator.kernels import pauses, sharing
from simulator.kernels.heap import pop, pop_event, push, push_event
from simulator.kernels.jit import prepared_numba
from simulator.kernels.links import component, enter_links, free_nodes, leave_links, sort

njit = prepared_numba().njit
advance, share, foresee = (
    njit(cache=True)(f) for f in (sharing.advance, sharing.share, sharing.foresee)
)
resumed = njit(cache=True)(pauses.resumed)
NEVER = np.iinfo(np.int64).max


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
    queue_size, queue_tick, queue_op, heap_tick, heap_op, pool, nodes, ready, ended, ticks,
    pausing, phase, period, pause, start, end, demand, offset, links, coefficient, weight, limit,
    solo, size_of, capacity, left, pressure,
    users, remaining, since, rate, finish, due, active, first, heads, is_touched, touched, seen,
    found,
):  # fmt: skip
    """Run until no event is left, `budget` ops have ended, or room is short; return ops ended.

    `state` is (heap size, 1 when the first ops have been made ready, the tick, flows' entries in
    the heap, flows touched at this tick, most ops that run at once, most links of a demand, 1 when
    room is short). It carries a run from one call to the next, so that the caller can hear
    interrupts and make room between them.

    Numbers in the heap: an op that ends; `ops + flow` for a flow that enters its links; and
    `ops + flows + flow` for one that ends, unless its end has moved. Of flows that share links only
    the first to end has its end in the heap (`due`): when it leaves, all others are foreseen anew.
    """
    columns = start.shape[1]
    stride = 1 if ticks.shape[1] > 1 else 0
    num_ops, num_flows, slots = len(waiting), len(demand), len(free)
    size, now, entries, num_touched = state[0], state[2], state[3], state[4]
    completed = num_ready = requests = 0
    for s in range(slots):
        requests += queue_size[s]
    if state[1] == 0:
        state[1] = 1
        for op in range(num_ops):
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
                flow = j * columns + k
                missing[flow] -= 1
                if missing[flow] > 0:
                    continue
                fluid = num_flows > 0 and demand[flow] >= 0
                latency = 0
                for m in range(member_offset[j], member_offset[j + 1]):
                    o = members[m]
                    for x in range(class_offset[partition, k], class_offset[partition, k + 1]):
                        d = class_columns[partition, x]
                        start[o, d] = now
                        if fluid:
                            latency = max(latency, ticks[o, d * stride])
                        else:
                            t = now + ticks[o, d * stride]
                            push_event(heap_tick, heap_op, size, t, o * columns + d)
                            size += 1
                if fluid:
                    push_event(heap_tick, heap_op, size, now + latency, num_ops + flow)
                    size += 1
                    entries += 1
            elif slot[i] >= 0:
                s = slot[i] * columns + c
                base = queue_offset[s]
                view_tick = queue_tick[base : queue_offset[s + 1]]
                view_op = queue_op[base : queue_offset[s + 1]]
                push(view_tick, view_op, queue_size[s], now, op)
                queue_size[s] += 1
                requests += 1
            else:
                start[i, c] = now
                t = now + ticks[i, c * stride]
                if pausing[i] >= 0 and phase[pausing[i], c] >= 0:
                    t = resumed(now, t - now, period, pause, phase[pausing[i], c])
                push_event(heap_tick, heap_op, size, t, op)
                size += 1
        if requests > 0 and (size == 0 or heap_tick[0] > now):
            # The tick is at rest: grant servers, each queue in order of (tick of request, op id).
            for s in range(slots):
                base = queue_offset[s]
                view_tick = queue_tick[base : queue_offset[s + 1]]
                view_op = queue_op[base : queue_offset[s + 1]]
                while free[s] > 0 and queue_size[s] > 0:
                    op = view_op[0]
                    pop(view_tick, view_op, queue_size[s])
                    queue_size[s] -= 1
                    free[s] -= 1
                    requests -= 1
                    i = op // columns
                    c = op - i * columns
                    start[i, c] = now
                    t = now + ticks[i, c * stride]
                    if pausing[i] >= 0 and phase[pausing[i], c] >= 0:
                        t = resumed(now, t - now, period, pause, phase[pausing[i], c])
                    push_event(heap_tick, heap_op, size, t, op)
                    size += 1
        if num_touched > 0 and (size == 0 or heap_tick[0] > now):
            # Share anew the links of flows that came, and of those that met flows that left.
            total = 0
            for t in range(num_touched):
                f = touched[t]
                is_touched[f] = False
                if not active[f] or seen[f]:
                    continue
                count = component(f, seen, found[total:], first, nodes, heads, users)
                flows = found[total : total + count]
                sort(flows)
                total += count
                advance(flows, now, remaining, since, rate)
                if count == 1:
                    rate[f] = solo[demand[f]]
                else:
                    share(
                        flows, demand, offset, links, coefficient, weight, limit, capacity, left,
                        pressure, users, rate,
                    )  # fmt: skip
                foresee(flows, now, remaining, rate, finish)
                first_end = NEVER
                for x in range(count):
                    first_end = min(first_end, finish[flows[x]])
                for x in range(count):
                    g = flows[x]
                    if finish[g] == first_end and due[g] != first_end:
                        due[g] = first_end
                        push_event(heap_tick, heap_op, size, finish[g], num_ops + num_flows + g)
                        size += 1
                        entries += 1
            for x in range(total):
                seen[found[x]] = False
            num_touched = 0
        short = num_flows > 0 and (
            pool[1] < state[6] or len(heap_tick) < 3 * state[5] + entries + 8
        )
        if size == 0 or completed >= budget or short:
            state[0], state[2], state[3], state[4] = size, now, entries, num_touched
            state[7] = 1 if short and size > 0 else 0
            return completed
        now = heap_tick[0]
        number = heap_op[0]
        pop_event(heap_tick, heap_op, size)
        size -= 1
        num_ended = 0
        if number < num_ops:
            ended[0] = number
            num_ended = 1
        elif number < num_ops + num_flows:
            f = number - num_ops
            entries -= 1
            active[f] = True
            remaining[f] = size_of[demand[f]]
            since[f] = now
            rate[f] = 0.0
            due[f] = NEVER
            enter_links(f, demand[f], offset, links, first, pool, nodes, heads)
            is_touched[f] = True
            touched[num_touched] = f
            num_touched += 1
        else:
            f = number - num_ops - num_flows
            entries -= 1
            if active[f] and finish[f] == now:
                active[f] = False
                leave_links(f, first, nodes, heads)
                node = first[f]
                while node >= 0:  # somebody on each link that it leaves finds all others there
                    g = heads[nodes[node, 1]]
                    if g >= 0 and not is_touched[nodes[g, 0]]:
                        is_touched[nodes[g, 0]] = True
                        touched[num_touched] = nodes[g, 0]
                        num_touched += 1
                    node = nodes[node, 2]
                free_nodes(f, first, pool, nodes)
                j = f // columns
                k = f - j * columns
                partition = joint_partition[j]
                for m in range(member_offset[j], member_offset[j + 1]):
                    for x in range(class_offset[partition, k], class_offset[partition, k + 1]):
                        ended[num_ended] = members[m] * columns + class_columns[partition, x]
                        num_ended += 1
        for e in range(num_ended):
            op = ended[e]
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
