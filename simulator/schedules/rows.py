"""All schedules: a row each, of its function, sizes and closed forms."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from simulator.schedules.automatic import zb_auto
from simulator.schedules.basic import (
    gpipe,
    interleaved_1f1b,
    interleaved_complaint,
    looped_bfs,
    naive,
    one_f_one_b,
    pipe_dream,
)
from simulator.schedules.formulas import DRAINED, Bubble, by_rank
from simulator.schedules.schedule import Schedule
from simulator.schedules.two_passes import (
    dual_pipe,
    dual_pipe_complaint,
    dual_pipe_is_exact,
    dual_pipe_v,
    dual_pipe_v_complaint,
    zbv_zero_bubble,
)
from simulator.schedules.vshape import v_half, v_min
from simulator.schedules.zero_bubble import interleaved_zero_bubble, zb_h1, zb_h2

V_NOTE = (
    "the schedule is ordered for stages whose F, I and W take the same time; where they differ, "
    "gaps stay in every repetition"
)

SCHEDULES: dict[str, Schedule] = {
    "naive": Schedule(
        naive,
        bubble=Bubble("m(p-1)(F+B)", lambda c: c.m * (c.p - 1) * (c.f + c.b)),
        kept=by_rank("1", lambda c, r: 1),
    ),
    "GPipe": Schedule(gpipe, bubble=DRAINED, kept=by_rank("m", lambda c, r: c.m)),
    "1F1B": Schedule(
        one_f_one_b,
        bubble=DRAINED,
        kept=by_rank("min(p-r, m)", lambda c, r: min(c.p - r, c.m)),
    ),
    "PipeDream": Schedule(
        pipe_dream,
        kept=by_rank("min(p-r, m)", lambda c, r: min(c.p - r, c.m)),
        note="changes semantics: weights are updated after every microbatch, whose backward uses "
        "the version of the weights that its forward used",
    ),
    "Interleaved1F1B": Schedule(
        interleaved_1f1b,
        chunks=(2, None),
        takes=("group",),
        complaint=interleaved_complaint,
        bubble=Bubble(DRAINED.text, DRAINED.value, "m a multiple of p", lambda c: c.m % c.p == 0),
        kept=by_rank(
            "min(2(p-r-1)+(v-1)p+1, vm)",
            lambda c, r: min(2 * (c.p - r - 1) + (c.v - 1) * c.p + 1, c.v * c.m),
            "m a multiple of p",
            lambda c: c.m % c.p == 0,
        ),
    ),
    "LoopedBFS": Schedule(
        looped_bfs,
        chunks=(2, None),
        bubble=Bubble(DRAINED.text, DRAINED.value, "m >= p", lambda c: c.m >= c.p),
        kept=by_rank("vm", lambda c, r: c.v * c.m),
    ),
    "ZB-H1": Schedule(
        zb_h1,
        bubble=Bubble(
            "(p-1)(F+I-W)",
            lambda c: (c.p - 1) * (c.f + c.i - c.w),
            "m >= p and F >= W",
            lambda c: c.m >= c.p and c.f >= c.w,
        ),
        kept=by_rank("min(p, m)", lambda c, r: min(c.p, c.m)),
    ),
    "ZB-H2": Schedule(
        zb_h2,
        bubble=Bubble(
            "(p-1)(F+I-2W)",
            lambda c: (c.p - 1) * (c.f + c.i - 2 * c.w),
            "m >= 2p-1, F >= W and F+I >= 2W",
            lambda c: c.m >= 2 * c.p - 1 and c.f >= c.w and c.f + c.i >= 2 * c.w,
        ),
        kept=by_rank("min(2p-1, m)", lambda c, r: min(2 * c.p - 1, c.m)),
    ),
    "InterleavedZeroBubble": Schedule(
        interleaved_zero_bubble,
        chunks=(2, None),
        complaint=interleaved_complaint,
        bubble=Bubble(
            "(p-1)(F+I-W)",
            lambda c: (c.p - 1) * (c.f + c.i - c.w),
            "m a multiple of p and F >= W",
            lambda c: c.m % c.p == 0 and c.f >= c.w,
        ),
        kept=by_rank("vp", lambda c, r: c.v * c.p, "m a multiple of p", lambda c: c.m % c.p == 0),
    ),
    "ZBVZeroBubble": Schedule(
        zbv_zero_bubble,
        chunks=(2, 2),
        bubble=Bubble(
            "0", lambda c: 0.0, "m >= 2p-1 and F = I = W",
            lambda c: c.m >= 2 * c.p - 1 and c.f == c.i == c.w,
        ),
        kept=by_rank("2p", lambda c, r: 2 * c.p, "m >= 2p-1", lambda c: c.m >= 2 * c.p - 1),
    ),
    "DualPipe": Schedule(
        dual_pipe,
        chunks=(2, 2),
        copies=2,
        complaint=dual_pipe_complaint,
        bubble=Bubble(
            "(p/2-1)(F&B+B-3W)",
            lambda c: (c.p / 2 - 1) * (c.pair + c.b - 3 * c.w),
            "F = I >= W and B <= F&B <= F+B",
            dual_pipe_is_exact,
            to_the_end=True,
        ),
        kept=by_rank("p+1", lambda c, r: c.p + 1),
    ),
    "DualPipeV": Schedule(
        dual_pipe_v,
        chunks=(2, 2),
        complaint=dual_pipe_v_complaint,
        bubble=Bubble(
            "(p-1)(F&B+B-3W)",
            lambda c: (c.p - 1) * (c.pair + c.b - 3 * c.w),
            "F = I >= W and B <= F&B <= F+B",
            dual_pipe_is_exact,
            to_the_end=True,
        ),
        kept=by_rank("2p+1", lambda c, r: 2 * c.p + 1),
    ),
    "ZB-auto": Schedule(zb_auto, takes=("target",)),
    "V-Half": Schedule(
        v_half,
        chunks=(2, 2),
        kept=by_rank(
            "2((p+2)//2)", lambda c, r: 2 * ((c.p + 2) // 2), "m >= 2p", lambda c: c.m >= 2 * c.p
        ),
        note=V_NOTE,
    ),
    "V-Min": Schedule(v_min, chunks=(2, 2), note=V_NOTE),
}  # fmt: skip
"""All schedules, as torch.distributed.pipelining names them; add a function and a row for one."""


def _filled(ranks: int, microbatches: int, chunks: int) -> float:
    """Return the bubble fraction of a pipeline that waits only for its first microbatch.

    (p-1)/(v m + p-1) for m >= p; with fewer, a chunk waits for the first microbatch to come round.
    """
    work = chunks * microbatches
    return 1 - work / (chunks * max(microbatches, ranks) + min(microbatches, ranks) - 1)


BUBBLE_FRACTION: Mapping[str, Callable[[int, int, int], float]] = dict.fromkeys(
    ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS"), _filled
)
"""Bubble fraction for equal stages and free messages, of schedules where it falls with m,
from (ranks, microbatches, chunks)."""
