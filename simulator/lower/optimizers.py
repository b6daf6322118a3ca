"""Optimizer steps: the kernels of one update of a rank's parameters, and the states they need."""

from __future__ import annotations

from collections.abc import Sequence

from simulator.describe.optimizer import OPTIMIZERS, Optimizer, Pass
from simulator.describe.scenario import Scenario
from simulator.lower.buffers import gradient_bytes, separate_copies
from simulator.lower.operators import FP32, streaming
from simulator.lower.sharding import held_bytes, own_share
from simulator.lower.tensors import Tensors, elements
from simulator.program import Kernel, Work

ITERATIONS = 5
"""Newton-Schulz iterations of Muon (Jordan et al., 2024)."""

BF16 = 2
"""Bytes of the numbers that Muon orthogonalises."""


def saved_state_bytes(optimizer: str, t: Tensors) -> float:
    """Return how much less the states of matrices take than those of as many lone parameters.

    A factored second moment of r x c is r + c numbers (Shazeer & Stern, 2018, section 3); under
    Muon a matrix of a layer has momentum only.
    """
    rule = OPTIMIZERS[optimizer]
    if rule.factored:
        kept = sum((rows + columns) * count for rows, columns, count in t.hidden + t.ends)
        return rule.states["v"] * (elements(t.hidden + t.ends) - kept)
    return rule.states["v"] * elements(t.hidden) if rule.orthogonal else 0.0


def update_work(s: Scenario, t: Tensors) -> Work:
    """Return the update of what a rank trains; sharded, of its even share of it."""
    rule, name = OPTIMIZERS[s.run.optimizer], s.run.optimizer
    passes = rule.fused if s.run.fused_optimizer else rule.unfused
    shared = own_share(s, (t,))
    alone = shared - (elements(t.hidden) if rule.orthogonal else 0)
    sizes = _array_bytes(s, rule, alone)
    if rule.factored:
        sizes["v"] -= saved_state_bytes(name, t)
    kernels = [*_elementwise(separate_copies(s, passes), sizes, rule.flops * alone)]
    if rule.orthogonal and t.hidden:
        kernels += _muon(s, t)
    return Work("OPT", tuple(kernels))


def _array_bytes(s: Scenario, rule: Optimizer, count: int) -> dict[str, float]:
    """Return the bytes of each array of `describe.optimizer`, of `count` parameters."""
    held = held_bytes(s)
    each = {
        "w": held.master or held.weight, "g": gradient_bytes(s), "t": FP32, "x": BF16,
        "c": held.weight if held.master else 0, **rule.states,
    }  # fmt: skip
    return {letter: size * count for letter, size in each.items()}


def _elementwise(passes: Sequence[Pass], sizes: dict[str, float], flops: float) -> list[Kernel]:
    """Return a kernel for each pass; one that would only write an absent copy is left out."""
    kept = [p for p in passes if p.writes != "c" or sizes["c"]]
    return [
        streaming(p.name, flops / len(kept), sum(sizes[x] for x in p.reads + p.writes))
        for p in kept
    ]


NESTEROV = {
    True: (
        (
            Pass("momentum", "gm", "mx"),
            Pass("frobenius norm", "x", ""),
            Pass("normalise", "x", "x"),
        ),
        (Pass("update", "wx", "wc"),),
    ),
    False: (
        (
            Pass("lerp m", "mg", "m"),
            Pass("nesterov", "gm", "t"),
            Pass("cast", "t", "x"),
            Pass("frobenius norm", "x", ""),
            Pass("normalise", "x", "x"),
        ),
        (Pass("decay", "w", "w"), Pass("add", "wx", "w"), Pass("round", "w", "c")),
    ),
}
"""Passes of Muon before and after Newton-Schulz, by whether they are fused; ``x`` is in bf16."""


def _muon(s: Scenario, t: Tensors) -> list[Kernel]:
    """Return Muon's kernels for matrices of layers: momentum, Newton-Schulz, the update."""
    count, rule = elements(t.hidden), OPTIMIZERS["momentum"]
    sizes = _array_bytes(s, rule, count)
    before, last = NESTEROV[s.run.fused_optimizer]
    precision = "bf16" if "bf16" in s.cluster.node.device.peak else s.precision.matmul
    products = [
        kernel
        for shape in t.hidden
        for kernel in newton_schulz(*shape, precision=precision, fused=s.run.fused_optimizer)
    ]
    momentum, update = (rule.flops * count * share for share in (0.5, 0.5))
    after = separate_copies(s, last)
    return [
        *_elementwise(before, sizes, momentum), *products, *_elementwise(after, sizes, update)
    ]  # fmt: skip


def newton_schulz(
    rows: int, columns: int, count: int, *, precision: str, fused: bool
) -> list[Kernel]:
    """Return the products that orthogonalise `count` matrices X of rows x columns.

    Five times A = X X', B = bA + cA A, X = aX + B X, with X laid so that it has no more rows than
    columns (Jordan et al., 2024): 4n²m + 2n³ FLOPs each. Fused, the sums are added as products are
    written; else each is two kernels of its own, one that scales and one that adds.
    """
    n, m = min(rows, columns), max(rows, columns)
    times = ITERATIONS * count
    kernels = []
    for name, shape, added in (
        ("XX'", (1, n, n, m), 0),
        ("AA", (1, n, n, n), n * n),
        ("BX", (1, n, m, n), n * m),
    ):
        _, i, j, k = shape
        moved = i * k + k * j + i * j + (added if fused else 0)
        kernels.append(
            Kernel(f"muon {name}", 2.0 * i * j * k, float(BF16 * moved), precision, shape, times)
        )
        if added and not fused:
            size = float(BF16 * added)
            kernels += [
                Kernel(f"muon scale {name}", float(added), 2 * size, "fp32", count=times),
                Kernel(f"muon add {name}", 2.0 * added, 3 * size, "fp32", count=times),
            ]
    return kernels
