"""A Llama under FSDP2 and tensor parallelism in torch, on tensors without data, and what is alive.

One rank of a process group that sends nothing: every tensor is fake, every operator of torch is
seen, and the bytes of the storages that are alive are added up. What the caching allocator would
reserve for them follows by its rules, from when and on which stream each was made.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import distributed, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from simulator.hardware.allocator import Allocator


class Size(NamedTuple):
    vocab: int
    layers: int
    hidden: int
    heads: int
    keys: int
    inner: int


class Norm(nn.Module):
    """RMSNorm as torchtitan wrote it in 2024."""

    def __init__(self, hidden):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x):
        return norm(x, self.weight)


def norm(x, weight):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * weight


def rotated(x, turns):
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    turned = pairs * turns[: x.shape[1]].view(1, x.shape[1], 1, -1)
    return torch.view_as_real(turned).flatten(3).type_as(x)


def repeated(x, times):
    b, s, heads, size = x.shape
    return x.unsqueeze(3).expand(b, s, heads, times, size).reshape(b, s, heads * times, size)


class Attention(nn.Module):
    def __init__(self, z):
        super().__init__()
        self.size, self.times = z.hidden // z.heads, z.heads // z.keys
        self.wq, self.wo = (nn.Linear(z.hidden, z.hidden, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(z.hidden, z.keys * self.size, bias=False) for _ in range(2))

    def forward(self, x, turns):
        b, s, _ = x.shape
        q, k, v = (w(x).view(b, s, -1, self.size) for w in (self.wq, self.wk, self.wv))
        q, k = rotated(q, turns), rotated(k, turns)
        every = (q, repeated(k, self.times), repeated(v, self.times))
        heads = (one.transpose(1, 2) for one in every)
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.wo(mixed.transpose(1, 2).contiguous().view(b, s, -1))


class FeedForward(nn.Module):
    def __init__(self, z):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(z.hidden, z.inner, bias=False) for _ in range(2))
        self.w2 = nn.Linear(z.inner, z.hidden, bias=False)

    def forward(self, x):
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self, z):
        super().__init__()
        self.attention, self.feed_forward = Attention(z), FeedForward(z)
        self.attention_norm, self.ffn_norm = Norm(z.hidden), Norm(z.hidden)

    def forward(self, x, turns):
        h = x + self.attention(self.attention_norm(x), turns)
        return h + self.feed_forward(self.ffn_norm(h))


class Llama(nn.Module):
    def __init__(self, z, length):
        super().__init__()
        self.tok_embeddings = nn.Embedding(z.vocab, z.hidden)
        self.layers = nn.ModuleDict({str(i): Layer(z) for i in range(z.layers)})
        self.norm, self.output = Norm(z.hidden), nn.Linear(z.hidden, z.vocab, bias=False)
        ones = torch.ones(length, z.hidden // z.heads // 2)
        self.register_buffer("turns", torch.polar(ones, ones))

    def forward(self, x):
        h = self.tok_embeddings(x)
        for layer in self.layers.values():
            h = layer(h, self.turns)
        return self.output(self.norm(h))


def cross_entropy(logits, labels):
    """Return the loss as torchtitan wrote it: its caller holds the logits while it is computed."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))


ENDS = {
    "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "output": ColwiseParallel(
        input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
    ),
}
LAYER = {
    "attention_norm": SequenceParallel(),
    "attention": PrepareModuleInput(
        input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
    ),
    **{f"attention.{w}": ColwiseParallel() for w in ("wq", "wk", "wv")},
    "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
    "ffn_norm": SequenceParallel(),
    "feed_forward": PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
    ),
    "feed_forward.w1": ColwiseParallel(),
    "feed_forward.w3": ColwiseParallel(),
    "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
}
"""torchtitan's plans of tensor parallelism."""


class Alive(TorchDispatchMode):
    """Bytes of fake storages that are alive, and the most at any time."""

    def __init__(self):
        super().__init__()
        self.sizes, self.now, self.peak = {}, 0, 0
        self.allocator, self.blocks = Allocator(expandable=True), {}
        self.products = defaultdict(int)
        self.phase, self.paused = "", False

    def note(self, tensor):
        if isinstance(tensor, FakeTensor) and not self.paused:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self.sizes:
                self.sizes[key] = (
                    storage.nbytes(),
                    weakref.ref(storage),
                    torch.cpu.current_stream(),
                )
                self.now += storage.nbytes()
                weakref.finalize(storage, self.drop, key)
                self.peak = max(self.peak, self.now)
                self.take(key)

    def take(self, key):
        size, _, stream = self.sizes[key]
        if size:
            self.blocks[key] = self.allocator.take(size, id(stream))

    def give(self, key):
        block = self.blocks.pop(key, None)
        if block is not None:
            self.allocator.give(block)

    def drop(self, key):
        self.now -= self.sizes.pop(key, (0, None))[0]
        self.give(key)

    def resize(self):
        """Follow FSDP, which frees gathered weights by resizing their storages."""
        resized = []
        for key, (size, found, stream) in self.sizes.items():
            storage = found()
            if storage is not None and storage.nbytes() != size:
                self.now += storage.nbytes() - size
                self.sizes[key] = (storage.nbytes(), found, stream)
                self.give(key)
                resized.append(key)
        for key in resized:
            self.take(key)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        out = function(*args, **(kwargs or {}))
        self.resize()
        if "wait_tensor" in str(function):  # which gives back its argument, where tensors have data
            self.drop(args[0].untyped_storage()._cdata)
        if function is torch.ops.aten.mm.default:
            self.products[self.phase] += 1
        for tensor in tree_leaves(out):
            self.note(tensor)
        return out

    @contextmanager
    def only_real(self):
        """Leave out tensors with which DTensor works out shapes."""
        original = ShardingPropagator._propagate_tensor_meta_non_cached

        def quietly(*args, **kwargs):
            before, self.paused = self.paused, True
            try:
                return original(*args, **kwargs)
            finally:
                self.paused = before

        ShardingPropagator._propagate_tensor_meta_non_cached = quietly
        try:
            yield
        finally:
            ShardingPropagator._propagate_tensor_meta_non_cached = original


