"""Pipeline schedules and claims: builders from row to case."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from simulator.api import simulate_schedule
from simulator.errors import DescriptionError
from simulator.lower.memory import StaticMemory, static_memory
from simulator.units import UNITS
from simulator.validate.published import Case, Row
from simulator.validate.scenarios import (
    VOCAB,
    blocking,
    case,
    described,
    gpt,
    nodes_of,
    padded,
)

MS = UNITS["seconds"]["ms"]
GB = UNITS["bytes"]["GB"]

ZERO_BUBBLE = {
    "1.5B": (22, 24, 2304), "6.2B": (30, 32, 4096), "14.6B": (46, 40, 5120),
    "28.3B": (62, 48, 6144),
}  # fmt: skip
"""Layers, heads and hidden size: table 3 of the paper; sequences of 1024."""


def zero_bubble_replay(row: Row) -> Case:
    """A pipeline of equal stages that take the profiled times: a test of the schedule alone."""
    _only_1f1b(row)
    forward, backward, weight, message = (
        float(row[f"T_{name}_ms"]) * MS for name in ("F", "B", "W", "comm")
    )
    replay = partial(
        simulate_schedule, "1F1B", stages=int(row["stages_p"]),
        microbatches=int(row["microbatches_m"]), forward=forward, backward=backward + weight,
        latency=message,
    )  # fmt: skip
    return Case(_zero_bubble_seconds(row), None, lambda: replay().step_time_s)


def zero_bubble_step(row: Row) -> Case:
    """The same runs, predicted from the model's shapes."""
    _only_1f1b(row)
    layers, heads, hidden = ZERO_BUBBLE[row["model"]]
    stages, micro = int(row["stages_p"]), int(row["microbatch_size_b"])
    inner = (layers + 2) // stages
    shape = {"hidden": str(hidden), "heads": str(heads), "layers": str(layers)}
    plan = {
        "dp": 1, "pp": stages, "microbatch_size": micro,
        **blocking(stages),
        "layers_per_stage": [inner - 1, *[inner] * (stages - 2), inner - 1],
    }  # fmt: skip
    run = {
        "global_batch_size": micro * int(row["microbatches_m"]), "sequence_length": 1024,
        "precision": "fp16", "fused_accumulation": True, "clip_grad": True,
    }  # fmt: skip
    model = gpt(shape, padded(VOCAB, 1), 1024) | {"tie_word_embeddings": False}
    cluster = nodes_of(int(row["n_gpus"]), "dgx-a100")
    return case(_zero_bubble_seconds(row), model, cluster, plan, run)


def _only_1f1b(row: Row) -> None:
    """Refuse the other schedules.

    Raises:
        DescriptionError: for any schedule but 1F1B.
    """
    if row["schedule"] == "1F1B-I":
        raise DescriptionError(
            "1F1B-I: the source states no number of chunks, and its layers do not fill them evenly"
        )
    if row["schedule"] != "1F1B":
        raise DescriptionError("automatically searched zero-bubble schedules are not built")


def _zero_bubble_seconds(row: Row) -> float:
    """Return the seconds of a step: samples of it over samples/s of all GPUs."""
    samples = int(row["microbatches_m"]) * int(row["microbatch_size_b"])
    return samples / (float(row["samples_per_gpu_per_s"]) * int(row["n_gpus"]))


# --- what is no measured step -----------------------------------------------------------------


def never(reason: str, _: Row) -> Case:
    """Refuse a row of a source that cannot be expressed at all.

    Raises:
        DescriptionError: always.
    """
    raise DescriptionError(reason)


CLAIMS: dict[tuple[str, str], tuple[str, Callable[[StaticMemory], float]]] = {
    ("GPT-2 Adam Optimizer Memory", "params FP32"): ("fp32", lambda m: m.weights),
    ("GPT-2 Adam Optimizer Memory", "grads FP32"): ("fp32", lambda m: m.gradients),
    ("GPT-2 Adam Optimizer Memory", "Adam m"): ("fp32", lambda m: m.optimizer / 2),
    ("GPT-2 Adam Optimizer Memory", "Adam v"): ("fp32", lambda m: m.optimizer / 2),
    ("GPT-2 Adam Optimizer Memory", "total"): ("fp32", lambda m: m.states),
    ("GPT-2 Activation Memory Breakdown", "params FP16"): ("fp16", lambda m: m.weights),
    ("GPT-2 Activation Memory Breakdown", "gradients"): ("fp16", lambda m: m.gradients),
}  # fmt: skip
"""Precision, and what of GPT-2 XL's static memory a claim is about, by section and item."""


def claim(row: Row) -> Case:
    """Arithmetic of a textbook that a scenario can repeat."""
    key = row["section"], row["item"]
    if key not in CLAIMS:
        kind = next(value for name, value in row.items() if name.startswith("kind"))
        raise DescriptionError(f"{kind}: no scenario of the simulator says it")
    precision, part = CLAIMS[key]
    s = described(
        "gpt2-xl", nodes_of(1, "dgx-a100"), {"dp": 1},
        {"global_batch_size": 1, "sequence_length": 1024, "precision": precision},
    )  # fmt: skip
    return Case(float(row["value"]), s, lambda: part(static_memory(s)[0]) / GB)
