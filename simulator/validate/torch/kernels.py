"""Times of single kernels in torch, on every rank at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from simulator.validate.torch.device import Device, Turns

DTYPES = {
    "fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16,
    "mixed": torch.bfloat16,
}  # fmt: skip
"""Element of operands by precision."""

ROUND, MOST = 2_000_000, 50
"""Nanoseconds of calls that are timed together, and how many of them at most."""

ROUNDS = 5
"""Rounds whose median counts, after one that warms up."""

Call = Callable[[], Any]


def timed(
    wanted: list[dict[str, Any]], device: Device, turns: Turns, progress: Callable[[int], None]
) -> list[dict[str, Any]]:  # fmt: skip
    """Return kinds of kernels with their seconds; those that torch has no kernel for are left out.

    Args:
        wanted: of `sizes.to_time`.
        device: where.
        turns: of ranks that share it.
        progress: is told how many sizes have been done.
    """
    out, done = [], 0
    for one in wanted:
        make = MAKERS.get(one["kernel"])
        if make is None or one.get("dtype") not in ("", *DTYPES):
            continue
        seconds = []
        for sizes in product(*one["axes"].values()):
            call = make(dict(zip(one["axes"], sizes, strict=True)), one, device.here())
            seconds.append(_seconds(call, device, turns))
            progress(done := done + 1)
        out.append({k: one[k] for k in ("kernel", "dtype", "axes")} | {"seconds": seconds})
    return out


def _seconds(call: Call, device: Device, turns: Turns) -> float:
    """Return the seconds of a call when several follow each other: what the device was busy."""
    spent: list[float] = []
    calls = 1  # of the first round, which warms up and says how many make a round
    for _ in range(1 + ROUNDS):
        dist.barrier()
        turns.take()
        device.settle()
        begin, start = time.perf_counter_ns(), device.busy()
        for _ in range(calls):
            call()
        device.settle()
        spent.append(min(device.busy() - start, time.perf_counter_ns() - begin) / calls)
        turns.give()
        calls = max(1, min(MOST, int(ROUND / max(spent[-1], 1))))
    return max(statistics.median(spent[1:]), 1.0) * 1e-9


def _product(size: Mapping[str, float], one: Mapping[str, Any], here: torch.device) -> Call:
    m, n, k = (int(size[name]) for name in "mnk")
    dtype = DTYPES[one["dtype"]]
    torch.backends.cuda.matmul.allow_tf32 = one["dtype"] == "tf32"
    a, b = torch.randn(m, k, device=here).to(dtype), torch.randn(n, k, device=here).to(dtype)
    return lambda: functional.linear(a, b)


def _attention(size: Mapping[str, float], one: Mapping[str, Any], here: torch.device) -> Call:
    shape = 1, int(size["batch"]), int(size["rows"]), int(size["dim"])
    q, k, v = (
        torch.randn(shape, device=here).to(DTYPES[one["dtype"]]).requires_grad_() for _ in range(3)
    )
    if one["kernel"].endswith("forward"):
        q, k, v = q.detach(), k.detach(), v.detach()
        return lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    grad = torch.ones_like(out)
    return lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)


def _rows(size: Mapping[str, float], one: Mapping[str, Any]) -> tuple[int, int]:
    """Return the rows and columns of what moves so many bytes."""
    dtype = DTYPES.get(one["element"], torch.bfloat16)
    numbers = size["bytes"] / (one["moved"] * dtype.itemsize)
    return max(1, round(numbers / one["width"])), int(one["width"])


def _elements(
    forward: Callable[[Tensor], Tensor], backward: bool
) -> Callable[[Mapping[str, float], Mapping[str, Any], torch.device], Call]:
    """Return the maker of a kernel of one tensor, or of its gradient."""

    def make(size: Mapping[str, float], one: Mapping[str, Any], here: torch.device) -> Call:
        dtype = DTYPES.get(one["element"], torch.bfloat16)
        x = torch.randn(_rows(size, one), device=here).to(dtype)
        if not backward:
            return lambda: forward(x)
        x.requires_grad_()
        out = forward(x)
        grad = torch.ones_like(out)
        return lambda: torch.autograd.grad(out, x, grad, retain_graph=True)

    return make


def _add(size: Mapping[str, float], one: Mapping[str, Any], here: torch.device) -> Call:
    x = torch.randn(_rows(size, one), device=here).to(DTYPES.get(one["element"], torch.bfloat16))
    y = torch.ones_like(x)
    if one["kernel"] == "accumulation":
        return lambda: y.add_(x)
    return lambda: x + y


def _bias(size: Mapping[str, float], one: Mapping[str, Any], here: torch.device) -> Call:
    x = torch.randn(_rows(size, one), device=here).to(DTYPES.get(one["element"], torch.bfloat16))
    return lambda: x.sum(0)


def _embedding(size: Mapping[str, float], one: Mapping[str, Any], here: torch.device) -> Call:
    rows, width = _rows(size, one)
    table = torch.randn(rows, width, device=here)
    at = torch.randint(rows, (rows,), device=here)
    return lambda: functional.embedding(at, table)


def _loss(backward: bool) -> Callable[..., Call]:
    def make(size: Mapping[str, float], one: Mapping[str, Any], here: torch.device) -> Call:
        rows, width = _rows(size, one)
        logits = torch.randn(rows, width, device=here, requires_grad=backward)
        targets = torch.zeros(rows, dtype=torch.long, device=here)
        if not backward:
            return lambda: functional.cross_entropy(logits, targets)
        out = functional.cross_entropy(logits, targets)
        return lambda: torch.autograd.grad(out, logits, retain_graph=True)

    return make


def _adam(kind: type[torch.optim.Optimizer]) -> Callable[..., Call]:
    def make(size: Mapping[str, float], one: Mapping[str, Any], here: torch.device) -> Call:
        numbers = max(1, int(size["bytes"] / (one["moved"] * 4)))  # states are fp32
        param = torch.nn.Parameter(torch.randn(numbers, device=here))
        param.grad = torch.ones_like(param)
        optimizer: Any = kind([param], lr=1e-4, foreach=True)
        return lambda: optimizer.step()

    return make


def _norm(x: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:])


def _gelu(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


MAKERS: dict[str, Callable[..., Call]] = {
    "product": _product,
    **{f"flash{n} {way}": _attention for n in ("", "1", "2") for way in ("forward", "backward")},
    "norm": _elements(_norm, False), "norm grad": _elements(_norm, True),
    "gelu": _elements(_gelu, False), "gelu grad": _elements(_gelu, True),
    "relu": _elements(functional.relu, False), "relu grad": _elements(functional.relu, True),
    "residual": _add, "residual grad": _add, "accumulation": _add,
    "bias grad": _bias, "embedding": _embedding, "loss": _loss(False), "loss grad": _loss(True),
    "adamw": _adam(torch.optim.AdamW), "adam": _adam(torch.optim.Adam),
}  # fmt: skip
"""What makes the call of a kind of kernel, from its sizes."""
