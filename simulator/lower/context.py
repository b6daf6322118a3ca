"""Attention over a sequence that cp ranks divide among them (context parallelism).

Every other operator sees the tokens of its rank only. `STYLES` are Megatron-LM's
``--cp-comm-type``:

- `ring` (p2p; Liu et al., 2023, arXiv 2310.01889): K and V go round in cp - 1 steps, each beside
  the attention over the block in hand. Counts follow Transformer Engine's
  ``AttnFuncWithCPAndKVP2P`` (context_parallel.py): forward holds K, V and the result of every step
  until all results are merged at the end; backward keeps the rank's own share only, sends K and V
  round again and, a step behind them, the sums of their gradients: K, V in the first of its cp
  transfers, the gradients in the last, both in those between.
- `all_gather` (Llama Team, 2024, arXiv 2407.21783, section 3.3.2): K and V of all ranks are
  gathered before attention, again in backward, and their gradients reduce-scattered; nothing runs
  beside that.
- `all_to_all` (a2a; Jacobs et al., 2023, arXiv 2309.14509): ranks swap shares of the sequence for
  shares of the heads before attention and back after it; result and gradient likewise in backward.

Under a causal mask a rank whose tokens come later has more to do. `zigzag` cuts the sequence into
2 cp chunks and gives rank r chunks r and 2 cp - 1 - r: all have the same work. `contiguous` gives
rank r the r-th of cp; all ranks meet in each transfer, so the last one's work stands for every
rank's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.lower.attention import Heads, flash_attention
from simulator.lower.operators import FP32, Along, Beside, Elements, Operator, Part
from simulator.program import Flow, Kernel

FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5
"""Matrix products over each pair of query and key, as `attention.flash_attention` counts."""


class Context(NamedTuple):
    """How ranks divide a sequence."""

    ranks: int
    style: str
    """A key of `STYLES`."""
    zigzag: bool


ALONE = Context(1, "ring", zigzag=False)
"""A rank that has its sequences whole."""


class _Local(NamedTuple):
    """Elements of a rank's share of the tensors of attention."""

    queries: int
    keys: int
    """Of K and V together."""
    rows: int
    """Bytes of the fp32 number that each query and head keeps."""


def pairs(ranks: int, length: int, *, causal: bool, zigzag: bool) -> npt.NDArray[np.float64]:
    """Return (ranks, steps): pairs of query and key that each rank attends to in each ring step.

    Args:
        ranks: that divide the sequence.
        length: tokens of each rank.
        causal: whether a query sees earlier keys only; of a rank's own tokens it then sees half.
        zigzag: how tokens are dealt out.
    """
    block = float(length) ** 2
    rank, step = np.ogrid[:ranks, :ranks]
    if not causal:
        return np.full((ranks, ranks), block)
    if zigzag:  # all queries and the first half of the keys, or the second of the queries and all
        return np.full((ranks, ranks), block / 2)
    return np.where(step == 0, block / 2, np.where(step <= rank, block, 0.0))


def context_attention(e: Elements, heads: Heads, version: str, at: Context) -> tuple[Operator, ...]:
    """Return attention over a sequence that is divided; `heads` has the whole of it.

    `version` names the fused implementation, as in `flash_attention`.
    """
    return STYLES[at.style](e, heads, version, at)


