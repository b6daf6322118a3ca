"""Recomputation by operators: what forward saves of a layer, and what backward runs again.

`lightly` is for "light", `by_operator` for "selective-op": torchtitan's selective activation
checkpointing with the option "op" (torchtitan,
models/llama/parallelize_llama.py, December 2024): of what a layer's operators return, fused
attention's, reduce-scatters' and every second matrix product's is saved, in the order wq, wk, wv,
wo, w1, w3, w2: wk, wo and w3 run again, as does all that is element-wise, each all-gather and each
cast to fp8. A model without a gate has one product less: w1 is saved and w2's turn to run again
comes, but nothing needs it.

A compiled layer drops what backward does not need: the result of w2, which is saved in vain, and wo
where a reduce-scatter's result stands for it. wq, wk, wv are one product here, and w1 and w3; their
parts count by their columns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from simulator.lower.operators import Along, Beside, Elements, Operator, Part
from simulator.program import Kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Elements of a layer's tensors on one rank."""

    hidden: float
    """Of the residual stream, all tokens."""
    local_hidden: float
    """Of the tokens that the rank norms."""
    queries: float
    keys: float
    inner: float
    """Of the MLP, without a gate."""
    gated: bool
    scattered: bool
    """Whether results are reduce-scattered over tensor-parallel ranks."""
    compiled: bool


class _Again(NamedTuple):
    saved: float
    parts: tuple[Part, ...]


def by_operator(layer: tuple[Operator, ...], e: Elements, x: Sizes) -> tuple[Operator, ...]:
    """Return the operators of a layer with what `plan.recompute` "selective-op" makes of them."""
    out = []
    for index, o in enumerate(layer):
        rule = RULES.get(o.name, _elementwise)
        saved, parts = rule(o, e, x)
        if o.name == "leave tp" and index > [p.name for p in layer].index("fc1"):
            parts = ()  # the sum that leaves the layer
        parts = tuple(p for p in parts if not _is_scatter(p))
        out.append(replace(o, saved_bytes=saved, again=parts))
    return tuple(out)


def _is_scatter(part: Part) -> bool:
    flow = part.flow if isinstance(part, (Along, Beside)) else part
    return flow.name == "reduce_scatter"


def _elementwise(o: Operator, _e: Elements, _x: Sizes) -> _Again:
    return _Again(0.0, o.forward)


def _input(o: Operator, _e: Elements, _x: Sizes) -> _Again:
    return _Again(o.kept_bytes, o.forward)


def _columns(o: Operator, e: Elements, part: float, whole: float) -> tuple[Part, ...]:
    """Return forward with a share of the columns of its product."""

    def cut(kernel: Part) -> Part:
        if not isinstance(kernel, Kernel) or kernel.matmul is None:
            return kernel
        batch, m, n, k = kernel.matmul
        columns = round(n * part / whole)
        read = 1 if kernel.dtype == "fp8" else e.activation
        dropped = batch * (n - columns) * (read * k + e.activation * m)
        return replace(
            kernel, flops=2.0 * batch * m * columns * k, bytes=kernel.bytes - dropped,
            matmul=(batch, m, columns, k),
        )  # fmt: skip

    return tuple(cut(p) for p in o.forward)


def _without_product(o: Operator) -> tuple[Part, ...]:
    return tuple(p for p in o.forward if not isinstance(p, Kernel) or p.matmul is None)


def _qkv(o: Operator, e: Elements, x: Sizes) -> _Again:
    return _Again(0.0, _columns(o, e, x.keys, x.queries + 2 * x.keys))


def _attention(o: Operator, e: Elements, x: Sizes) -> _Again:
    """Save wq's and wv's results, which are as large as q and v, and attention's own."""
    return _Again(o.kept_bytes - e.activation * x.keys, ())


def _proj(o: Operator, e: Elements, x: Sizes) -> _Again:
    low = any(isinstance(p, Kernel) and p.dtype == "fp8" for p in o.forward)
    dropped = x.compiled and x.scattered
    parts = _without_product(o) if dropped else o.forward
    return _Again(0.0 if low else o.kept_bytes, parts)  # bf16: attention's result


