"""Zero Bubble Pipeline Parallelism (Qi et al., arXiv 2401.10241): builders from row to case.

ZB-1p and ZB-2p are `ZB-auto` under the memory of 1F1B and twice that. Their runtime posts messages
ahead and validates the optimizer afterwards (zb_schedules.py of the authors' repository); 1F1B and
1F1B-I are Megatron-LM's, whose messages block (``--no-overlap-p2p-communication`` in its
examples/pretrain_zero_bubble.sh).
"""

from __future__ import annotations

from dataclasses import asdict
from functools import lru_cache

import numpy as np

from simulator.api import simulate
from simulator.describe.scenario import Scenario
from simulator.engine import run
from simulator.hardware import price
from simulator.lower import lower_schedule
from simulator.program import ACTION_CODE
from simulator.report.stage_times import stage_times
from simulator.schedules import Actions, Target, Times, actions_of
from simulator.units import UNITS, to_seconds
from simulator.validate.published import Case, Row
from simulator.validate.scenarios import (
    BUFFERS_2022,
    VOCAB,
    Table,
    blocking,
    case,
    described,
    gpt,
    nodes_of,
    padded,
)

MS = UNITS["seconds"]["ms"]
GB = UNITS["bytes"]["GB"]

MODELS = {
    "1.5B": (22, 24, 2304), "6.2B": (30, 32, 4096), "14.6B": (46, 40, 5120),
    "28.3B": (62, 48, 6144),
}  # fmt: skip
"""Layers, heads and hidden size: table 3; the first and the last stage have a layer less."""

SEQUENCE = 1024

LIMITS = {"ZB-1p": 1.0, "ZB-2p": 2.0}
"""Memory of the automatic schedules, in 1F1B's."""

CHUNKED = "1F1B-I"
"""Interleaved 1F1B, whose chunks are a layer each, the embedding and the head (section 5.1)."""


def kept(row: Row) -> float:
    """Return the part of an activation that waits for W: 32sbh of sb(34h + 5as) (table 1)."""
    _, heads, hidden = MODELS[row["model"]]
    return 32 * hidden / (34 * hidden + 5 * heads * SEQUENCE)


def chunks(row: Row) -> int:
    """Return the stages of a rank."""
    layers = MODELS[row["model"]][0]
    return (layers + 2) // int(row["stages_p"]) if row["schedule"] == CHUNKED else 1


# --- from the profiled times ------------------------------------------------------------------


def replay(row: Row) -> Case:
    """A pipeline of equal stages that take the profiled times: a test of the schedule alone."""
    return Case(seconds(row), None, lambda: replayed(row))


def replayed(row: Row) -> float:
    """Return the seconds of the slowest rank, from its first action to its last."""
    f, i, w, message = _profiled(row).values()
    count = chunks(row)
    program = lower_schedule(
        actions(row),
        forward=f / count, backward=(i + w) / count, input_grad=i, weight_grad=w, latency=message,
        p2p_overlap=row["schedule"] in LIMITS,
    )  # fmt: skip
    timeline = run(program, price(program), "compiled")
    work = np.isin(program.action, [ACTION_CODE[kind] for kind in "FBIW"])
    spans = [
        timeline.end[rows].max() - timeline.start[rows].min()
        for rows in (np.flatnonzero(work & (program.rank == r)) for r in range(program.num_ranks))
    ]
    return to_seconds(int(max(spans)))


def actions(row: Row) -> Actions:
    """Return the schedule of a row, ordered for the profiled times where it is automatic."""
    ranks, microbatches = int(row["stages_p"]), int(row["microbatches_m"])
    if row["schedule"] not in LIMITS:
        name = "Interleaved1F1B" if row["schedule"] == CHUNKED else "1F1B"
        return actions_of(name, ranks, microbatches, chunks(row))
    target = Target(Times(**_profiled(row)), LIMITS[row["schedule"]], kept(row), synchronous=False)
    return actions_of("ZB-auto", ranks, microbatches, target=target)


