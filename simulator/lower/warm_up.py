"""What the first step begins with: kernels compiled and chosen, communicators made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from simulator.describe.scenario import Scenario
from simulator.lower.pipeline import Template
from simulator.lower.segments import COMPUTE
from simulator.program import NONE, Cost, Work


def warm_up(t: Template, s: Scenario, costs: tuple[Cost, ...]) -> tuple[Template, tuple[Cost, ...]]:
    """Return the ops of a run whose ranks compute nothing for `run.warm_up` seconds."""
    if not s.run.warm_up:
        return t, costs
    works = np.flatnonzero(t.stream == COMPUTE)
    _, at = np.unique(t.rank[works], return_index=True)
    first = works[at]
    count = len(first)
    none = np.full(count, NONE, np.int32)
    same = ("rank", "action", "stage", "microbatch", "step", "listed")
    columns: dict[str, Any] = {name: getattr(t, name)[first] for name in same}
    columns |= {
        "stream": np.full(count, len(t.streams), np.int16), "layer": none, "joint": none,
        "cost": np.full(count, len(costs), np.int32), "pred": none,
    }  # fmt: skip
    longer: dict[str, Any] = {
        name: np.concatenate([getattr(t, name), new]) for name, new in columns.items()
    }
    waits = np.stack([first, len(t) + np.arange(count)], axis=1).astype(np.int32)
    whole = replace(
        t, **longer, streams=(*t.streams, "warm-up"), more=np.concatenate([t.more, waits])
    )
    return whole, (*costs, Work("warm-up", seconds=s.run.warm_up))
