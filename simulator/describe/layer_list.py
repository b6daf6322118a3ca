"""A model that is a list of layers, each with what it computes, moves and keeps of one sample.

For networks of any kind: `simulator.exchange.module` makes the list of a `torch.nn.Module`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from simulator.describe.fields import MOST, Count, Natural, Range, validate
from simulator.errors import DescriptionError

Elements = Annotated[float, Range(0, MOST)]
"""Numbers of activations of one sample; their bytes are those of the run's precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """Matrix products of one sample, m x k by k x n each; a convolution is an implicit one."""

    m: Count
    n: Count
    k: Count
    batch: Count = 1
    """Products that run at once: heads, or groups of a convolution."""
    count: Count = 1
    """Times that it runs, one after the other."""
    weight: bool = True
    """Whether k x n is a weight: samples then share it, and m grows with them; else `batch` does.
    Its gradient is the weight's."""
    moved: Elements = 0.0
    """Read and written besides a weight; m k + m n, and k n without a weight, where 0."""
    input_grad: bool = True
    """Whether backward computes the gradient of its input; of data it does not."""

    def __post_init__(self) -> None:
        validate(self)

    @property
    def flops(self) -> float:
        """Forward FLOPs of a sample, a multiply-add counted twice."""
        return 2.0 * self.count * self.batch * self.m * self.n * self.k


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Attention of one sample, of `length` tokens to themselves; computed as `run.attention`."""

    length: Count
    queries: Count
    """Query heads."""
    keys: Count
    """Key and value heads."""
    dim: Count
    causal: bool = False
    count: Count = 1

    def __post_init__(self) -> None:
        validate(self)

    @property
    def flops(self) -> float:
        """Forward FLOPs of a sample, masked scores counted too."""
        return 4.0 * self.count * self.queries * self.length * self.length * self.dim


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedLayer:
    """One layer: products, attention, and what is element-wise; backward mirrors products."""

    name: str
    repeat: Count = 1
    """Layers like this one, one after the other."""
    parameters: Natural = 0
    products: tuple[Product, ...] = ()
    attention: tuple[Attention, ...] = ()
    kernels: Natural = 0
    """Kernels besides products and attention."""
    moved: Elements = 0.0
    """What these read and write."""
    moved_once: Elements = 0.0
    """What they read and write whatever the number of samples: parameters."""
    grad_kernels: Natural = 0
    """Likewise in backward."""
    grad_moved: Elements = 0.0
    grad_moved_once: Elements = 0.0
    kept: Elements = 0.0
    """Activations kept for backward, but for those of `attention`."""
    kept_bytes: Elements = 0.0
    """Masks and indices that are kept, in bytes."""
    output: Elements = 0.0
    """What it hands to the next layer."""

    def __post_init__(self) -> None:
        validate(self)
        if (self.moved and not self.kernels) or (self.grad_moved and not self.grad_kernels):
            raise DescriptionError(
                f"ListedLayer.kernels: {self.name} moves elements outside of products, but has no "
                "kernels that do"
            )
        if self.parameters and not (self.products or self.kernels):
            raise DescriptionError(
                f"ListedLayer.parameters: {self.name} has {self.parameters:,} parameters, but "
                "neither products nor kernels that use them"
            )

    @property
    def flops(self) -> float:
        """Forward FLOPs of products and attention of a sample."""
        return sum(p.flops for p in self.products) + sum(a.flops for a in self.attention)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerList:
    """A model as a list of layers; a sample is whatever the list was made for."""

    name: str
    model_type: Literal["layers"]
    """What tells it from a transformer."""
    layers: tuple[ListedLayer, ...]

    def __post_init__(self) -> None:
        validate(self)
        if not self.layers:
            raise DescriptionError("LayerList.layers: lists no layer")

    @property
    def every(self) -> tuple[ListedLayer, ...]:
        """All layers in order, those that repeat as often as they do."""
        return tuple(layer for layer in self.layers for _ in range(layer.repeat))

    @property
    def reads_images(self) -> bool:
        """Whether a run says how large images are: the list has its sizes."""
        return False

    @property
    def num_hidden_layers(self) -> int:
        """Layers that stages divide."""
        return sum(layer.repeat for layer in self.layers)

    @property
    def outputs(self) -> tuple[float, ...]:
        """What each layer but the last hands on, as far as they differ."""
        return tuple(sorted({layer.output for layer in self.every[:-1]}))

    @property
    def hidden_size(self) -> int:
        """Elements of a sample between stages; all layers hand on the same where there are some."""
        return round(max(self.outputs, default=1.0)) or 1

    @property
    def tie_word_embeddings(self) -> bool:
        """Whether the head shares a weight; the list knows of none."""
        return False

    @property
    def shares_embedding(self) -> bool:
        """Whether anything uses an embedding's matrix elsewhere; the list knows of nothing."""
        return False
