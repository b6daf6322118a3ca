"""The parallel plan: how a step is divided over the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from simulator.describe.fields import Bytes, Count, validate
from simulator.errors import DescriptionError

Axis: TypeAlias = Literal["dp", "pp", "tp"]

AXES: tuple[Axis, ...] = ("dp", "pp", "tp")
"""Mesh axes, in the default order from outermost to innermost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Degrees of parallelism, the pipeline schedule, and how work and memory are traded."""

    dp: Count = 1
    """Data-parallel degree; a scenario file that leaves it out fills the cluster."""
    tp: Count = 1
    """Tensor-parallel degree."""
    pp: Count = 1
    """Pipeline-parallel degree: the number of stages."""
    schedule: str = "1F1B"
    """Pipeline schedule, a name that `trainsim show schedule` lists."""
    microbatch_size: Count = 1
    """Samples of one pipeline input of one data-parallel replica."""
    layers_per_stage: tuple[Count, ...] | None = None
    """Layers of each stage, first to last; even when absent."""
    order: tuple[Axis, ...] = AXES
    """Mesh axes from outermost to innermost: consecutive ranks differ in the last one."""
    bucket_size: Bytes = 25e6
    """Gradients are reduced in buckets of at least this size (torch DDP: 25 MB).

    They become ready with each run of kernels between collectives, a layer at a time without tp.
    """
    recompute: Literal["none", "full"] = "none"
    """`full` keeps only the input of each layer and computes its forward again in backward."""

    def __post_init__(self) -> None:
        validate(self)
        problems = []
        if sorted(self.order) != sorted(AXES):
            problems.append(
                f"Plan.order: {list(self.order)} must name each of {', '.join(AXES)} once"
            )
        if self.layers_per_stage is not None and len(self.layers_per_stage) != self.pp:
            problems.append(
                f"Plan.layers_per_stage: lists {len(self.layers_per_stage)} stages "
                f"but pp is {self.pp}"
            )
        if problems:
            raise DescriptionError(problems)

    @property
    def world_size(self) -> int:
        """Ranks that the plan needs."""
        return self.dp * self.tp * self.pp
