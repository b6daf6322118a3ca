"""Blocks: runs of operators that no stage boundary cuts, and those of a whole model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, groupby

from simulator.lower.operators import Operator


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A run of operators that is never cut by a stage boundary."""

    name: str
    operators: tuple[Operator, ...]

    @property
    def params(self) -> int:
        """Parameters held by one rank."""
        return sum(o.params for o in self.operators)

    @property
    def trained(self) -> int:
        """Parameters of one rank that are trained."""
        return sum(o.trained for o in self.operators)

    @property
    def kept_bytes(self) -> float:
        """Activations of one microbatch that one rank keeps for backward."""
        return sum(o.kept_bytes for o in self.operators)

    def split(self, inner: Callable[[Operator], bool]) -> list[tuple[bool, Block]]:
        """Return the runs of operators that `inner` names and those between; which is which."""
        runs = groupby(self.operators, inner)
        return [(named, Block(name=self.name, operators=tuple(run))) for named, run in runs]

    @property
    def model_flops(self) -> float:
        """Forward matrix FLOPs of one microbatch on one rank, by the MFU convention."""
        return sum(o.model_flops for o in self.operators)


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """The blocks of a model, in forward order; layers that are alike are one object."""

    embedding: Block
    layers: tuple[Block, ...]
    head: Block
    bridge: Block = field(default_factory=lambda: Block(name="bridge", operators=()))
    """Between an encoder's layers and those of its decoder; without operators elsewhere."""
    further: tuple[Block, ...] = ()
    """After the head, by turns a layer that predicts further ahead and its head."""

    @property
    def layer(self) -> Block:
        """The layer of a model whose layers are all alike."""
        return self.layers[0]

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """The first layer that is the same block as each one."""
        first: dict[int, int] = {}
        return tuple(first.setdefault(id(block), i) for i, block in enumerate(self.layers))

    @property
    def decoder_layer(self) -> Block | None:
        """The layers that the bridge precedes; None where there is none."""
        return self.layers[-1] if self.bridge.operators else None

    @property
    def others(self) -> tuple[Block, ...]:
        """The blocks that are no layers."""
        return (self.embedding, self.bridge, *self.ends)

    @property
    def ends(self) -> tuple[Block, ...]:
        """The blocks after the layers."""
        return (self.head, *self.further)

    def runs(self, layers: Sequence[int]) -> list[tuple[Block, range]]:
        """Return blocks, and which of `layers` in a row they make, counted from 0."""
        if len(set(layers)) == 1:
            return [(self.layers[layers[0]], range(len(layers)))]
        runs = [list(run) for _, run in groupby(layers, lambda i: id(self.layers[i]))]
        first = [0, *accumulate(map(len, runs))]
        return [
            (self.layers[run[0]], range(start, start + len(run)))
            for run, start in zip(runs, first, strict=False)
        ]
