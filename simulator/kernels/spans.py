"""What an op of a rank can run beside: between which ops of its compute stream it must lie."""

from __future__ import annotations

from simulator.kernels.jit import Kernel


@Kernel
def spans(order, place, rank, pred_offset, preds, previous, after, before):  # type: ignore[no-untyped-def]  # compiled
    """Raise `after` and lower `before` of each op to what its dependencies on its own rank say.

    Args:
        order: all ops, each after what it waits for.
        place: of the ops of compute streams, the place in them, counted on over ranks; else -1.
        rank: of each op.
        pred_offset: with `preds`, what each op waits for.
        preds: see `pred_offset`.
        previous: the op before each in its stream, or -1.
        after: the last place that has ended when the op starts.
        before: the first place that starts when the op has ended.
    """
    for i in order:
        for k in range(pred_offset[i] - 1, pred_offset[i + 1]):
            p = preds[k] if k >= pred_offset[i] else previous[i]
            if p >= 0 and rank[p] == rank[i]:
                after[i] = max(after[i], place[p] if place[p] >= 0 else after[p])
    for i in order[::-1]:
        until = place[i] if place[i] >= 0 else before[i]
        for k in range(pred_offset[i] - 1, pred_offset[i + 1]):
            p = preds[k] if k >= pred_offset[i] else previous[i]
            if p >= 0 and rank[p] == rank[i]:
                before[p] = min(before[p], until)
