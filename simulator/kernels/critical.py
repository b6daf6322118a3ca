"""The critical path of a run, and the slack of what is not on it; columns are samples x tiles."""

from __future__ import annotations

import numpy as np

from simulator.kernels.jit import Kernel

NEVER = 2**62
"""A tick that no run gets to."""


@Kernel
def walk(  # type: ignore[no-untyped-def]  # compiled
    row, tile, base, begin, pred_offset, preds, previous, joint, member_offset, members, partition,
    class_of_tile, start, end, path,
):  # fmt: skip
    """Follow what a row waited for back to the tick `begin`; return how many ops the path has.

    `path` gets (row, tile) of each, last first. What a row waited for is, of its predecessors and
    the row before it in its stream, that which ended last; for a joint op it is what its last
    member waited for, and that member stands for it on the path. The tile's times stand in column
    `base + tile`. Of several at the same tick the first in order counts.
    """
    i = row
    t = tile
    count = 0
    while True:
        j = joint[i]
        if j >= 0:
            p = partition[j]
            k = class_of_tile[p, t]
            latest = -1
            last_row = i
            last_tile = t
            for x in range(member_offset[j], member_offset[j + 1]):
                m = members[x]
                for d in range(class_of_tile.shape[1]):
                    if class_of_tile[p, d] != k:
                        continue
                    arrival = 0
                    if previous[m] >= 0:
                        arrival = end[previous[m], base + d]
                    for y in range(pred_offset[m], pred_offset[m + 1]):
                        arrival = max(arrival, end[preds[y], base + d])
                    if arrival > latest:
                        latest = arrival
                        last_row = m
                        last_tile = d
            i = last_row
            t = last_tile
        path[count, 0] = i
        path[count, 1] = t
        count += 1
        cause = -1
        latest = begin
        for y in range(pred_offset[i], pred_offset[i + 1]):
            if end[preds[y], base + t] > latest:
                latest = end[preds[y], base + t]
                cause = preds[y]
        if previous[i] >= 0 and end[previous[i], base + t] > latest:
            cause = previous[i]
        if cause < 0:
            return count
        i = cause


@Kernel
def find_slack(  # type: ignore[no-untyped-def]  # compiled
    first, last, unit_offset, unit_ops, unit_partition, next_offset, nexts, class_of_column, limit,
    is_beside, place, start, end, slack,
):  # fmt: skip
    """Lower `slack` (places, columns) to the least of the rows of the units from `first` to `last`.

    The slack of a row is how much later it could end without anything ending after `limit`
    (columns), but for what `is_beside` steps, all else taking the time that it took. Units are
    taken last first; `start` of each row is overwritten by the latest tick at which it may start.
    `place` of a row is -1 where it does not count.
    """
    columns = start.shape[1]
    late = np.empty(columns, np.int64)
    least = np.empty(columns, np.int64)
    for u in range(last - 1, first - 1, -1):
        partition = unit_partition[u]
        for c in range(columns):
            least[c] = NEVER
        for m in range(unit_offset[u], unit_offset[u + 1]):
            i = unit_ops[m]
            for c in range(columns):
                late[c] = NEVER if is_beside[i] else limit[c]
            for x in range(next_offset[i], next_offset[i + 1]):
                n = nexts[x]
                for c in range(columns):
                    if start[n, c] < late[c]:
                        late[c] = start[n, c]
            if partition < 0:
                for c in range(columns):
                    least[c] = late[c]
            else:
                for c in range(columns):
                    k = class_of_column[partition, c]
                    if late[c] < least[k]:
                        least[k] = late[c]
        for m in range(unit_offset[u], unit_offset[u + 1]):
            i = unit_ops[m]
            r = place[i]
            for c in range(columns):
                k = c if partition < 0 else class_of_column[partition, c]
                room = least[k] - end[i, c]
                start[i, c] += room
                if r >= 0 and room < slack[r, c]:
                    slack[r, c] = room
