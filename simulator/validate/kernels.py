"""Measured kernels beside their predictions: products, grouped products, attention, passes.

A row states the shape of an operator; its kernel is the one that `lower` makes of that operator,
and its time is what `hardware.compute` gives that kernel: what is tested is what runs are made of.
"""

from __future__ import annotations

import csv
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from simulator.describe import catalog
from simulator.describe.cluster import Device
from simulator.describe.loader import load_node
from simulator.errors import DescriptionError
from simulator.hardware.compute import kernel_seconds
from simulator.lower import operators as op
from simulator.lower.attention import Heads, flash_attention
from simulator.lower.experts import grouped
from simulator.lower.operators import Elements, Operator
from simulator.program import Kernel
from simulator.report.collectives import Accuracy
from simulator.report.text import table

US = 1e-6

SETTLED = 0.1
"""Seconds of a run from which the power limit holds the clock where it stays: products of the B200
lose a third between runs of 10 and 100 ms, and nothing more after."""

Shape = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class System:
    """Where rows were measured; topologies/measured/kernel_systems.toml explains the fields."""

    name: str
    device: Device
    precision: str
    held_out: bool
    attention: str
    source: str


class Case(NamedTuple):
    """A measured kernel beside its prediction."""

    system: str
    kernel: str
    direction: str
    """``forward``, ``dgrad`` (of a product's input), ``wgrad``, ``backward`` (of attention)."""
    shape: str
    flops: float
    measured: float
    """Seconds."""
    predicted: float
    bound: str
    half: str
    """``fit`` or ``held out``."""
    run: float
    """Seconds for which the timed run kept the device busy."""

    @property
    def error(self) -> float:
        """Error of the time, signed: (predicted - measured) / measured."""
        return self.predicted / self.measured - 1

    @property
    def run_class(self) -> str:
        """Whether the power limit had acted when the run ended."""
        return ">= 0.1 s" if self.run >= SETTLED else "< 0.1 s"


@cache
def systems() -> dict[str, System]:
    """Return the systems of the measured rows, by name."""
    path = catalog.root() / "topologies/measured/kernel_systems.toml"
    facts = tomllib.loads(path.read_text(encoding="utf-8"))
    return {
        name: System(
            name,
            load_node(fact["node"]).device,
            fact["precision"],
            fact.get("held_out", False),
            fact.get("attention", "flash"),
            fact["source"],
        )
        for name, fact in facts.items()
    }


def _elements(system: System, shape: Shape) -> Elements:
    """Return two-byte elements, with the gradient of weights as a row states it."""
    return Elements(2, 2, shape.get("gradient", 2), system.precision)


def _product(s: System, x: Shape) -> Operator:
    return op.linear(
        "product", _elements(s, x), tokens=x["tokens"], inputs=x["inputs"], outputs=x["outputs"],
        bias=False,
    )  # fmt: skip


def _grouped(s: System, x: Shape) -> Operator:
    return grouped(
        "grouped", _elements(s, x), experts=x["experts"], rows=x["experts"] * x["tokens"],
        inputs=x["inputs"], outputs=x["outputs"], asked=0.0,
    )  # fmt: skip


def _attention(s: System, x: Shape) -> Operator:
    heads = Heads(
        batch=1, sequence=x["sequence"], queries=x["heads"], keys=x["kv_heads"], dim=x["dim"],
        value_dim=x["value_dim"],
    )  # fmt: skip
    return flash_attention(_elements(s, x), heads, s.attention)


def _norm(s: System, x: Shape) -> Operator:
    return op.norm(
        "norm", _elements(s, x), tokens=x["tokens"], hidden=x["hidden"], bias=False
    )  # fmt: skip


def _activation(s: System, x: Shape) -> Operator:
    size = float(x["tokens"] * x["hidden"])
    return op.activation("silu", _elements(s, x), size=size, gated=True)


def _rotary(s: System, x: Shape) -> Operator:
    size = float(x["tokens"] * x["heads"] * x["dim"])
    return op.rotary(_elements(s, x), size=size, whole=size)


def _residual(s: System, x: Shape) -> Operator:
    size = float(x["tokens"] * x["hidden"])
    return op.residual("residual", _elements(s, x), size=size, dropout=False)


OPERATORS: Mapping[str, Callable[[System, Shape], Operator]] = {
    "product": _product,
    "grouped": _grouped,
    "attention": _attention,
    "norm": _norm,
    "activation": _activation,
    "rotary": _rotary,
    "residual": _residual,
}
"""How `lower` makes each kind of row."""

PARTS = {
    "forward": "forward", "dgrad": "input_grad", "backward": "input_grad", "wgrad": "weight_grad",
}  # fmt: skip
"""The part of an operator that a row times."""


def shape_of(text: str) -> dict[str, int]:
    """Return the sizes of a ``tokens=4096 inputs=8192``."""
    return {name: int(size) for name, size in re.findall(r"(\w+)=(\d+)", text)}