class Run(NamedTuple):
    """Most bytes alive in parts of a step, the products that each ran, and what is reserved."""

    peak: dict[str, int]
    products: dict[str, int]
    reserved: int
    pools: list[int]
    """Bytes that each stream has reserved, those of the one that computes first."""


def step(z, *, shards, tp, recompute, batch, length):
    """Return what the second step of one rank takes; parts are forward, loss, backward, update."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=shards * tp)
    try:
        return _step(z, shards, tp, recompute, batch, length)
    finally:
        distributed.destroy_process_group()


def _step(z, shards, tp, recompute, batch, length):
    mesh = init_device_mesh("cpu", (shards, tp), mesh_dim_names=("dp", "tp"))
    with torch.device("meta"):
        model = parallel(Llama(z, length), mesh, tp, recompute)
    alive, peak = Alive(), {}
    with FakeTensorMode(allow_non_fake_inputs=True), alive.only_real():
        model.to_empty(device="cpu")
        update = torch.optim.AdamW(model.parameters(), foreach=True)

        def phase(name):
            if alive.phase:
                peak[alive.phase] = alive.peak
            alive.phase, alive.peak = name, alive.now

        with alive:
            for tensor in (*model.parameters(), *model.buffers()):
                alive.note(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
            for _ in range(2):
                alive.products.clear()
                tokens, labels = (torch.randint(0, 10, (batch, length)) for _ in range(2))
                phase("forward")
                with loss_parallel() if tp > 1 else nullcontext():
                    logits = model(tokens)
                    phase("loss")
                    loss = cross_entropy(logits, labels)
                    del logits
                    phase("backward")
                    loss.backward()
                del loss
                phase("update")
                update.step()
                update.zero_grad()
            phase("")
    return run_of(alive, peak)


def run_of(alive, peak):
    pools = defaultdict(int)
    for (stream, _), pool in alive.allocator.pools.items():
        pools[stream] += pool.reserved
    return Run(peak, dict(alive.products), alive.allocator.reserved, [*pools.values()])


def parallel(model, mesh, tp, recompute, ends=ENDS, *, stays=False):
    if tp > 1:
        if ends:
            parallelize_module(model, mesh["tp"], ends)
        for layer in model.layers.values():
            parallelize_module(layer, mesh["tp"], LAYER)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for name, layer in model.layers.items():
        one = checkpoint_wrapper(layer, preserve_rng_state=False) if recompute else layer
        model.layers[name] = one
        again = int(name) < len(model.layers) - 1 and not stays
        fully_shard(one, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=again)
    return fully_shard(model, mesh=mesh["dp"], mp_policy=policy)  # whose own weights stay


class Moved(TorchDispatchMode):
    """Bytes that kernels read and write, views and memory without values aside."""

    VIEWS = frozenset(
        ("view", "expand", "unsqueeze", "view_as_complex", "view_as_real", "_unsafe_view", "_conj",
         "alias", "detach", "transpose", "_reshape_alias", "empty_like",
         "squeeze", "slice", "t", "permute", "as_strided")
    )  # fmt: skip

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function.__name__.partition(".")[0] not in self.VIEWS:
            read = {  # a storage that is read twice by a kernel is loaded once
                t.untyped_storage()._cdata: self.size(t)
                for t in tree_leaves((args, kwargs))
                if isinstance(t, torch.Tensor)
            }
            self.bytes += sum(read.values()) + sum(map(self.size, tree_leaves(out)))
        return out

    @staticmethod
    def size(x):
        if not isinstance(x, torch.Tensor):
            return 0
        return min(x.untyped_storage().nbytes(), x.numel() * x.element_size())


def moved(function, *inputs):
    """Return the bytes that a function of tensors without data moves, forward and backward."""
    with Moved() as count:
        out = function(*inputs)
        forward = count.bytes
        torch.autograd.grad(out, [x for x in inputs if x.requires_grad], torch.empty_like(out))
    return forward, count.bytes - forward
