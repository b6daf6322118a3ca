"""A `torch.nn.Module` as a list of layers: one forward and backward on the meta device, counted.

Nothing is computed and no memory is taken. Two batches, one twice the other, tell what grows with
the samples from what does not. FLOPs are those of torch's flop counter, element-wise traffic is
what each operator reads and writes without fusion, kept activations are what autograd saves.
Attention by `scaled_dot_product_attention`, of tokens to themselves and without a mask of its own,
is listed as attention, for `run.attention` to say how it is computed; other attention is listed as
the products and kernels that torch makes of it.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from simulator.describe.layer_list import Attention, LayerList, ListedLayer, Product
from simulator.errors import DescriptionError
from simulator.exchange.toml_text import toml_text
from simulator.files import check_writable, write_whole

aten = torch.ops.aten

FREE = {
    aten._unsafe_view, aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty,
    aten.new_empty_strided, aten.lift_fresh, aten.detach, aten.alias,
}  # fmt: skip
"""Operators that move nothing, besides views."""

LOOK_UPS = {aten.embedding, aten.index_select, aten.gather, aten.index}
"""Operators that read of their first tensor only what they return."""

CONTAINERS = (nn.Sequential, nn.ModuleList)


class _Made(NamedTuple):
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
class _Counts:
    """What one unit did, of a whole batch."""

    products: list[_Made] = field(default_factory=list)
    attention: list[tuple[int, ...]] = field(default_factory=list)
    """(batch, length, queries, keys, dim, causal)."""
    kernels: int = 0
    moved: float = 0.0
    grad_kernels: int = 0
    grad_moved: float = 0.0
    kept: float = 0.0
    kept_bytes: float = 0.0
    output: float = 0.0


def describe_module(
    module: nn.Module, *inputs: Tensor, name: str = "", units: Sequence[str] | None = None
) -> LayerList:
    """Return a module as a list of layers, of one sample each.

    Args:
        module: in the mode (`train` or `eval`) in which it is to be counted; left as it is.
        inputs: what it is called with; samples are along the first dimension of all of them.
        name: of the list; that of the module's class when absent.
        units: names of the submodules that are the layers, in any order; the children when absent,
            of containers their children. What runs outside of them counts to the one before.

    Raises:
        DescriptionError: when it cannot run without numbers, mixes samples, or has products whose
            shapes torch's flop counter knows and this does not.
    """
    size = _batch(inputs)
    module = copy.deepcopy(module).to("meta")
    chosen = _units(module, units)
    once, twice = (
        _Counter(module, chosen, units is not None).run([_resized(x, factor) for x in inputs])
        for factor in (1, 2)
    )
    seen: set[int] = set()
    layers = []
    for unit, a, b in zip(chosen, once, twice, strict=True):
        if a == _Counts():  # never called; its parameters count to the first layer
            continue
        own = [p for p in module.get_submodule(unit).parameters() if id(p) not in seen]
        seen |= {id(p) for p in own}
        layers.append(_layer(unit, sum(p.numel() for p in own), a, b, size))
    rest = sum(p.numel() for p in module.parameters() if id(p) not in seen)
    if rest:
        layers[0] = dataclasses.replace(layers[0], parameters=layers[0].parameters + rest)
    return LayerList(
        name=name or type(module).__name__, model_type="layers", layers=tuple(_merged(layers))
    )


def save_layers(model: LayerList, path: str | Path) -> None:
    """Write a list of layers as a TOML file, which ``model = "PATH"`` of a scenario names.

    Raises:
        DescriptionError: when it cannot be written there.
    """
    check_writable(Path(path), (".toml",))
    text = toml_text({"name": model.name, "model_type": model.model_type})
    for layer in model.layers:
        text += "\n[[layers]]\n" + toml_text(_said(layer))
    write_whole(Path(path), lambda target: _write(target, text))


def _write(target: Path, text: str) -> None:
    target.write_text(text, encoding="utf-8")


def _said(item: Any) -> dict[str, Any]:
    """Return the fields of a description that say something."""
    out: dict[str, Any] = {}
    for f in dataclasses.fields(item):
        value = getattr(item, f.name)
        if value == f.default:
            continue
        if isinstance(value, tuple):
            value = [_said(one) for one in value]
        out[f.name] = int(value) if isinstance(value, float) and value.is_integer() else value
    return out


def _batch(inputs: Sequence[Tensor]) -> int:
    sizes = {x.shape[0] for x in inputs if x.dim()}
    if len(sizes) != 1 or 0 in sizes:
        raise DescriptionError(
            f"inputs have {sorted(sizes) or 'no'} samples along their first dimension; give "
            "tensors of one number of samples"
        )
    return int(sizes.pop())


def _resized(x: Tensor, factor: int) -> Tensor:
    return torch.empty((factor * x.shape[0], *x.shape[1:]), dtype=x.dtype, device="meta")


def _units(module: nn.Module, names: Sequence[str] | None) -> list[str]:
    """Return the names of the submodules that are layers, in the order in which they lie."""
    if names is not None:
        known = dict(module.named_modules())
        wrong = [n for n in names if n not in known]
        nested = [
            (a, b) for a, b in itertools.permutations(names, 2) if b.startswith(f"{a}.") or not a
        ]
        if wrong or nested or not names:
            what = f"no submodule {wrong[0]!r}" if wrong else "units that lie in each other"
            raise DescriptionError(f"units {list(names)}: {what}")
        return [n for n in known if n in set(names)]

    def below(parent: nn.Module, prefix: str) -> Iterator[str]:
        for child, one in parent.named_children():
            if isinstance(one, CONTAINERS) and len(one):
                yield from below(one, f"{prefix}{child}.")
            elif not isinstance(one, CONTAINERS):
                yield f"{prefix}{child}"

    return list(below(module, "")) or [""]


class _Counter(TorchDispatchMode):
    """Counts operators by unit: forward by whose turn it is, backward by whose node it is.

    Autograd numbers its nodes as they are made; a unit's are those made from its turn to the next.
    """

    def __init__(self, module: nn.Module, units: Sequence[str], all_run: bool) -> None:
        super().__init__()
        self.module, self.units, self.all_run = module, units, all_run
        self.counts = [_Counts() for _ in units]
        self.unit = 0
        self.first_nodes = [(0, 0)]
        """Number of the first node of each turn, and the turn's unit."""
        self.backward, self.counting = False, False
        self.weights = {p.untyped_storage()._cdata for p in module.parameters()}
        self.kept: dict[int, Any] = {}

    def run(self, inputs: Sequence[Tensor]) -> list[_Counts]:
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

    def _owner(self) -> _Counts:
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

    def __init__(self, counter: _Counter) -> None:
        super().__init__()
        self.counter = counter

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not scaled_dot_product_attention or not _is_plain(*args, **kwargs):
            return func(*args, **kwargs)
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