def _local(heads: Heads, cp: int) -> _Local:
    tokens = heads.batch * (heads.sequence // cp)
    queries = tokens * heads.queries
    return _Local(queries * heads.dim, 2 * tokens * heads.keys * heads.dim, FP32 * queries)


def _kernels(
    e: Elements, heads: Heads, version: str, *, rows: int, columns: int, over: float
) -> tuple[Kernel, Kernel]:
    """Return the fused kernel of `rows` queries, `columns` keys and `over` pairs, both ways."""
    b, a, g, d = heads.batch, heads.queries, heads.keys, heads.dim
    q, kv, row = b * rows * a * d, 2 * b * columns * g * d, FP32 * b * a * rows
    product, shape = 2.0 * b * a * d * over, (b * a, rows, columns, d)
    forward = Kernel(
        "attention", FORWARD_PRODUCTS * product, float(e.activation * (2 * q + kv) + row),
        e.matmul, shape, 1, f"{version} forward",
    )  # fmt: skip
    backward = Kernel(
        "attention grad", BACKWARD_PRODUCTS * product,
        float(e.activation * (4 * q + 2 * kv) + row), e.matmul, shape, 1, f"{version} backward",
    )  # fmt: skip
    return forward, backward


def _moving(name: str, e: Elements, elements: float, count: int = 1) -> Kernel:
    """Return a kernel that reads and writes so many elements in all."""
    return Kernel(name, float(elements), float(e.activation * elements), "fp32", count=count)


def _ring(e: Elements, heads: Heads, version: str, at: Context) -> tuple[Operator, ...]:
    cp, length = at.ranks, heads.sequence // at.ranks
    q, kv, row = _local(heads, cp)
    over = pairs(cp, length, causal=heads.causal, zigzag=at.zigzag).max(axis=0)
    half = heads.causal and at.zigzag  # half of the queries meet all keys, or all half of them
    steps = [
        _kernels(e, heads, version, rows=length // 2 if half and step else length, columns=length,
                 over=float(over[step]))
        for step in range(cp)
    ]  # fmt: skip
    once = Beside(Flow("shift", float(e.activation * kv)), "cp")
    both = Beside(Flow("shift", float(2 * e.activation * kv)), "cp")
    forward: list[Part] = []
    backward: list[Part] = []
    for step in range(cp - 1):
        forward += [once, steps[step][0]]
    for step in range(cp):
        backward += [
            both if 0 < step < cp - 1 else once,
            steps[cp - 1 - step][1],
            _moving("attention grad sum", e, _summed(step, cp, q, kv)),
        ]
    merge = _moving("attention merge", e, 3 * q, count=cp)
    held = float(e.activation * cp * (q + kv) + cp * row)
    begin = Operator(
        name="attention begin",
        forward=(_moving("attention copy", e, 2 * kv),),
        input_grad=(_moving("attention grad sum", e, 3 * kv),),
        core_input_bytes=0.0,
        forward_bytes=float(e.activation * kv),
        backward_bytes=float(e.activation * (q + 4 * kv)),
    )
    ring = Operator(
        name="attention",
        forward=tuple(forward),
        input_grad=tuple(backward),
        kept_bytes=float(e.activation * (q + kv) + row),
        core_input_bytes=float(e.activation * (q + kv)),
        forward_bytes=held,
        # the gradient of the result, that of the queries, of a step and of all; two buffers of K,
        # V and their gradients, and those of a step
        backward_bytes=float(e.activation * (3 * q + 5 * kv) + FP32 * q),
        model_flops=_model_flops(heads, cp),
    )
    end = Operator(
        name="attention end",
        forward=(steps[cp - 1][0], merge),
        core_input_bytes=0.0,
        forward_bytes=held + e.activation * q,
    )
    return begin, ring, end


def _summed(step: int, cp: int, q: int, kv: int) -> int:
    """Return the elements moved to add a step's gradients; those of K, V last wait for the ring."""
    if step == 0:
        return 2 * (q + kv)
    return 3 * q if step == cp - 1 else 3 * (q + kv)


def _model_flops(heads: Heads, cp: int) -> float:
    return 4.0 * heads.batch * heads.queries * heads.dim * float(heads.sequence) ** 2 / cp


def _all_gather(e: Elements, heads: Heads, version: str, at: Context) -> tuple[Operator, ...]:
    cp, length = at.ranks, heads.sequence // at.ranks
    q, kv, row = _local(heads, cp)
    over = float(pairs(cp, length, causal=heads.causal, zigzag=at.zigzag).sum(axis=1).max())
    parts = 2 if heads.causal and at.zigzag else 1  # a kernel for each chunk of queries
    columns = heads.sequence // parts  # on the mean of both chunks
    forward, backward = (
        replace(kernel, count=parts)
        for kernel in _kernels(
            e, heads, version, rows=length // parts, columns=columns, over=over / parts
        )
    )
    gather = Along(Flow("all_gather", float(e.activation * cp * kv)), "cp")
    scatter = Along(Flow("reduce_scatter", float(e.activation * cp * kv)), "cp")
    copy = _moving("attention copy", e, 2 * kv)
    ordered = _moving("attention order", e, 2 * cp * kv)
    return (
        Operator(
            name="attention",
            forward=(copy, gather, ordered, forward),
            input_grad=(copy, gather, ordered, backward, ordered, scatter),
            kept_bytes=float(e.activation * (q + kv) + row),
            core_input_bytes=float(e.activation * (q + kv)),
            forward_bytes=float(e.activation * (q + 2 * cp * kv)),
            backward_bytes=float(e.activation * (2 * q + kv + 3 * cp * kv) + FP32 * q),
            model_flops=_model_flops(heads, cp),
        ),
    )


def _all_to_all(e: Elements, heads: Heads, version: str, at: Context) -> tuple[Operator, ...]:
    cp = at.ranks
    q, kv, _ = _local(heads, cp)
    own = replace(heads, queries=heads.queries // cp, keys=heads.keys // cp)
    whole = flash_attention(e, own, version)

    def swap(elements: int, count: int = 1) -> Along:
        return Along(Flow("all_to_all", float(e.activation * elements), count=count), "cp")

    def copied(elements: int) -> Kernel:
        return _moving("attention layout", e, 2 * elements)

    to_heads = (copied(q + kv), swap(q), swap(kv // 2, 2), copied(q + kv))
    result = (copied(q), swap(q), copied(q))
    back = (copied(2 * q), swap(q, 2), copied(2 * q))
    return (
        Operator(
            name="attention",
            forward=(*to_heads, *whole.forward, *result),
            input_grad=(*back, *whole.input_grad, *to_heads),
            kept_bytes=whole.kept_bytes,
            core_input_bytes=whole.core_input_bytes,
            # shares of the sequence beside those of the heads, and copies as they are sent
            forward_bytes=float(e.activation * (3 * q + kv)),
            backward_bytes=float(e.activation * (4 * q + 2 * kv) + FP32 * q),
            model_flops=whole.model_flops,
        ),
    )


STYLES: Mapping[str, Callable[[Elements, Heads, str, Context], tuple[Operator, ...]]] = {
    "ring": _ring,
    "all_to_all": _all_to_all,
    "all_gather": _all_gather,
}
"""Operators of attention by `plan.cp_style`."""
