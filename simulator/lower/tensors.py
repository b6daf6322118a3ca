"""The parameters that one rank of a stage trains, as matrices where they are some."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from simulator.lower.blocks import Block

Matrices = tuple[tuple[int, int, int], ...]
"""Rows, columns and how many there are."""


class Tensors(NamedTuple):
    """Trained parameters; those that are in no matrix are biases and weights of norms."""

    params: int
    experts: int
    """Of them those of experts."""
    hidden: Matrices
    """Of layers."""
    ends: Matrices
    """Of the embedding and the head."""


def tensors_of(blocks: Iterable[tuple[Block, int]], shared: bool) -> Tensors:
    """Return what blocks train.

    Args:
        blocks: kinds of block, and how many of each the rank holds.
        shared: whether operators that use the embedding's matrix do so where it lies.
    """
    params = experts = 0
    found: dict[bool, Counter[tuple[int, int]]] = {True: Counter(), False: Counter()}
    for block, count in blocks:
        for operator in block.operators:
            if shared and operator.tied:
                continue
            params += count * operator.trained
            experts += count * operator.trained * operator.expert
            for shape in operator.matrices:
                found[block.name == "layer"][shape] += count
    hidden, ends = (
        tuple((*shape, count) for shape, count in found[layer].items() if count)
        for layer in (True, False)
    )
    return Tensors(params, experts, hidden, ends)


def elements(matrices: Matrices) -> int:
    """Return the numbers in matrices."""
    return sum(rows * columns * count for rows, columns, count in matrices)
