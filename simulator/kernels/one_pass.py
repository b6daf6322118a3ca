"""Start and end of every op by one pass in topological order: exact where nothing queues.

Streams are first-in-first-out, so without slots an op starts at the latest end of what it waits
for: the longest path of a fixed graph. Rows are ops of a tile, columns tiles.
"""

from __future__ import annotations

import numpy as np

from simulator.kernels.jit import Kernel


@Kernel
def one_pass(  # type: ignore[no-untyped-def]  # compiled
    first, last, unit_offset, unit_ops, unit_partition, pred_offset, preds, previous,
    class_of_column, ticks, pausing, phase, period, pause, start, end,
):  # fmt: skip
    """Fill `start` and `end` (ops, columns) for the units from `first` to `last`.

    `ticks` has as many columns, or one that all share. `unit_partition` is a row of
    `class_of_column`, or -1 for an op on its own: columns of one class meet in the joint op. A row
    stands still for `pause` ticks in each `period`, from `phase[pausing[row]]` on, as
    `kernels.pauses.resumed` explains; -1 is never.
    """
    columns = start.shape[1]
    stride = 1 if ticks.shape[1] > 1 else 0
    arrival = np.zeros(columns, np.int64)
    for u in range(first, last):
        a = unit_offset[u]
        b = unit_offset[u + 1]
        for m in range(a, b):
            i = unit_ops[m]
            q = previous[i]
            for c in range(columns):
                start[i, c] = end[q, c] if q >= 0 else 0
            for k in range(pred_offset[i], pred_offset[i + 1]):
                p = preds[k]
                for c in range(columns):
                    if end[p, c] > start[i, c]:
                        start[i, c] = end[p, c]
        partition = unit_partition[u]
        if partition >= 0:
            for c in range(columns):
                arrival[c] = 0
            for m in range(a, b):
                for c in range(columns):
                    k = class_of_column[partition, c]
                    if start[unit_ops[m], c] > arrival[k]:
                        arrival[k] = start[unit_ops[m], c]
            for m in range(a, b):
                for c in range(columns):
                    start[unit_ops[m], c] = arrival[class_of_column[partition, c]]
        for m in range(a, b):
            i = unit_ops[m]
            for c in range(columns):
                end[i, c] = start[i, c] + ticks[i, c * stride]
            r = pausing[i]
            if r >= 0:
                for c in range(columns):
                    if phase[r, c] >= 0 and end[i, c] > start[i, c]:
                        since = start[i, c] - phase[r, c]
                        cycle = since // period
                        w = cycle * (period - pause) + max(0, since - cycle * period - pause)
                        w += ticks[i, c * stride]
                        end[i, c] = phase[r, c] + w + ((w - 1) // (period - pause) + 1) * pause
