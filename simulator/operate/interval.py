"""When to save: Young's and Daly's intervals, and the best one by simulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping


def young(cost: float, mtbf: float) -> float:
    """Return seconds of training between checkpoints, sqrt(2 C M) (Young, 1974).

    The first-order optimum where failures are exponential, rarer than checkpoints, and cost half an
    interval each: a share C / t + t / 2M of the time is lost.
    """
    return math.sqrt(2 * cost * mtbf)


def daly(cost: float, mtbf: float) -> float:
    """Return seconds of training between checkpoints by Daly's higher-order estimate (2006).

    Its equation 37: sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + (C / 2M) / 9) - C; M from C = 2 M on.
    """
    if cost >= 2 * mtbf:
        return mtbf
    part = cost / (2 * mtbf)
    return math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(part) / 3 + part / 9) - cost


def lost_share(interval: float, cost: float, mtbf: float) -> float:
    """Return the share of time that checkpoints and repeated work take, to first order (Young)."""
    return cost / interval + interval / (2 * mtbf)


INTERVALS: Mapping[str, Callable[[float, float], float]] = {"young": young, "daly": daly}
"""Seconds between checkpoints from what one costs and the mean time between failures."""