def kernel_of(system: System, row: Mapping[str, str]) -> Kernel:
    """Return the kernel that a row times, as `lower` makes it."""
    made = OPERATORS[row["kernel"]](system, shape_of(row["shape"]))
    (kernel,) = getattr(made, PARTS[row["pass"]])
    assert isinstance(kernel, Kernel)
    return kernel


def rows() -> list[dict[str, str]]:
    """Return the measured rows, each with the half that it belongs to.

    Rows of a system, kernel and pass stand by size; unless the system is held out whole, the first,
    third, ... of them belong to the fit half and the others are held out.
    """
    path = catalog.root() / "topologies/measured/kernels.csv"
    with path.open(encoding="utf-8", newline="") as file:
        found = list(csv.DictReader(file))
    place: dict[tuple[str, str, str], int] = {}
    for row in sorted(found, key=_size):
        key = (row["system"], row["kernel"], row["pass"])
        place[key] = place.get(key, -1) + 1
        out = systems()[row["system"]].held_out or place[key] % 2 == 1
        row["half"] = "held out" if out else "fit"
    return found


def _size(row: Mapping[str, str]) -> tuple[float, str]:
    kernel = kernel_of(systems()[row["system"]], row)
    return kernel.flops if kernel.matmul else kernel.bytes, row["shape"]


def cases(
    names: Sequence[str] = (), priced: Callable[[System], Device] = lambda s: s.device
) -> list[Case]:
    """Return measured rows with their predictions, in the order of the file.

    Args:
        names: of systems; all when empty.
        priced: the device that a system's rows are predicted on.

    Raises:
        DescriptionError: when there is no system of a name.
    """
    unknown = [name for name in names if name not in systems()]
    if unknown:
        raise DescriptionError(f"--system {unknown[0]!r}: there are rows of {', '.join(systems())}")
    found = []
    for row in rows():
        system = systems()[row["system"]]
        if names and system.name not in names:
            continue
        kernel = kernel_of(system, row)
        seconds, bound = kernel_seconds(kernel, priced(system))
        found.append(Case(
            system.name, row["kernel"], row["pass"], row["shape"], kernel.flops,
            float(row["time_us"]) * US, seconds, bound, row["half"],
            float(row["run_ms"]) * 1e-3,
        ))  # fmt: skip
    return found


def accuracy(found: Iterable[Case]) -> dict[tuple[str, ...], Accuracy]:
    """Return the accuracy of each system, kernel, pass, length of the run, and half."""
    groups: dict[tuple[str, ...], list[Case]] = {}
    for c in found:
        key = (c.system, c.kernel, c.direction, c.run_class, c.half)
        groups.setdefault(key, []).append(c)
    return {name: Accuracy.of(groups[name]) for name in sorted(groups)}


def kernels_text(found: Sequence[Case]) -> str:
    """Return every measured row with its prediction, then the accuracy of each kind."""
    head = ["system", "kernel", "pass", "shape", "measured us", "predicted us", "error", "bound",
            "half"]  # fmt: skip
    lines = [
        [c.system, c.kernel, c.direction, c.shape, f"{c.measured / US:.1f}",
         f"{c.predicted / US:.1f}", f"{c.error:+.1%}", c.bound, c.half]
        for c in found
    ]  # fmt: skip
    summary = [["system", "kernel", "pass", "run", "half", "rows", "MAPE", "bias", "worst"]]
    summary += [
        [*key, str(a.rows), f"{a.mean:.1%}", f"{a.bias:+.1%}", f"{a.worst:+.1%}"]
        for key, a in accuracy(found).items()
    ]
    used = dict.fromkeys(c.system for c in found)
    sources = [f"{name}: {systems()[name].device.name}; {systems()[name].source}" for name in used]
    note = (
        "error: (predicted - measured) / measured, of seconds\n"
        "run: how long the device was busy at a stretch; from 0.1 s its power limit holds the clock"
    )
    return "\n\n".join([
        table([head, *lines]), table(summary), "\n".join([note, *sources]),
    ])  # fmt: skip


def document(found: Sequence[Case]) -> dict[str, Any]:
    """Return cases and their accuracy as plain values for JSON."""
    return {
        "schema_version": 1,
        "accuracy": [
            {**dict(zip(("system", "kernel", "pass", "run", "half"), key, strict=True)),
             "rows": a.rows, "mape": a.mean, "bias": a.bias, "worst": a.worst}
            for key, a in accuracy(found).items()
        ],
        "cases": [
            {"system": c.system, "kernel": c.kernel, "pass": c.direction, "shape": c.shape,
             "measured_s": c.measured, "predicted_s": c.predicted, "error": c.error,
             "bound": c.bound, "run_s": c.run, "half": c.half}
            for c in found
        ],
    }  # fmt: skip
