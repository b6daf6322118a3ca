"""Optimizers: what each keeps for a parameter, and which arrays its kernels read and write.

An update is a list of passes over all of a rank's parameters. Arrays have letters: ``w`` the weight
that is updated (the fp32 master copy where there is one), ``c`` the low-precision copy that it is
rounded to, ``g`` the gradient, ``m`` and ``v`` the states, ``t`` an fp32 temporary.

Unfused passes are those of PyTorch's multi-tensor (``foreach``) implementations, one kernel each
for all tensors; a pass that reads one array twice loads it once. A fused kernel reads and writes
each array once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

OptimizerName: TypeAlias = Literal[
    "sgd", "momentum", "rmsprop", "adam", "adamw", "adamw_bf16", "adafactor", "adam8bit", "muon"
]


class Pass(NamedTuple):
    """One element-wise kernel: the letters of the arrays it reads, and of those it writes."""

    name: str
    reads: str
    writes: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """What one optimizer keeps and moves, the master copy apart."""

    states: Mapping[str, float]
    """Bytes a parameter of each state array. Matrices of `factored` and `orthogonal` keep less."""
    flops: int
    """Floating-point operations per parameter of one update."""
    fused: tuple[Pass, ...]
    unfused: tuple[Pass, ...] = ()
    """Empty where there is no unfused form."""
    factored: bool = False
    """Whether ``v`` of a matrix is the sums of its rows and of its columns."""
    orthogonal: bool = False
    """Whether matrices of layers keep ``m`` alone, which is orthogonalised by products."""

    @property
    def state_bytes(self) -> float:
        """Bytes of states a parameter that is in no matrix."""
        return sum(self.states.values())


ADAM_UNFUSED = (
    Pass("lerp m", "mg", "m"),
    Pass("scale v", "v", "v"),
    Pass("addcmul v", "vg", "v"),
    Pass("sqrt", "v", "t"),
    Pass("divide by correction", "t", "t"),
    Pass("add epsilon", "t", "t"),
    Pass("addcdiv", "wmt", "w"),
    Pass("round", "w", "c"),
)
DECAY = Pass("decay", "w", "w")
EIGHT_BIT = 1 + 4 / 2048

OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": Optimizer(
        states={},
        flops=2,
        fused=(Pass("sgd", "wg", "wc"),),
        unfused=(Pass("add", "wg", "w"), Pass("round", "w", "c")),
    ),
    "momentum": Optimizer(
        states={"m": 4},
        flops=4,
        fused=(Pass("momentum", "wgm", "wmc"),),
        unfused=(
            Pass("scale m", "m", "m"),
            Pass("add m", "mg", "m"),
            Pass("add", "wm", "w"),
            Pass("round", "w", "c"),
        ),
    ),
    "rmsprop": Optimizer(
        states={"v": 4},
        flops=8,
        fused=(Pass("rmsprop", "wgv", "wvc"),),
        unfused=(
            Pass("scale v", "v", "v"),
            Pass("addcmul v", "vg", "v"),
            Pass("sqrt", "v", "t"),
            Pass("add epsilon", "t", "t"),
            Pass("addcdiv", "wgt", "w"),
            Pass("round", "w", "c"),
        ),
    ),
    "adam": Optimizer(
        states={"m": 4, "v": 4},
        flops=12,
        fused=(Pass("adam", "wgmv", "wmvc"),),
        unfused=ADAM_UNFUSED,
    ),
    "adamw": Optimizer(
        states={"m": 4, "v": 4},
        flops=14,
        fused=(Pass("adamw", "wgmv", "wmvc"),),
        unfused=(DECAY, *ADAM_UNFUSED),
    ),
    "adamw_bf16": Optimizer(
        states={"m": 2, "v": 2},
        flops=14,
        fused=(Pass("adamw", "wgmv", "wmvc"),),
    ),
    "adafactor": Optimizer(
        states={"v": 4},
        flops=16,
        fused=(
            Pass("sum rows and columns", "g", "v"),
            Pass("root mean square of update", "gv", ""),
            Pass("root mean square of weight", "w", ""),
            Pass("update", "wgv", "wc"),
        ),
        unfused=(
            Pass("square", "g", "t"),
            Pass("sum rows", "t", "v"),
            Pass("sum columns", "t", "v"),
            Pass("outer product", "v", "t"),
            Pass("times gradient", "tg", "t"),
            Pass("root mean square of update", "t", ""),
            Pass("clip update", "t", "t"),
            Pass("root mean square of weight", "w", ""),
            Pass("times rate", "t", "t"),
            Pass("add", "wt", "w"),
            Pass("round", "w", "c"),
        ),
        factored=True,
    ),
    "adam8bit": Optimizer(
        states={"m": EIGHT_BIT, "v": EIGHT_BIT},
        flops=30,
        fused=(Pass("adam8bit", "wgmv", "wmvc"),),
    ),
    "muon": Optimizer(
        states={"m": 4, "v": 4},
        flops=14,
        fused=(Pass("adamw", "wgmv", "wmvc"),),
        unfused=(DECAY, *ADAM_UNFUSED),
        orthogonal=True,
    ),
}
"""Optimizers by name.

- ``adam``: Kingma & Ba, 2015 (arXiv 1412.6980); ``adamw``: Loshchilov & Hutter, 2019 (1711.05101).
- ``adamw_bf16``: AdamW with both moments in bf16 (DeepSeek-V3, arXiv 2412.19437, section 3.3.3);
  they are rounded as they are written, so that there is no unfused form.
- ``rmsprop``: torch's, without momentum and not centred.
- ``adafactor``: Shazeer & Stern, 2018 (arXiv 1804.04235), algorithm 4, without momentum: the update
  is clipped by its own root mean square, which needs one more pass over the gradient, and scaled by
  the weight's. The fused form is three kernels over the gradient, for each sum comes before its
  use. Each pass over a matrix counts the row and column sums with it.
- ``adam8bit``: Dettmers et al., 2022 (arXiv 2110.02861), section 2.1: one byte a state, and an fp32
  scale for each block of 2048. It has no unfused form, for states are in 32 bits in registers only.
  Tensors of few elements, which bitsandbytes keeps in 32 bits, are taken like others.
- ``muon``: Jordan et al., 2024: matrices of layers by Newton-Schulz, see `lower.optimizers`; all
  others (embeddings, head, norms, biases) by AdamW, whose passes stand here.
"""
