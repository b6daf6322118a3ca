"""From a residual network to operators: stem, residual blocks, head with its loss."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from simulator.describe.resnet import ResNet
from simulator.lower import convolution as cv
from simulator.lower import operators as op
from simulator.lower.convolution import Maps
from simulator.lower.operators import Elements, Operator

STEM, POOL = 7, 3
"""Windows of the first convolution and of the max pool, both moved by two pixels (He et al., 2015,
table 1)."""


class Parts(NamedTuple):
    """Operators of a network; blocks that are alike are one object."""

    stem: tuple[Operator, ...]
    blocks: tuple[tuple[Operator, ...], ...]
    head: tuple[Operator, ...]


def resnet(model: ResNet, e: Elements, *, batch: int, image: int, loss: str) -> Parts:
    """Return the operators of a network for `batch` images of `image` x `image` pixels.

    `loss` is the `kind` of `operators.cross_entropy`.
    """
    stem, x = _stem(model, e, Maps(batch, model.num_channels, image))
    made: dict[tuple[Maps, int, int], tuple[Operator, ...]] = {}
    blocks = []
    for stage, (channels, depth) in enumerate(zip(model.hidden_sizes, model.depths, strict=True)):
        halves = stage > 0 or model.downsample_in_first_stage
        for block in range(depth):
            key = (x, channels, 2 if halves and block == 0 else 1)
            if key not in made:
                made[key] = _block(model, e, *key)
            blocks.append(made[key])
            x = cv.below(x, channels, 1, key[2], 0)
    return Parts(stem, tuple(blocks), _head(model, e, x, loss))


def _stem(model: ResNet, e: Elements, x: Maps) -> tuple[tuple[Operator, ...], Maps]:
    y = cv.below(x, model.embedding_size, STEM, 2, STEM // 2)
    pooled = cv.below(y, y.channels, POOL, 2, POOL // 2)
    return (
        cv.of_images(cv.convolution("stem", e, x, y, kernel=STEM)),
        cv.batch_norm("stem norm", e, y),
        cv.relu("stem relu", e, y),
        cv.max_pool("max pool", e, y, pooled, kernel=POOL),
    ), pooled


def _block(model: ResNet, e: Elements, x: Maps, channels: int, stride: int) -> tuple[Operator, ...]:
    """Return a residual block: convolutions, each with its norm, beside the shortcut; a ReLU last.

    Where sizes change the shortcut is a convolution of 1 x 1, whose input the first one keeps.
    The result of the convolutions waits for the shortcut's. Backward, the gradient of the sum is
    that of either branch's result: it waits for the convolutions while the shortcut's is computed,
    whose own waits then; where there is no shortcut it waits itself, to be added at the end.
    """
    out: list[Operator] = []
    y, windows = x, _windows(model, channels, stride)
    for i, (kernel, width, step) in enumerate(windows, start=1):
        before, y = y, cv.below(y, width, kernel, step, kernel // 2)
        out += [
            cv.convolution(f"conv{i}", e, before, y, kernel=kernel),
            cv.batch_norm(f"norm{i}", e, y),
        ]
        if i < len(windows):
            out.append(cv.relu(f"relu{i}", e, y))
    entering, leaving = float(e.activation * x.size), float(e.activation * y.size)
    *branch, last = (_beside(o, backward=entering) for o in out)
    total = op.residual("residual", e, size=y.size, dropout=False)
    rest: tuple[Operator, ...]
    if x == y:
        rest = (replace(last, stream_bytes=0.0), _beside(total, backward=leaving))
    else:
        shortcut = replace(cv.convolution("shortcut", e, x, y, kernel=1), kept_bytes=0.0)
        rest = (
            last,
            _beside(shortcut, forward=leaving, backward=leaving),
            _beside(cv.batch_norm("shortcut norm", e, y), forward=leaving),
            _beside(total, forward=leaving, backward=leaving),
        )
    return (*branch, *rest, cv.relu("relu", e, y))


def _beside(o: Operator, *, forward: float = 0.0, backward: float = 0.0) -> Operator:
    """Return an operator with bytes that are alive meanwhile besides its own."""
    return replace(o, forward_bytes=o.forward_bytes + forward, stream_bytes=backward)


def _windows(model: ResNet, channels: int, stride: int) -> list[tuple[int, int, int]]:
    """Return the kernel, channels and stride of each convolution of a block."""
    if model.layer_type == "basic":
        return [(3, channels, stride), (3, channels, 1)]
    inner, strides = channels // 4, (1, stride)
    first, second = strides[::-1] if model.downsample_in_bottleneck else strides
    return [(1, inner, first), (3, inner, second), (1, channels, 1)]


def _head(model: ResNet, e: Elements, x: Maps, loss: str) -> tuple[Operator, ...]:
    labels = model.num_labels
    return (
        cv.average_pool("average pool", e, x),
        op.linear(
            "head", e, tokens=x.batch, inputs=x.channels, outputs=labels, bias=True
        ),
        op.cross_entropy(e, tokens=x.batch, vocab=labels, kind=loss),
    )  # fmt: skip
