"""Which kernels a calibration times, over which sizes, and the table that a device names."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from simulator.describe.model import Model
from simulator.describe.scenario import Scenario
from simulator.lower.bodies import stage_bodies
from simulator.program import OFF_DEVICE, PRODUCTS, Kernel, Work

MEMORY_BOUND = {
    "norm": 2, "norm grad": 3, "residual": 3, "residual grad": 3, "gelu": 2, "gelu grad": 3,
    "relu": 2, "relu grad": 3, "bias grad": 1, "accumulation": 3, "embedding": 3, "loss": 2,
    "loss grad": 2, "adamw": 7, "adam": 7,
}  # fmt: skip
"""Kernels that are timed by the bytes that they move: reads and writes of an element."""

SPREAD = 2.0
"""How far a table reaches beyond the sizes of its scenario, either way."""

POINTS = 4
"""Most stretches of an axis between two points."""


def to_time(s: Scenario) -> list[dict[str, Any]]:
    """Return the kinds of kernels that a scenario runs, each with the sizes to time.

    Axes reach from half the smallest size that occurs to twice the largest, heads as they are.
    """
    kernels = [
        kernel
        for cost in stage_bodies(s).costs
        for kernel in (cost.kernels if isinstance(cost, Work) else ())
        if kernel.dtype not in OFF_DEVICE
    ]
    return [*_products(kernels), *_fused(kernels), *_by_bytes(s, kernels)]


def points(wanted: Sequence[Mapping[str, Any]]) -> int:
    """Return how many sizes there are to time."""
    return sum(math.prod(map(len, one["axes"].values())) for one in wanted)


def _products(kernels: Sequence[Kernel]) -> Iterator[dict[str, Any]]:
    for dtype in sorted({k.dtype for k in kernels if k.matmul and k.algorithm in PRODUCTS}):
        sizes = [k.matmul[1:] for k in kernels
                 if k.matmul and k.algorithm in PRODUCTS and k.dtype == dtype]  # fmt: skip
        axes = {name: _axis([size[i] for size in sizes]) for i, name in enumerate("mnk")}
        yield {"kernel": "product", "dtype": dtype, "axes": axes}


def _fused(kernels: Sequence[Kernel]) -> Iterator[dict[str, Any]]:
    for name, dtype in sorted(
        {(k.algorithm, k.dtype) for k in kernels if k.algorithm not in PRODUCTS}
    ):
        sizes = [k.matmul for k in kernels if k.algorithm == name and k.matmul and k.dtype == dtype]
        axes = {
            "batch": _axis([size[0] for size in sizes]),
            "rows": _axis([size[1] for size in sizes]),
            "dim": sorted({float(size[3]) for size in sizes}),
        }
        yield {"kernel": name, "dtype": dtype, "axes": axes}


def _by_bytes(s: Scenario, kernels: Sequence[Kernel]) -> Iterator[dict[str, Any]]:
    assert isinstance(s.model, Model)  # `Job.of` has refused others
    wide = {"loss": s.model.vocab_size, "loss grad": s.model.vocab_size}
    for name, moved in MEMORY_BOUND.items():
        sizes = [k.bytes for k in kernels if not k.matmul and _is(k.name, name)]
        if sizes:
            axes = {"bytes": _axis(sizes)}
            width = wide.get(name, s.model.hidden_size)
            yield {"kernel": name, "dtype": "", "axes": axes, "width": width, "moved": moved,
                   "element": s.run.precision}  # fmt: skip


def _is(kernel: str, name: str) -> bool:
    """Return whether a kernel is timed under a name, and not under a longer one."""
    fits = [other for other in MEMORY_BOUND if f" {kernel}".endswith(f" {other}")]
    return bool(fits) and max(fits, key=len) == name


def _axis(sizes: Sequence[float]) -> list[float]:
    """Return sizes from below the smallest to above the largest, at even ratios about 2."""
    low, high = max(1.0, min(sizes) / SPREAD), max(sizes) * SPREAD
    steps = min(POINTS, max(1, round(math.log2(high / low))))
    unit = 64 if low >= 64 else 1  # so that rows of products align as in real models
    even = (low * (high / low) ** (i / steps) / unit for i in range(steps + 1))
    return sorted({float(max(1, round(size)) * unit) for size in even})


def table_toml(timed: Sequence[Mapping[str, Any]], machine: Mapping[str, Any], ranks: int) -> str:
    """Return the text of a table that ``device.calibration`` names, of what ranks have timed."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    how = (
        f"torch {machine['torch']}, {ranks} rank(s) at once of {machine['threads_per_rank']} "
        f"thread(s), median of calls; {machine['busy']}; causal attention; memory-bound kernels by "
        "the bytes that they move"
    )
    lines = [
        "# Written by trainsim calibrate --kernels; a device names it: calibration = \"FILE\"",
        f"device = {_quoted(machine['device'])}", f"measured_at = {_quoted(now)}",
        f"how = {_quoted(how)}",
    ]  # fmt: skip
    for one in timed:
        axes = ", ".join(
            f'{{ name = "{name}", at = {_numbers(at)} }}' for name, at in one["axes"].items()
        )
        lines += [
            "", "[[kernels]]", f'kernel = "{one["kernel"]}"', f'dtype = "{one["dtype"]}"',
            f"axes = [{axes}]", f"seconds = {_numbers(one['seconds'])}",
        ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _quoted(text: object) -> str:
    return '"' + str(text).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _numbers(values: Sequence[float]) -> str:
    return "[" + ", ".join(f"{v:.6g}" if v % 1 else f"{v:.0f}" for v in values) + "]"
