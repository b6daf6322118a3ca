"""Times of a run's stages, as a schedule that is made to measure takes them."""

from __future__ import annotations

import numpy as np

from simulator.describe.timing import ScheduleTimes
from simulator.errors import DescriptionError
from simulator.lower.segments import COMPUTE
from simulator.program import ACTION_CODE
from simulator.report.result import Result
from simulator.units import TICKS_PER_SECOND


def stage_times(result: Result) -> ScheduleTimes:
    """Return how long F, I and W took on each stage, and a message between stages, in seconds.

    Medians over the microbatches of all steps on the first replica; a pass lasts from its first
    kernel to its last one's end, with the collectives between them.

    Raises:
        DescriptionError: when the schedule of the run does not split backward.
    """
    program, (start, end) = result.tiled, result.times.columns
    seconds = {}
    for name, kind in (("forward", "F"), ("input_grad", "I"), ("weight_grad", "W")):
        rows = np.flatnonzero((program.action == ACTION_CODE[kind]) & (program.stream == COMPUTE))
        if not len(rows):
            raise DescriptionError(
                "the run holds no gradients of inputs apart from those of weights; profile a "
                "schedule that splits backward, for example ZB-H1"
            )
        columns = (program.stage, program.step, program.microbatch)
        which, number = np.unique(
            np.stack([c[rows] for c in columns], axis=1), axis=0, return_inverse=True
        )
        first = np.full(len(which), np.iinfo(np.int64).max)
        last = np.zeros(len(which), np.int64)
        np.minimum.at(first, number.ravel(), start[rows, 0])
        np.maximum.at(last, number.ravel(), end[rows, 0])
        seconds[name] = tuple(
            float(np.median((last - first)[which[:, 0] == stage])) / TICKS_PER_SECOND
            for stage in range(int(which[:, 0].max()) + 1)
        )
    sends = np.flatnonzero(program.action == ACTION_CODE["SEND_F"])
    message = float(np.median((end - start)[sends, 0])) / TICKS_PER_SECOND if len(sends) else 0.0
    return ScheduleTimes(**seconds, message=message)
