"""What is measured: shapes of runs, and the time of each part of one."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from simulator.api import simulate
from simulator.describe.loader import scenario
from simulator.describe.scenario import Scenario
from simulator.engine import Folding
from simulator.engine.stretch import fold_slowed, run_stretched
from simulator.errors import DescriptionError
from simulator.hardware import price
from simulator.hardware.placement import devices
from simulator.hardware.taken import moving
from simulator.jitter import study
from simulator.lower import lower
from simulator.report.result import Result

Table = dict[str, Any]


def shape(replicas: int) -> Table:
    """1F1B with layer-level ops: 8 stages of 16 layers, 64 microbatches, all-reduce at the end."""
    return {
        "model": {"from": "gpt2-xl", "num_hidden_layers": 128},
        "cluster": {"node": "dgx-a100", "num_nodes": replicas},
        "plan": {"pp": 8, "dp": replicas},
        "run": {"global_batch_size": 64 * replicas, "sequence_length": 1024, "num_steps": 1},
    }


def gpt3() -> Table:
    """GPT-3 175B on 1,024 GPUs: dp 16 x tp 8 x pp 8, 96 microbatches."""
    return {
        "model": "gpt3-175b",
        "cluster": {"node": "dgx-a100", "num_nodes": 128},
        "plan": {"pp": 8, "tp": 8, "dp": 16},
        "run": {"global_batch_size": 1536, "sequence_length": 2048, "num_steps": 1},
    }


def llama() -> Table:
    """Llama-3.1-405B on 16,384 GPUs: dp 128 x tp 8 x pp 16, 16 microbatches."""
    return {
        "model": "llama-3-405b",
        "cluster": {"node": "dgx-h100", "num_nodes": 2048},
        "plan": {"pp": 16, "tp": 8, "dp": 128},
        "run": {"global_batch_size": 2048, "sequence_length": 8192, "num_steps": 1},
    }


RUNS: dict[str, tuple[Callable[[], Table], str, bool]] = {
    "1F1B 8 x 8 ranks": (lambda: shape(8), "compiled", False),
    "1F1B 8 x 32": (lambda: shape(32), "compiled", False),
    "1F1B 8 x 128": (lambda: shape(128), "compiled", False),
    "1F1B 8 x 8, events": (lambda: shape(8), "events", False),
    "1F1B 8 x 32, events": (lambda: shape(32), "events", False),
    "1F1B 8 x 128, events": (lambda: shape(128), "events", False),
    "1F1B 8 x 8, reference": (lambda: shape(8), "reference", False),
    "GPT-3 175B, 1,024 ranks": (gpt3, "compiled", False),
    "GPT-3 175B, folded": (gpt3, "compiled", True),
    "Llama-3 405B, 16,384 ranks": (llama, "compiled", False),
    "Llama-3 405B, folded": (llama, "compiled", True),
}
"""Runs by name: description, engine, whether ranks fold."""

GROWTH = (
    ("1F1B 8 x 8 ranks", "1F1B 8 x 32", "1F1B 8 x 128"),
    ("1F1B 8 x 8, events", "1F1B 8 x 32, events", "1F1B 8 x 128, events"),
)
"""Runs of growing size, whose time should grow as their ops do."""


def parts(table: Table, engine: str, folded: bool) -> dict[str, float]:
    """Return ops, and the seconds of building, running and reporting one run."""
    at = [time.perf_counter()]
    s = scenario(table, Path("benchmark.toml"))
    program = lower(s)
    ticks = price(program, s.cluster)
    at.append(time.perf_counter())
    moves = moving(program, s, devices(s.plan, s.cluster))
    folding = fold_slowed(program, ticks, moves) if folded else Folding.none(program)
    timeline = run_stretched(program, ticks, moves, engine, folding)
    at.append(time.perf_counter())
    _ = Result(program, timeline, s).summary
    at.append(time.perf_counter())
    build, engine_s, report = (b - a for a, b in itertools.pairwise(at))
    return {"ops": len(program), "build": build, "engine": engine_s, "report": report}


def jittered(samples: int) -> dict[str, float]:
    """Return the seconds of samples of Llama-3 405B's step under noise, replays included."""
    table = {**llama(), "jitter": {"op_cv": 0.05, "samples": samples}}
    table["run"] = {**table["run"], "detail": "stage"}
    result = simulate(scenario(table, Path("benchmark.toml")))
    study(result, samples=1)
    begun = time.perf_counter()
    study(result)
    return {"samples": samples, "total": time.perf_counter() - begun, "ops": len(result.tiled)}


def plans() -> Iterator[Table]:
    """Yield plans of GPT-3 175B on 1,024 GPUs, as a search tries them: a stage is a few ops."""
    axes = itertools.product(
        (1, 2, 4, 8), (1, 2, 3, 4, 6, 8, 12, 16, 24, 32), (1, 2, 4), ("1F1B", "GPipe"),
        ("none", "full"), (1536, 3072, 6144), (["dp", "pp", "tp"], ["pp", "dp", "tp"]),
    )  # fmt: skip
    for tp, pp, size, schedule, recompute, batch, order in axes:
        yield {
            **gpt3(),
            "cluster": {"node": "dgx-a100", "num_nodes": 128},
            "plan": {"pp": pp, "tp": tp, "microbatch_size": size, "schedule": schedule,
                     "recompute": recompute, "order": order},
            "run": {"global_batch_size": batch, "sequence_length": 2048, "num_steps": 1,
                    "detail": "stage"},
        }  # fmt: skip


def legal(tables: Iterator[Table], count: int) -> list[tuple[Table, Scenario]]:
    """Return the first `count` plans that the description allows."""
    out = []
    for table in tables:
        try:
            out.append((table, scenario(table, Path("benchmark.toml"))))
        except DescriptionError:
            continue
        if len(out) == count:
            break
    return out
