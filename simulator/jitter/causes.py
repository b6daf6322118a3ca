"""The disturbances of a scenario, each with what of its description has to go for it to be gone."""

from __future__ import annotations

from typing import Any

from simulator.describe.jitter import Interference, Jitter, RandomSlow, Slow
from simulator.units import format_seconds


def causes(jitter: Jitter) -> dict[str, dict[str, Any]]:
    """Return the name of each disturbance and the fields of a jitter that has all but it."""
    out: dict[str, dict[str, Any]] = {}
    if jitter.op_cv:
        out[f"noise of work, cv {jitter.op_cv:.3g}"] = {"op_cv": 0.0}
    if jitter.flow_cv:
        out[f"noise of flows, cv {jitter.flow_cv:.3g}"] = {"flow_cv": 0.0}
    if jitter.host_cv:
        out[f"noise of hosts, cv {jitter.host_cv:.3g}"] = {"host_cv": 0.0}
    if jitter.gpu_cv:
        out[f"spread of GPUs, cv {jitter.gpu_cv:.3g}"] = {"gpu_cv": 0.0}
    for field, what in (("slow_gpus", "GPU"), ("slow_links", "link")):
        entries: tuple[Slow, ...] = getattr(jitter, field)
        for number, slow in enumerate(entries):
            rest = entries[:number] + entries[number + 1 :]
            out[f"{what} of {_ranks(slow.ranks)}, x {slow.factor:.4g}"] = {field: rest}
        random: RandomSlow | None = getattr(jitter, f"random_{field}")
        if random is not None:
            out[f"{100 * random.share:.3g}% of {what}s, x {random.factor:.4g}"] = {
                f"random_{field}": None
            }
    if jitter.interference is not None:
        out[_interference(jitter.interference)] = {"interference": None}
    return out


def _interference(held: Interference) -> str:
    where = "" if held.ranks is None else f" on {_ranks(held.ranks)}"
    return f"hosts hold {format_seconds(held.duration)} every {format_seconds(held.period)}{where}"


def _ranks(ranks: tuple[int, ...]) -> str:
    names = list(map(str, ranks))
    listed = ", ".join(names if len(names) < 5 else [*names[:2], "...", names[-1]])
    return f"rank{'s' * (len(ranks) > 1)} {listed}"
