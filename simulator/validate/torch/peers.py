"""Tensor-parallel peers: what each holds of a parameter, and the sums that they take together.

Megatron-LM's conjugate operators (Shoeybi et al., 2019, arXiv 1909.08053): what enters a region of
divided products is summed going backward, what leaves it going forward. The vocabulary is divided
too, and the loss takes a maximum and two sums of a number a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from simulator.validate.torch.job import Job

AXES = {
    "qkv.weight": 0, "qkv.bias": 0, "out.weight": 1, "up.weight": 0, "up.bias": 0, "down.weight": 1,
    "embedding.weight": 0, "head.weight": 0, "head.bias": 0,
}  # fmt: skip
"""Dimension along which a parameter is divided, by the end of its name; others are held whole."""


def part(job: Job, name: str, whole: Tensor, index: int) -> Tensor:
    """Return what the tp rank of an index holds of a parameter, or of its gradient."""
    short = ".".join(name.split(".")[-2:])
    axis = AXES.get(short)
    if job.tp == 1 or axis is None:
        return whole
    model = job.model
    heads, pairs, dim = (
        model[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    inner = model["intermediate_size"]
    together = {  # products of one input, each divided by itself
        "qkv": [heads * dim, pairs * dim, pairs * dim],
        "up": [inner] * (1 + model["gated_mlp"]),
    }  # fmt: skip
    sizes = together.get(short.partition(".")[0], [whole.shape[axis]])
    return torch.cat([x.chunk(job.tp, axis)[index] for x in whole.split(sizes, axis)], axis)


class Peers:
    """The tp ranks of one stage as one of them sees the others."""

    def __init__(self, size: int = 1, index: int = 0, group: Any = None) -> None:
        self.size, self.index, self.group = size, index, group
        self.before: Callable[[], None] = lambda: None
        self.after: Callable[[], None] = lambda: None
        """Called before a sum begins, and when it has ended."""

    def all_reduce(self, x: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Return a sum, or another reduction, over the peers."""
        out = x.detach().clone(memory_format=torch.contiguous_format)
        self.before()
        dist.all_reduce(out, op, group=self.group)
        self.after()
        return out

    def enter(self, x: Tensor) -> Tensor:
        """Return what goes into a divided product; its gradient is summed."""
        if self.size == 1:
            return x
        out: Tensor = _Enter.apply(x, self)
        return out

    def leave(self, x: Tensor) -> Tensor:
        """Return the sum of what each peer has made; its gradient is each one's."""
        if self.size == 1:
            return x
        out: Tensor = _Leave.apply(x, self)
        return out

    def embed(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """Return the vectors of tokens, each from the peer that holds its row."""
        if self.size == 1:
            return functional.embedding(tokens, weight)
        own, mine = self._own(tokens, len(weight))
        return self.leave(functional.embedding(own, weight) * mine.unsqueeze(-1))

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy of logits whose vocabulary is divided."""
        if self.size == 1:
            return functional.cross_entropy(logits, targets)
        highest = self.all_reduce(logits.max(-1).values, dist.ReduceOp.MAX)
        shifted = logits - highest.unsqueeze(-1)
        own, mine = self._own(targets, logits.shape[-1])
        hit = self.leave(shifted.gather(-1, own.unsqueeze(-1)).squeeze(-1) * mine)
        total = self.leave(shifted.exp().sum(-1))
        return (total.log() - hit).mean()

    def _own(self, tokens: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Return tokens counted from the first row held here, and which of them are here."""
        own = tokens - self.index * rows
        mine = (own >= 0) & (own < rows)
        return torch.where(mine, own, 0), mine


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.peers.all_reduce(grads[0]), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:
        return peers.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
