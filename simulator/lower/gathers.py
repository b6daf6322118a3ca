"""Which weights are gathered together under ZeRO's stage 3, and in which order."""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

from simulator.describe.scenario import Scenario
from simulator.lower.passes import present
from simulator.lower.places import layout
from simulator.lower.sharding import BY_USE, is_gathering, stays
from simulator.lower.trainable import (
    Stage,
    embedding_weight,
    shares_embedding,
    stages,
    tuned,
    weight_bytes,
)

ENDS = ("embedding", "head")


class Gathers(NamedTuple):
    """Bytes that a stage gathers at a time."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    """Those that did not stay from forward on."""


def gathers_apart(s: Scenario) -> bool:
    """Return whether weights are gathered in a pool that they are copied out of."""
    return is_gathering(s) and s.plan.sharding_library == "fsdp2"


def gathers(s: Scenario) -> list[tuple[Gathers, ...]]:
    """Return what the stages of each pipeline rank gather in a pool of its own, as FSDP2 does.

    Nothing of other plans: FSDP1 and Megatron-FSDP use weights where they were gathered; of
    DeepSpeed's pools nothing is known.
    """
    if not gathers_apart(s):
        return [() for _ in layout(s).stages]
    every = stages(s)
    made = {stage: _of_stage(s, stage) for stage in set(every)}  # most are alike
    return [tuple(made[every[number]] for number in held) for held in layout(s).stages]


def _of_stage(s: Scenario, stage: Stage) -> Gathers:
    """Return the gathers of a stage: a block's each, and first those of ends that the root has."""
    parts = tuned(s)
    ends, forward, again = 0.0, list[float](), list[float]()
    for block, numbers in present(parts, stage):
        tied = shares_embedding(s, stage) and block.name == "head" and s.run.trains_all
        held = tied * embedding_weight(parts.blocks) * s.precision.weight
        size = weight_bytes(s, block) - held
        if s.plan.root_holds_ends and block.name in ENDS:
            ends += size
            continue
        forward += [size] * len(numbers)
        stay = stays(s, block.name, is_first=stage.is_first, is_last=stage.is_last)
        again += [size] * len(numbers) if stay == BY_USE else []
    made = ((ends, *forward), tuple(reversed(again)))
    return Gathers(*(tuple(size for size in sizes if size) for sizes in made))


def shortened(sizes: tuple[float, ...], most: int = 4) -> tuple[float, ...]:
    """Return sizes with no more than so many equal ones in a row."""
    return tuple(size for _, run in groupby(sizes) for size in [*run][:most])
