"""What comes between the last gradient and the update: unscaling, the global norm, clipping.

A global norm is a collective: each rank sums the squares of the gradients that it holds, and one
fp32 number is summed over the axes along which ranks hold different ones: tp, shards of ZeRO, the
pipeline, one after the other (as torchtitan's `clip_grad_norm_`). So is the question whether any
gradient has overflowed.

With `plan.post_validation` no rank waits for the others of its pipeline (Qi et al., 2023, arXiv
2401.10241, section 4): what is known of the norm goes along the pipeline, an update that turns out
wrong is taken back in the next step's warm-up. The message is a number; neither costs anything
here.
"""

from __future__ import annotations

import numpy as np

from simulator.describe.scenario import Scenario
from simulator.lower.buffers import gradient_bytes
from simulator.lower.operators import FP32, streaming
from simulator.lower.segments import (
    COMPUTE,
    DP,
    EDP,
    EP,
    ETP,
    PIPELINE,
    REDUCE,
    SHARDS,
    TIED,
    TP,
    Segment,
)
from simulator.program import ACTION_CODE, NONE, Flow, Int8, Int16, Int32, Work


def before_update(s: Scenario, count: int) -> list[Segment]:
    """Return the passes over the `count` gradients that a rank updates by, before its first update.

    Unscaling reads and writes each gradient, the norm reads them, clipping reads and writes them
    again: torch clips whether or not the norm is too large, without asking the device.
    """
    size = float(gradient_bytes(s) * count)

    def kernel(name: str, times: int, flops: int) -> list[Segment]:
        if not count:
            return []
        return [Segment(Work(name, (streaming(name, flops * count, times * size),)),
                        COMPUTE)]  # fmt: skip

    rows = []
    if s.run.scales_loss:
        rows += [*kernel("unscale gradients", 2, 2), *_sums(s)]
    if s.run.clip_grad:
        rows += [*kernel("gradient norm", 1, 2), *_sums(s), *kernel("clip gradients", 2, 1)]
    return rows


def _sums(s: Scenario) -> list[Segment]:
    """Return the all-reduces of one fp32 number over the ranks that hold different gradients."""
    whole = 1 if s.plan.post_validation else s.plan.pp
    degrees = (
        (TP, s.plan.tp), (SHARDS, s.plan.shards), (EP, s.plan.ep), (ETP, s.plan.etp),
        (PIPELINE, whole),
    )  # fmt: skip
    number = Flow("all_reduce", float(FP32))
    return [Segment(number, stream) for stream, degree in degrees if degree > 1]


def waits(rank: Int32, stream: Int16, action: Int8, step: Int32) -> Int32:
    """Return (pairs, 2): the first op after a rank's last backward, and what it waits for.

    A rank of several stages needs the gradients of all of them, summed over dp and tied ends; of
    those of one stage its first update knows already.
    """
    lane = step.astype(np.int64) * (int(rank.max(initial=0)) + 1) + rank
    lanes = int(lane.max(initial=0)) + 1
    updates = np.flatnonzero(action == ACTION_CODE["OPT"])[::-1]
    first = np.full(lanes, NONE, np.int64)
    first[lane[updates]] = updates
    pairs = []
    for sums in (DP, REDUCE, TIED, EDP):
        rows = np.flatnonzero((stream == sums) & (action != ACTION_CODE["OPT"]))
        last = np.full(lanes, NONE, np.int64)
        last[lane[rows]] = rows
        pairs.append(np.stack([first, last], axis=1))
    found = np.concatenate(pairs)
    chosen: Int32 = found[(found != NONE).all(axis=1)].astype(np.int32)
    return chosen
