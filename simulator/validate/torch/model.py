"""The stages of a model in torch: a small decoder whose weight gradients can wait."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from simulator.validate.torch.job import Job
from simulator.validate.torch.peers import Peers, part

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
}


class Later:
    """Products whose weight gradients a backward leaves for a W; None where it computes all."""

    def __init__(self) -> None:
        self.calls: list[tuple[Linear, Tensor, Tensor]] | None = None


class _InputGrad(torch.autograd.Function):
    """A linear product that, going backward, computes the gradient of its input only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: Linear) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer, ctx.calls = layer, layer.later.calls
        return functional.linear(x, weight, layer.product_bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (x,), layer, grad = ctx.saved_tensors, ctx.layer, grads[0]
        ctx.calls.append((layer, x.detach(), grad))  # with its graph it would keep itself alive
        return grad @ layer.weight, None, None


class Linear(nn.Module):
    """A matrix product with or without bias.

    With `sums` its inputs are divided over those peers: their products are summed before the bias.
    """

    def __init__(
        self, inputs: int, outputs: int, bias: bool, later: Later, sums: Peers | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * 0.02)
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None
        self.later, self.sums = later, sums if sums is not None and sums.size > 1 else None

    @property
    def product_bias(self) -> nn.Parameter | None:
        """The bias, where it is a part of the product."""
        return None if self.sums else self.bias

    def forward(self, x: Tensor) -> Tensor:
        """Return the product; its weight gradient waits where a W follows."""
        if self.later.calls is None:
            out = functional.linear(x, self.weight, self.product_bias)
        else:
            out = _InputGrad.apply(x, self.weight, self)
        if self.sums is None:
            return out
        out = self.sums.leave(out)
        return out if self.bias is None else out + self.bias


@torch.no_grad()
def weight_grads(calls: list[tuple[Linear, Tensor, Tensor]]) -> None:
    """Add the weight gradients that an I has left."""
    for layer, x, grad in calls:
        rows, ins = grad.flatten(0, -2), x.flatten(0, -2)
        layer.weight.grad.addmm_(rows.t(), ins)
        if (bias := layer.product_bias) is not None:
            bias.grad.add_(rows.sum(0))


def norm(model: dict[str, Any]) -> nn.Module:
    """Return one of `Model.norm`."""
    size = model["hidden_size"]
    if model["norm"] == "rms_norm":
        return nn.RMSNorm(size)
    return nn.LayerNorm(size, bias=model["norm"] == "layer_norm")


class Layer(nn.Module):
    """Attention and MLP, each behind a norm."""

    def __init__(self, model: dict[str, Any], later: Later, peers: Peers) -> None:
        super().__init__()
        size, inner, dim = model["hidden_size"], model["intermediate_size"], model["head_dim"]
        heads, pairs = model["num_attention_heads"], model["num_key_value_heads"]
        self.heads, self.pairs, self.peers = heads // peers.size, pairs // peers.size, peers
        self.dim, self.rotary = dim, model["position"] == "rotary"
        bias, out = model["attention_bias"], model["output_bias"]
        self.gated, self.activation = model["gated_mlp"], ACTIVATIONS[model["activation"]]
        self.first = norm(model)
        self.qkv = Linear(size, (heads + 2 * pairs) * dim, bias, later)
        self.out = Linear(heads * dim, size, bias if out is None else out, later, peers)
        self.second = norm(model)
        self.up = Linear(size, inner * (1 + self.gated), model["mlp_bias"], later)
        self.down = Linear(inner, size, model["mlp_bias"], later, peers)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        enter = self.peers.enter
        x = x + self.out(self._attended(self.qkv(enter(self.first(x)))))
        y = self.up(enter(self.second(x)))
        if self.gated:
            gate, y = y.chunk(2, -1)
            return x + self.down(self.activation(gate) * y)
        return x + self.down(self.activation(y))

    def _attended(self, qkv: Tensor) -> Tensor:
        sizes = [self.heads * self.dim, self.pairs * self.dim, self.pairs * self.dim]
        q, k, v = (
            part.unflatten(-1, (-1, self.dim)).transpose(1, 2) for part in qkv.split(sizes, -1)
        )
        if self.rotary:
            q, k = rotated(q), rotated(k)
        if self.pairs != self.heads:
            k, v = (t.repeat_interleave(self.heads // self.pairs, 1) for t in (k, v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).flatten(2)


def rotated(x: Tensor) -> Tensor:
    """Return queries or keys turned by their positions (Su et al., 2021, arXiv 2104.09864)."""
    half = x.shape[-1] // 2
    rates = torch.exp(torch.arange(half, device=x.device) * (-math.log(10000.0) / half))
    angles = torch.outer(torch.arange(x.shape[-2], device=x.device), rates)
    a, b = x[..., :half], x[..., half : 2 * half]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos, x[..., 2 * half :]], -1)


class Stage(nn.Module):
    """Consecutive layers, with the embedding before the first and head and loss after the last.

    Parameters come from the job's seed and the number of their layer, so that every process that
    builds a layer has the same ones; their names count layers through the whole model. Of each
    parameter a rank holds its own part.
    """

    def __init__(self, job: Job, layers: range, peers: Peers, *, first: bool, last: bool) -> None:
        super().__init__()
        model, self.later, self.peers = job.model, Later(), peers
        size, vocab = model["hidden_size"], model["vocab_size"]
        count = model["num_hidden_layers"]
        self.embedding = self.positions = self.norm = self.head = None
        if first:
            torch.manual_seed(job.seed + 1)
            self.embedding = nn.Embedding(vocab, size)
            if model["position"] == "learned":
                self.positions = nn.Parameter(
                    torch.randn(model["max_position_embeddings"], size) * 0.02
                )
        self.layers = nn.ModuleDict()
        for number in layers:
            torch.manual_seed(job.seed + 2 + number)
            self.layers[str(number)] = Layer(model, self.later, peers)
        if last:
            torch.manual_seed(job.seed + 2 + count)
            self.norm, self.head = norm(model), Linear(size, vocab, model["head_bias"], self.later)
        if peers.size > 1:
            for name, param in self.named_parameters():
                param.data = part(job, name, param.data, peers.index).clone()

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return what the next stage receives, or the mean loss of a token at the end."""
        if self.embedding is not None:
            x = self.peers.embed(x, self.embedding.weight)
            if self.positions is not None:
                x = x + self.positions[: x.shape[1]]
        for layer in self.layers.values():
            x = layer(x)
        if self.head is None or self.norm is None:
            return x
        logits = self.head(self.peers.enter(self.norm(x)))
        assert targets is not None  # of the last stage
        return self.peers.loss(logits.flatten(0, 1), targets.flatten())


def stage_of(job: Job, number: int, peers: Peers) -> Stage:
    """Return one stage of a job."""
    begin = sum(job.layers[:number])
    layers = range(begin, begin + job.layers[number])
    return Stage(job, layers, peers, first=number == 0, last=number == len(job.layers) - 1)


def whole(job: Job) -> Stage:
    """Return the model in one stage."""
    return Stage(job, range(sum(job.layers)), Peers(), first=True, last=True)


def tokens(job: Job, step: int, replica: int, microbatch: int) -> Tensor:
    """Return the tokens of a microbatch, and one more of each sample as the last target."""
    number = (step * job.dp + replica) * job.num_microbatches + microbatch
    random = torch.Generator().manual_seed(1_000_003 * (job.seed + 1) + number)
    shape = (job.microbatch_size, job.sequence_length + 1)
    return torch.randint(job.model["vocab_size"], shape, generator=random)


OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3, foreach=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-4, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-4, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-4, foreach=True),
}


def buckets(params: list[nn.Parameter], least: float | None) -> list[Tensor]:
    """Give parameters gradients that are parts of a few flat arrays, and return these.

    Buckets fill from the last parameter to the first, as gradients become ready; each holds at
    least so many bytes but the last one.
    """
    runs: list[list[nn.Parameter]] = [[]]
    full = 0
    for param in reversed(params):
        if least is not None and full >= least:
            runs.append([])
            full = 0
        runs[-1].append(param)
        full += param.numel() * param.element_size()
    out = []
    for run in runs:
        flat = torch.zeros(sum(p.numel() for p in run), device=run[0].device)
        begin = 0
        for p in run:
            p.grad = flat[begin : begin + p.numel()].view_as(p)
            begin += p.numel()
        out.append(flat)
    return out
