"""Jobs over days, one sample after the other; `operate/reference.py` says in prose what happens.

A job is in one phase at a time, which ends at a tick unless something breaks before or at it. Whole
steps up to the next such tick are taken at once.
"""

from __future__ import annotations

import numpy as np

from simulator.kernels.jit import Kernel

STEP, SETTLE, SAVE, GROW, DETECT, WAIT, RESCHEDULE, RESTART, RESTORE = range(9)
NEVER = np.iinfo(np.int64).max


@Kernel
def operate_days(  # type: ignore[no-untyped-def]  # compiled
    offset, tick, what, first, numbers, asynchronous, pace, paced, replicas, detection, repair,
    slow_node, category, ticks, interruptions, progress,
):  # fmt: skip
    """Fill `ticks` (samples, categories), `interruptions` (samples, components) and `progress`
    (samples; steps, shares, checkpoints).

    `numbers` are duration, interval, blocked, drain, restore, restart, rescheduling and spares of
    the job; `category` is that of each phase, then those of kept steps, of what a slow node and of
    what missing replicas cost. Steps take, from number `first` (samples) on and round and round,
    what lies between two entries of a row of `pace`: row 0 usually, row 1 with a slow node. Of them
    count as training what lies between entries of `paced` (nodes that are missing, steps + 1).
    """
    (duration, interval, blocked, drain, restore, restart, rescheduling,
     all_spares) = numbers  # fmt: skip
    steps = pace.shape[1] - 1
    training, slow_cost, fewer_cost = category[9], category[10], category[11]
    nodes = len(replicas) - 1
    for sample in range(len(offset) - 1):
        at, last = offset[sample], offset[sample + 1]
        back = np.empty(last - at, np.int64)  # when nodes in repair come back
        away = 0
        now, phase, left = 0, STEP, interval
        nth = first[sample]  # of the steps, the next one
        spares, missing, slow, unplaced, broken = all_spares, 0, 0, False, 0
        # steps, shares, and ticks of training, slow and fewer: now, in writing, and written
        done = np.zeros(5, np.int64)
        writing = np.zeros(5, np.int64)
        written = np.zeros(5, np.int64)
        drained = NEVER  # when what is in writing has been written
        spent = ticks[sample]
        while now < duration:
            row = 1 if slow > 0 else 0
            if phase == STEP:
                until = duration
                if at < last and tick[at] < until:
                    until = tick[at]
                rounds, rest = divmod(pace[row, nth] + until - now - 1, pace[row, steps])
                low, high = 0, steps  # the greatest number of steps that take no more than the rest
                while high - low > 1:
                    middle = (low + high) // 2
                    if pace[row, middle] <= rest:
                        low = middle
                    else:
                        high = middle
                whole = min(left, rounds * steps + low - nth)
                if whole > 0:
                    rounds, then = divmod(nth + whole, steps)
                    took = rounds * pace[row, steps] + pace[row, then] - pace[row, nth]
                    usual = rounds * pace[0, steps] + pace[0, then] - pace[0, nth]
                    useful = paced[missing]
                    kept = rounds * useful[steps] + useful[then] - useful[nth]
                    done[0] += whole
                    done[1] += whole * replicas[missing]
                    done[2] += kept
                    done[3] += took - usual
                    done[4] += usual - kept
                    now += took
                    left -= whole
                    nth = then
                    if left == 0:
                        phase = SETTLE
                        continue
                length = pace[row, nth + 1] - pace[row, nth]
                end = now + length
            elif phase in (SETTLE, GROW):
                end = now
                if drained != NEVER and drained > now:
                    end = drained
            elif phase == SAVE:
                end = now + blocked
            elif phase == DETECT:
                end = now + detection[broken]
            elif phase == WAIT:
                end = NEVER
                for k in range(away):
                    if back[k] < end:
                        end = back[k]
            elif phase == RESCHEDULE:
                end = now + rescheduling
            elif phase == RESTART:
                end = now + restart
            else:
                end = now + restore
            # What breaks on the way.
            stopped = False
            while at < last and tick[at] <= end and not stopped:
                when, kind = tick[at], what[at]
                at += 1
                if kind < 0:
                    slow += 1
                    continue
                if kind == slow_node:
                    slow -= 1
                if repair[kind] >= 0 and missing < nodes:
                    kept = 0  # those that have come back are spares from now on
                    for k in range(away):
                        if back[k] <= when:
                            spares += 1
                        else:
                            back[kept] = back[k]
                            kept += 1
                    back[kept] = when + repair[kind]
                    away = kept + 1
                    missing += 1
                    unplaced = True
                    if phase == WAIT:  # a node may have come back this very tick
                        end = min(end, back[kept])
                if phase == WAIT:
                    continue
                stopped = True
                interruptions[sample, kind] += 1
                spent[category[phase]] += when - now
                if drained < when:
                    written[:] = writing
                drained = NEVER
                spent[category[STEP]] += done[2:].sum() - written[2:].sum()
                done[:] = written
                now, phase, broken = when, DETECT, kind
            if stopped:
                continue
            if end >= duration:
                spent[training if phase == STEP else category[phase]] += duration - now
                break
            if phase == STEP:
                usual = pace[0, nth + 1] - pace[0, nth]
                kept = paced[missing, nth + 1] - paced[missing, nth]
                done[0] += 1
                done[1] += replicas[missing]
                done[2] += kept
                done[3] += length - usual
                done[4] += usual - kept
                left -= 1
                nth = (nth + 1) % steps
                if left == 0:
                    phase = SETTLE
                now = end
                continue
            spent[category[phase]] += end - now
            now = end
            place = False
            if phase in (SETTLE, GROW):
                if drained != NEVER:
                    written[:] = writing
                    drained = NEVER
                place = phase == GROW
                phase = SAVE
            elif phase == SAVE:
                progress[sample, 2] += 1
                left = interval
                if asynchronous:
                    writing[:] = done
                    drained = now + drain
                else:
                    written[:] = done
                phase = STEP
                if missing > 0:
                    there = spares
                    for k in range(away):
                        if back[k] <= now:
                            there += 1
                    if replicas[missing - min(missing, there)] > replicas[missing]:
                        phase = GROW
            elif phase in (DETECT, WAIT):
                place = True
            elif phase == RESCHEDULE:
                unplaced = False
                phase = RESTART
            elif phase == RESTART:
                phase = RESTORE
            else:
                phase, left = STEP, interval
            if place:
                kept = 0
                for k in range(away):
                    if back[k] <= now:
                        spares += 1
                    else:
                        back[kept] = back[k]
                        kept += 1
                away = kept
                taken = min(missing, spares)
                missing -= taken
                spares -= taken
                unplaced = unplaced or taken > 0
                phase = WAIT if replicas[missing] == 0 else RESCHEDULE if unplaced else RESTART
        spent[training] += done[2]
        spent[slow_cost] += done[3]
        spent[fewer_cost] += done[4]
        progress[sample, 0] = done[0]
        progress[sample, 1] = done[1]
