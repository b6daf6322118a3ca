"""How long work takes that flows slow while they move beside it."""

from __future__ import annotations

import numpy as np

from simulator.kernels.jit import Kernel

NOTHING = 1e-3
"""Ticks of work that count as done: more than sums of floating-point numbers go wrong by."""

FEW = 8
"""Places by which moments may be out of order, on average, to be put in order one by one."""


@Kernel
def stretch(  # type: ignore[no-untyped-def]  # compiled
    works, work_offset, flows, flow_offset, latency, share, start, end, base, whole, most, out,
):  # fmt: skip
    """Fill `out` (works, columns) with the ticks that work takes beside flows of known times.

    A flow takes `share` (flows, columns or 1) of `whole` parts of its rank's computing from
    `latency` ticks after its start to its end; all at once take `most` parts at most. Work that
    starts when `start` says, and alone takes `base` (works, columns) ticks, has what they leave.

    Only differences of times of one rank count, so that what happens later alike takes as long.
    Ends are rounded up: what waits for an end then begins when the work is done, and cannot slow
    it.
    """
    columns = start.shape[1]
    wide = 1 if latency.shape[1] > 1 else 0
    broad = 1 if share.shape[1] > 1 else 0
    for k in range(len(work_offset) - 1):
        first = flow_offset[k]
        count = flow_offset[k + 1] - first
        time = np.empty(2 * count, np.int64)
        step = np.empty(2 * count, np.int64)
        order = np.empty(2 * count, np.int64)
        for c in range(columns):
            n = moved = 0
            for f in range(first, first + count):
                i = flows[f]
                enters = start[i, c] + latency[f, c * wide]
                if end[i, c] > enters and share[f, c * broad] > 0:
                    time[n] = enters
                    step[n] = share[f, c * broad]
                    time[n + 1] = end[i, c]
                    step[n + 1] = -share[f, c * broad]
                    n += 2
            for a in range(n):  # a stream's flows follow each other: most are in order
                b = a
                while b > 0 and time[order[b - 1]] > time[a]:
                    order[b] = order[b - 1]
                    b -= 1
                order[b] = a
                moved += a - b
                if moved > FEW * n:
                    order[:n] = np.argsort(time[:n], kind="mergesort")
                    break
            p = 0
            now_taken = 0
            for w in range(work_offset[k], work_offset[k + 1]):
                begin = start[works[w], c]
                while p < n and time[order[p]] <= begin:
                    now_taken += step[order[p]]
                    p += 1
                if now_taken == 0 and (p == n or time[order[p]] >= begin + base[w, c]):
                    out[w, c] = base[w, c]
                    continue
                left = float(base[w, c]) - NOTHING
                t = begin
                q = p
                taken = now_taken
                while True:
                    rate = float(whole - min(taken, most)) / float(whole)
                    if q == n or (time[order[q]] - t) * rate >= left:
                        break
                    left -= (time[order[q]] - t) * rate
                    t = time[order[q]]
                    while q < n and time[order[q]] == t:
                        taken += step[order[q]]
                        q += 1
                out[w, c] = t - begin + max(int(np.ceil(left / rate)), 0)