def _leave(o: Operator, _e: Elements, x: Sizes) -> _Again:
    return _Again(0.0, () if x.scattered else o.forward)


def _residual_norm(o: Operator, e: Elements, x: Sizes) -> _Again:
    """Save the reduce-scatter's result, from which the norm's input comes again."""
    return _Again(e.activation * x.local_hidden if x.scattered else 0.0, o.forward)


def _fc1(o: Operator, e: Elements, x: Sizes) -> _Again:
    return _Again(0.0, _columns(o, e, 1, 2) if x.gated else _without_product(o))


def _activation(o: Operator, e: Elements, x: Sizes) -> _Again:
    return _Again(e.activation * x.inner, o.forward)


def _fc2(o: Operator, e: Elements, x: Sizes) -> _Again:
    saved = e.activation * (x.hidden * x.gated + x.local_hidden * x.scattered)
    return _Again(0.0 if x.compiled else saved, _without_product(o))


def _nothing(_o: Operator, _e: Elements, _x: Sizes) -> _Again:
    return _Again(0.0, ())


RULES: Mapping[str, Callable[[Operator, Elements, Sizes], _Again]] = {
    "attention norm": _input,
    "qkv": _qkv,
    "attention": _attention,
    "proj": _proj,
    "leave tp": _leave,
    "mlp norm": _residual_norm,
    "fc1": _fc1,
    "fc2": _fc2,
    "mlp residual": _nothing,
    **dict.fromkeys(("gelu", "silu", "relu", "relu2"), _activation),
}
"""What is saved of each operator of a layer and run again; of others nothing, and all."""


NORMS = ("attention norm", "cross norm", "mlp norm", "q norm", "kv norm")
UP = ("q", "q up", "kv up", "rotary")
ACTIVATIONS = ("gelu", "silu", "relu", "relu2", "inner dropout")
READERS = {
    **dict.fromkeys(("qkv", "cross q", "q down", "kv down", "fc1", "router", "shared fc1"),
                    "layernorm"),
    **dict.fromkeys(("fc2", "shared fc2", "expert fc2"), "moe_act"),
}  # fmt: skip
"""Products that read what a norm or an activation function gives, and the module that it is of."""
MODULES = ("layernorm", "moe_act", "mla_up_proj")
"""Of `plan.recompute_modules`."""


def lightly(
    layer: tuple[Operator, ...], modules: Collection[str] | None = None
) -> tuple[Operator, ...]:
    """Return the operators of a layer that computes what is cheap again (`plan.recompute` "light").

    Norms, activation functions and, where attention is latent and fused, what makes heads from few
    numbers a token: DeepSeek-V3 (arXiv 2412.19437, section 3.2.3), Megatron-LM's
    ``--recompute-modules layernorm moe_act mlp mla_up_proj``. What they give is not kept: casts of
    it to fp8 run again too. Only some `modules` do where they are given.
    """
    names, wanted = [o.name for o in layer], MODULES if modules is None else modules
    up = "mla_up_proj" in wanted and "kv up" in names and "attention" in names
    cheap = ("layernorm" in wanted) * NORMS + ("moe_act" in wanted) * ACTIVATIONS

    def one(o: Operator, following: str) -> Operator:
        saved, again = o.kept_bytes, tuple[Part, ...]()
        if o.name in cheap:
            again = o.forward
        elif up and (o.name in UP or (o.name == "enter tp" and following in UP)):
            saved, again = 0.0, o.forward
        elif READERS.get(o.name) in wanted:
            saved, again = 0.0, _without_product(o)
        elif up and o.core_input_bytes is not None:
            saved -= o.core_input_bytes
        return replace(o, saved_bytes=saved, again=tuple(p for p in again if not _is_scatter(p)))

    return tuple(one(o, following) for o, following in zip(layer, [*names[1:], ""], strict=True))