def _profiled(row: Row) -> dict[str, float]:
    """Return the times of table 6, in seconds, as `Times` and a plan name them."""
    columns = {"forward": "F", "input_grad": "B", "weight_grad": "W", "message": "comm"}
    return {name: float(row[f"T_{column}_ms"]) * MS for name, column in columns.items()}


def seconds(row: Row) -> float:
    """Return the seconds of a step: samples of it over samples/s of all GPUs."""
    samples = int(row["microbatches_m"]) * int(row["microbatch_size_b"])
    return samples / (float(row["samples_per_gpu_per_s"]) * int(row["n_gpus"]))


# --- from the model's shapes ------------------------------------------------------------------


def step(row: Row) -> Case:
    """The same runs, predicted from the model's shapes."""
    return case(seconds(row), *_tables(row, _plan(row, _predicted_for(row))))


def memory(row: Row) -> Case:
    """What their fullest rank allocates, in GB, ordered for profiled times where there are any."""
    times = _profiled(row) if "T_F_ms" in row else _predicted_for(row)
    tables = _tables(row, _plan(row, times))
    return case(float(row["memory_GB"]), *tables, metric=_allocated_gb)


def _allocated_gb(s: Scenario) -> float:
    return float(simulate(s).peak_memory_bytes.max()) / GB


def _tables(
    row: Row, plan: Table, microbatches: int | None = None
) -> tuple[Table, Table, Table, Table]:
    """Return model, cluster, plan and run of a row, of fewer microbatches where said."""
    layers, heads, hidden = MODELS[row["model"]]
    shape = {"hidden": str(hidden), "heads": str(heads), "layers": str(layers)}
    model = gpt(shape, padded(VOCAB, 1), SEQUENCE) | {"tie_word_embeddings": False}
    micro = int(row["microbatch_size_b"])
    count = int(row["microbatches_m"]) if microbatches is None else microbatches
    settings = {
        "global_batch_size": micro * count, "sequence_length": SEQUENCE, "precision": "fp16",
        "attention": "unfused", "fused_accumulation": True, "clip_grad": True,
        "gradient_passes": BUFFERS_2022,
    }  # fmt: skip
    both = {"dp": 1, "pp": int(row["stages_p"]), "microbatch_size": micro}
    return model, nodes_of(int(row["n_gpus"]), "dgx-a100"), both | plan, settings


def _plan(row: Row, times: Table) -> Table:
    """Return what a plan says of a row's schedule, for these times where it is automatic."""
    layers, pp = MODELS[row["model"]][0], int(row["stages_p"])
    if row["schedule"] == CHUNKED:
        one_each = {"layers_per_stage": [0, *[1] * layers, 0]}
        return {"schedule": "Interleaved1F1B", "chunks": chunks(row)} | one_each | blocking(pp)
    plan = _uneven(row["model"], pp)
    if row["schedule"] not in LIMITS:
        return plan | blocking(pp)
    return plan | {
        "schedule": "ZB-auto", "schedule_memory": LIMITS[row["schedule"]],
        "schedule_kept": kept(row), "schedule_times": times,
        "post_validation": True,
    }  # fmt: skip


def _uneven(model: str, pp: int) -> Table:
    """Return what a plan says of stages of which the first and the last have a layer less."""
    inner = (MODELS[model][0] + 2) // pp
    return {"layers_per_stage": [inner - 1, *[inner] * (pp - 2), inner - 1]}


def _predicted_for(row: Row) -> Table:
    """Return the predicted times that a row's schedule is made for; none where it needs none."""
    same = (row[name] for name in ("model", "stages_p", "microbatch_size_b", "n_gpus"))
    return _predicted(*same) if row["schedule"] in LIMITS else {}


@lru_cache(maxsize=16)
def _predicted(model: str, stages: str, size: str, gpus: str) -> Table:
    """Return the predicted times that a schedule is made for, from a short run of another.

    The authors profile the first iterations of each run.
    """
    row = {"model": model, "stages_p": stages, "microbatch_size_b": size, "n_gpus": gpus}
    plan = _uneven(model, int(stages)) | {"schedule": "ZB-H1"}
    result = simulate(described(*_tables(row, plan, microbatches=int(stages))))
    return asdict(stage_times(result))
