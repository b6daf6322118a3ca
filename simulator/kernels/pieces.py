"""Where the time of ranks goes: the loops behind `simulator.report.breakdown`."""

from __future__ import annotations

import numpy as np

from simulator.kernels.jit import Kernel


@Kernel
def pieces(  # type: ignore[no-untyped-def]  # compiled
    ops, op_offset, category, flow_category, is_update, phases, pred_offset, preds, previous, start,
    end, begin, turn, finish, weight, out, busy,
):  # fmt: skip
    """Add up the ticks of ranks between `begin` and `finish` (ranks, columns), by category.

    `ops[op_offset[k]:op_offset[k + 1]]` are the rows of rank k's compute stream in order. Idle time
    before a row is followed backwards: the flow that the row waited for, the flow that this one
    waited for, and so on, for as long as they reach into it; what no flow covers is bubble, of one
    of `phases` (fill, stall, drain). Bubble before a rank's first work is drain of the step before
    until `turn` (columns), fill from then on. `out` is (categories, ranks, columns); `busy` gets
    the work of each row over all columns, each counted `weight` times.
    """
    columns = start.shape[1]
    fill, stall, drain = phases
    done = np.zeros(columns, np.int64)
    begun = np.zeros(columns, np.bool_)
    for k in range(len(op_offset) - 1):
        for c in range(columns):
            done[c] = begin[k, c]
            begun[c] = False
        for m in range(op_offset[k], op_offset[k + 1]):
            i = ops[m]
            for c in range(columns):
                lo = min(max(start[i, c], begin[k, c]), finish[k, c])
                hi = min(max(end[i, c], begin[k, c]), finish[k, c])
                out[category[i], k, c] += hi - lo
                busy[i] += (hi - lo) * weight[c]
                idle = lo - done[c]
                if idle > 0:
                    until = lo
                    cause = -1
                    for x in range(pred_offset[i], pred_offset[i + 1]):
                        p = preds[x]
                        if cause < 0 or end[p, c] > end[cause, c]:
                            cause = p
                    while cause >= 0 and until > done[c] and flow_category[cause] >= 0:
                        moved = min(end[cause, c], until) - max(start[cause, c], done[c])
                        if moved > 0:
                            out[flow_category[cause], k, c] += moved
                            idle -= moved
                        until = min(until, start[cause, c])
                        later = previous[cause]
                        for x in range(pred_offset[cause], pred_offset[cause + 1]):
                            p = preds[x]
                            if later < 0 or end[p, c] > end[later, c]:
                                later = p
                        cause = later
                    phase = stall
                    if not begun[c] and end[i, c] > begin[k, c]:
                        phase = fill
                        before = min(idle, max(0, turn[c] - done[c]))
                        out[drain, k, c] += before
                        idle -= before
                    elif is_update[i]:
                        phase = drain
                    out[phase, k, c] += idle
                if end[i, c] > begin[k, c]:
                    begun[c] = True
                done[c] = max(done[c], hi)
        for c in range(columns):
            out[drain, k, c] += finish[k, c] - done[c]
