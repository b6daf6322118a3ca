"""What a torch module does, counted by unit: operators as they are dispatched on the meta device.

Public names of torch are used but for two: how a dispatch mode is written, and which autograd node
runs, by whose number a backward operator is known to belong to a unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from simulator.errors import DescriptionError

aten = torch.ops.aten

FREE = {
    aten._unsafe_view, aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty,
    aten.new_empty_strided, aten.lift_fresh, aten.detach, aten.alias,
}  # fmt: skip
"""Operators that move nothing, besides views."""

LOOK_UPS = {aten.embedding, aten.index_select, aten.gather, aten.index}
"""Operators that read of their first tensor only what they return."""


class Made(NamedTuple):
    """A matrix product as it was made."""

    batch: int
    m: int
    n: int
    k: int
    moved: float
    """Elements besides a weight, of a convolution; 0 for plain products."""
    input_grad: bool
    """Whether the first factor's gradient is needed."""


@dataclass
class Counts:
    """What one unit did, of a whole batch."""

    products: list[Made] = field(default_factory=list)
    attention: list[tuple[int, ...]] = field(default_factory=list)
    """(batch, length, queries, keys, dim, causal)."""
    kernels: int = 0
    moved: float = 0.0
    grad_kernels: int = 0
    grad_moved: float = 0.0
    kept: float = 0.0
    kept_bytes: float = 0.0
    output: float = 0.0


