"""Claims, and what is no measured step: builders from row to case."""

from __future__ import annotations

from collections.abc import Callable

from simulator.errors import DescriptionError
from simulator.lower.memory import StaticMemory, static_memory
from simulator.units import UNITS
from simulator.validate.published import Case, Row
from simulator.validate.scenarios import described, nodes_of

GB = UNITS["bytes"]["GB"]


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