def _made(func: Any, args: tuple[Any, ...], out: Tensor) -> _Made:
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
    return _Made(batch, a.shape[-2], b.shape[-1], a.shape[-1], 0.0, a.requires_grad)


def _convolution(x: Tensor, weight: Tensor, out: Tensor, transposed: bool, groups: int) -> _Made:
    """Return a convolution as the product that it implicitly is."""
    moved, window = float(x.numel() + out.numel()), weight[0, 0].numel()
    rows, n, k = out.numel() // out.shape[1], out.shape[1] // groups, weight.shape[1] * window
    if transposed:
        rows, n, k = x.numel() // x.shape[1], weight.shape[1] * window, x.shape[1] // groups
    return _Made(groups, rows, n, k, moved, x.requires_grad)


def _layer(unit: str, parameters: int, a: _Counts, b: _Counts, size: int) -> ListedLayer:
    """Return a layer from what it did of a batch and of one twice as large."""
    name = unit or "whole"
    products = [
        _product(name, p, q, size) for p, q in zip(a.products, b.products, strict=True)
    ]  # fmt: skip
    return ListedLayer(
        name=name,
        parameters=parameters,
        products=tuple(_counted(products)),
        attention=tuple(_counted([_core(one, size) for one in a.attention])),
        kernels=a.kernels,
        moved=(b.moved - a.moved) / size,
        moved_once=max(2 * a.moved - b.moved, 0.0),
        grad_kernels=a.grad_kernels,
        grad_moved=(b.grad_moved - a.grad_moved) / size,
        grad_moved_once=max(2 * a.grad_moved - b.grad_moved, 0.0),
        kept=(b.kept - a.kept) / size,
        kept_bytes=(b.kept_bytes - a.kept_bytes) / size,
        output=(b.output - a.output) / size,
    )


def _product(unit: str, a: _Made, b: _Made, size: int) -> Product:
    """Return a product of one sample."""
    grown = tuple(y / x for x, y in zip(a[:4], b[:4], strict=True))
    moved = (b.moved - a.moved) / size
    if grown == (1, 2, 1, 1) and a.m % size == 0:
        return Product(
            m=a.m // size, n=a.n, k=a.k, batch=a.batch, moved=moved, input_grad=a.input_grad
        )
    if grown == (2, 1, 1, 1) and a.batch % size == 0:
        return Product(m=a.m, n=a.n, k=a.k, batch=a.batch // size, weight=False)
    raise DescriptionError(
        f"{unit}: a product of {a.batch} x {a.m} x {a.k} by {a.k} x {a.n} is one of {b.batch} x "
        f"{b.m} x {b.k} by {b.k} x {b.n} with twice the samples; it is no product of single samples"
    )


def _core(one: tuple[int, ...], size: int) -> Attention:
    """Return attention of one sample; windows of it that attend each for itself count as heads."""
    batch, length, queries, keys, dim, causal = one
    windows = batch // size
    return Attention(
        length=length, queries=windows * queries, keys=windows * keys, dim=dim, causal=bool(causal)
    )


def _counted(items: Sequence[Any]) -> list[Any]:
    """Return items with those that are equal and follow each other as one."""
    out: list[Any] = []
    for item in items:
        if out and dataclasses.replace(out[-1], count=item.count) == item:
            out[-1] = dataclasses.replace(item, count=out[-1].count + item.count)
        else:
            out.append(item)
    return out


def _merged(layers: Sequence[ListedLayer]) -> list[ListedLayer]:
    """Return layers with those that are alike and follow each other as one that repeats."""
    out: list[ListedLayer] = []
    for layer in layers:
        if out and dataclasses.replace(layer, name=out[-1].name, repeat=out[-1].repeat) == out[-1]:
            out[-1] = dataclasses.replace(out[-1], repeat=out[-1].repeat + 1)
        else:
            out.append(layer)
    return out