class Counter(TorchDispatchMode):
    """Counts operators by unit: forward by whose turn it is, backward by whose node it is.

    Autograd numbers its nodes as they are made; a unit's are those made from its turn to the next.
    """

    def __init__(self, module: nn.Module, units: Sequence[str], all_run: bool) -> None:
        super().__init__()
        self.module, self.units, self.all_run = module, units, all_run
        self.counts = [Counts() for _ in units]
        self.unit = 0
        self.first_nodes = [(0, 0)]
        """Number of the first node of each turn, and the turn's unit."""
        self.backward, self.counting = False, False
        self.weights = {p.untyped_storage()._cdata for p in module.parameters()}
        self.kept: dict[int, Any] = {}

    def run(self, inputs: Sequence[Tensor]) -> list[Counts]:
        """Run forward and backward and return what was counted."""
        self.module.zero_grad(set_to_none=True)  # of the run before
        try:
            with ExitStack() as stack:
                stack.enter_context(self._turns())
                stack.enter_context(saved_tensors_hooks(self._keep, lambda x: x))
                stack.enter_context(_Fused(self))
                stack.enter_context(self)
                with self._on():
                    out = self.module(*inputs)
                ends = [x for x in _tensors(out) if x.requires_grad]
                grads = [torch.empty_like(x) for x in ends]
                self.backward = True
                with self._on():
                    if ends:
                        torch.autograd.backward(ends, grads)
        except (RuntimeError, NotImplementedError) as error:
            raise DescriptionError(
                f"{type(self.module).__name__} does not run without numbers, on the meta device: "
                f"{str(error).splitlines()[0]}"
            ) from None
        idle = set(range(len(self.units))) - {unit for _, unit in self.first_nodes[1:]}
        if idle and self.all_run:
            raise DescriptionError(
                f"units: {self.units[min(idle)]!r} is never called; of a container name the members"
            )
        return self.counts

    @contextmanager
    def _on(self) -> Iterator[None]:
        self.counting = True
        try:
            yield
        finally:
            self.counting = False

    @contextmanager
    def _turns(self) -> Iterator[None]:
        """Note whose turn it is, and what each unit hands on."""

        def before(number: int) -> Any:
            def hook(_module: nn.Module, inputs: Any) -> None:
                if self.unit != number:
                    self._hand_on(self.unit, inputs)
                self.unit = number
                self.counting = False
                probe = torch.ones((), device="meta", requires_grad=True) * 1
                self.counting = True
                assert probe.grad_fn is not None
                self.first_nodes.append((probe.grad_fn._sequence_nr(), number))

            return hook

        def after(number: int) -> Any:
            def hook(_module: nn.Module, _inputs: Any, out: Any) -> None:
                self._hand_on(number, out)

            return hook

        handles = []
        for number, unit in enumerate(self.units):
            one = self.module.get_submodule(unit)
            handles.append(one.register_forward_pre_hook(before(number)))
            handles.append(one.register_forward_hook(after(number)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hand_on(self, number: int, values: Any) -> None:
        """Note the most that a unit hands on: its result, or what the next one is given."""
        own = self.counts[number]
        own.output = max(own.output, sum(x.numel() for x in _tensors(values)))

    def _keep(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        key = storage._cdata
        if self.counting and key not in self.weights and key not in self.kept:
            self.kept[key] = storage  # held, so that no other one gets its number
            own = self.counts[self.unit]
            if x.is_floating_point():
                own.kept += storage.nbytes() / x.element_size()
            else:
                own.kept_bytes += storage.nbytes()
        return x

    def _owner(self) -> Counts:
        """Return the counts that an operator belongs to."""
        node = torch._C._current_autograd_node() if self.backward else None
        if node is None:
            return self.counts[self.unit]
        number = node._sequence_nr()
        turn = max((turn for turn in self.first_nodes if turn[0] <= number), key=lambda t: t[0])
        return self.counts[turn[1]]

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if not self.counting or func.is_view or packet in FREE:
            return out
        if self.backward and torch.is_grad_enabled():
            raise DescriptionError(
                f"{type(self.module).__name__} computes parts of its forward again in backward "
                "(torch.utils.checkpoint), which a list of layers does not say"
            )
        own = self._owner()
        known = flop_registry.get(packet)
        if known is not None:
            flops = float(known(*args, **(kwargs or {}), out_val=out))
            if not self.backward:  # backward's products mirror them
                made = _made(func, args, out)
                assert 2.0 * made.batch * made.m * made.n * made.k == flops
                own.products.append(made)
            return out
        read = list(_tensors(args))
        if packet in LOOK_UPS:
            read[0] = out
        moved = sum(map(_elements, (*read, *_tensors(kwargs), *_tensors(out))))
        if self.backward:
            own.grad_kernels += 1
            own.grad_moved += moved
        else:
            own.kernels += 1
            own.moved += moved
        return out


class _Fused(TorchFunctionMode):
    """Stands in for attention of tokens to themselves, and lists it."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self.counter = counter

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.multi_head_attention_forward:  # inside of it nobody asks us
            with patch.object(functional, "scaled_dot_product_attention", self._attend):
                return func(*args, **kwargs)
        if func is scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        return func(*args, **kwargs)

    def _attend(self, *args: Any, **kwargs: Any) -> Any:
        if not _is_plain(*args, **kwargs):
            return scaled_dot_product_attention(*args, **kwargs)
        q, k, v = (args + tuple(kwargs[n] for n in ("query", "key", "value") if n in kwargs))[:3]
        causal = kwargs.get("is_causal", args[5] if len(args) > 5 else False)
        self.counter.counts[self.counter.unit].attention.append(
            (q.shape[0], q.shape[2], q.shape[1], k.shape[1], q.shape[3], bool(causal))
        )
        return _Core.apply(q, k, v)


def _is_plain(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_args: Any,
    **_kwargs: Any,
) -> bool:  # fmt: skip
    """Return whether attention is of tokens to themselves, with no mask but the causal one."""
    return (
        attn_mask is None and query.dim() == 4 and key.shape == value.shape
        and query.shape[2:] == key.shape[2:]
    )  # fmt: skip


class _Core(torch.autograd.Function):
    """Attention without any work: results and gradients have their shapes."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.like = [(x.shape, x.dtype) for x in (q, k, v)]
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx: Any, *_grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty(s, dtype=d, device="meta") for s, d in ctx.like)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from (x for one in value.values() for x in _tensors(one))
    elif isinstance(value, (tuple, list)):
        yield from (x for one in value for x in _tensors(one))


def _elements(x: Tensor) -> float:
    """Return the numbers of four bytes that a tensor holds; an expanded one holds fewer."""
    size = min(x.numel() * x.element_size(), x.untyped_storage().nbytes())
    return size / (x.element_size() if x.is_floating_point() else 4)


def _made(func: Any, args: tuple[Any, ...], out: Tensor) -> Made:
    """Return the shape of a product.

    Raises:
        DescriptionError: for an operator that has FLOPs but no shape here.
    """
    packet = func.overloadpacket
    if packet is aten.convolution:
        return _convolution(args[0], args[1], out, args[6], args[8])
    if packet not in (aten.mm, aten.addmm, aten.bmm, aten.baddbmm):
        raise DescriptionError(f"{packet} has FLOPs, but its shape is not known here")
    a, b = args[:2] if packet in (aten.mm, aten.bmm) else args[1:3]
    batch = a.shape[0] if a.dim() == 3 else 1
    return Made(batch, a.shape[-2], b.shape[-1], a.shape[-1], 0.0, a.requires_grad)


def _convolution(x: Tensor, weight: Tensor, out: Tensor, transposed: bool, groups: int) -> Made:
    """Return a convolution as the product that it implicitly is."""
    moved, window = float(x.numel() + out.numel()), weight[0, 0].numel()
    rows, n, k = out.numel() // out.shape[1], out.shape[1] // groups, weight.shape[1] * window
    if transposed:
        rows, n, k = x.numel() // x.shape[1], weight.shape[1] * window, x.shape[1] // groups
    return Made(groups, rows, n, k, moved, x.requires_grad)
