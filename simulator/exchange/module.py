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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from simulator.describe.layer_list import Attention, LayerList, ListedLayer, Product
from simulator.errors import DescriptionError
from simulator.exchange.module_counts import Counter, Counts, Made
from simulator.exchange.toml_text import toml_text
from simulator.files import check_writable, write_whole

CONTAINERS = (nn.Sequential, nn.ModuleList)


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
        DescriptionError: when it cannot run without numbers, mixes samples, has frozen parameters,
            computes parts of its forward again, or has products of shapes that are not known here.
    """
    size = _batch(inputs)
    if frozen := [n for n, p in module.named_parameters() if not p.requires_grad]:
        raise DescriptionError(
            f"{frozen[0]} and {len(frozen) - 1} more parameters are frozen, and a list of layers "
            "is trained whole; call requires_grad_() first"
        )
    module = copy.deepcopy(module).to("meta")
    chosen = _units(module, units)
    once, twice = (
        Counter(module, chosen, units is not None).run([_resized(x, factor) for x in inputs])
        for factor in (1, 2)
    )
    seen: set[int] = set()
    layers = []
    for unit, a, b in zip(chosen, once, twice, strict=True):
        if a == Counts():  # never called; its parameters count to the first layer
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


def _layer(unit: str, parameters: int, a: Counts, b: Counts, size: int) -> ListedLayer:
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


def _product(unit: str, a: Made, b: Made, size: int) -> Product:
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
