"""How the layers of a model are divided over the stages of a pipeline.

By an even split, with less for the stages that also hold the embedding or the head; by a list; by a
layout; or by a balance (`plan.stage_cut`) that `simulator.cuts` finds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from simulator.describe.layout import read_layout
from simulator.errors import DescriptionError

if TYPE_CHECKING:
    from simulator.describe.plan import Plan

_WAYS: tuple[tuple[str, ...], ...] = (
    ("layers_per_stage",),
    ("layout",),
    ("stage_cut",),
    ("first_stage_layers", "last_stage_layers"),
    ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
)
"""Fields of a plan that say how layers are divided; those of one row go together."""


def _said(plan: Plan) -> list[list[str]]:
    """Return the fields that a plan sets, by row of `_WAYS`."""
    rows = [[name for name in row if _is_set(getattr(plan, name))] for row in _WAYS]
    return [row for row in rows if row]


def _is_set(value: object) -> bool:
    return value is not None and value is not False and value != "uniform"


def cut_problems(plan: Plan) -> Iterator[str]:
    """Say what of a plan's division into stages contradicts the rest of it."""
    said = _said(plan)
    if len(said) > 1 and said != [["layers_per_stage"], ["stage_cut"]]:  # which `cuts` compares
        yield (
            f"Plan.{said[1][0]}: {said[0][0]} says too how many layers the stages have; leave one "
            "of them out"
        )
        return
    for name in (name for row in said for name in row if name != "layers_per_stage"):
        if plan.pp == 1:
            yield f"Plan.{name}: {getattr(plan, name)!r} has no effect with pp 1"
    stages = plan.num_stages
    try:
        listed = listed_layers(plan)
    except DescriptionError as error:
        yield from (f"Plan.{problem}" for problem in error.problems)
        return
    if listed is None:
        return
    name = "layers_per_stage" if plan.layout is None else "layout"
    if len(listed) != stages:
        yield f"Plan.{name}: lists {len(listed)} stages but {_counted(plan, '')}"
    elif 0 in listed[1:-1] or listed == (0,):
        yield (
            f"Plan.{name}: stage {listed.index(0, 1 if stages > 1 else 0)} has no layers; only the "
            "first and the last stage can do without, which hold the embedding and the head"
        )


def _counted(plan: Plan, prefix: str) -> str:
    """Return how many stages there are, in words."""
    text = f"{prefix}pp {'is ' * (not prefix)}{plan.pp}"
    if plan.chunks > 1:
        text += f" x {prefix}chunks {plan.chunks}"
    copies = plan.pp * plan.chunks // plan.num_stages
    if copies > 1:
        text += f" / {copies} ranks of each"
    return text + f" = {plan.num_stages}" * (plan.chunks > 1)


def listed_layers(plan: Plan) -> tuple[int, ...] | None:
    """Return the layers of each stage where the plan says so one by one, else None.

    Raises:
        DescriptionError: when its layout cannot be read.
    """
    if plan.layout is not None:
        return tuple(stage.count("t") for stage in read_layout(plan.layout))
    return plan.layers_per_stage


def even_layers(plan: Plan, layers: int) -> tuple[int, ...]:
    """Return the layers of each stage of an even split; a remainder goes to the first ones.

    With `first_stage_layers` or `last_stage_layers` the other ranks share the rest, and each rank's
    chunks are equal, stage s on rank s % pp. Where these do not divide, the result does not sum to
    `layers`.
    """
    first, last = plan.first_stage_layers, plan.last_stage_layers
    if first is None and last is None:
        embedding = int(plan.account_for_embedding_in_pipeline_split)
        loss = int(plan.account_for_loss_in_pipeline_split)
        counts = _spread(layers + embedding + loss, plan.num_stages)
        counts[0] -= embedding
        counts[-1] -= loss
        return tuple(counts)
    head = [] if first is None else [first]
    tail = [] if last is None else [last]
    between = plan.pp - len(head) - len(tail)
    counts = [*head, *_spread(max(layers - sum(head) - sum(tail), 0), between), *tail]
    return tuple(count // plan.chunks for count in counts) * plan.chunks


def _spread(layers: int, stages: int) -> list[int]:
    if not stages:
        return []
    count, rest = divmod(layers, stages)
    return [count + (stage < rest) for stage in range(stages)]


def division_problems(plan: Plan, layers: int, model: str) -> Iterator[str]:
    """Say why the layers of a model cannot be divided as the plan says."""
    stages = _counted(plan, "plan.") + " stages" * (plan.chunks > 1)
    listed = listed_layers(plan)
    if listed is not None:
        name = "layers_per_stage" if plan.layout is None else "layout"
        shown = list(listed) if plan.layout is None else repr(plan.layout)
        if sum(listed) != layers:
            yield f"plan.{name} {shown} sums to {sum(listed)}, but {model} has {layers} layers"
        return
    if plan.stage_cut != "uniform":
        if plan.num_stages > layers + 2:
            yield (
                f"{stages} is more than the {layers} layers of {model}, its embedding and its head"
            )
        return
    counts, said = even_layers(plan, layers), [name for row in _said(plan) for name in row]
    if not said and plan.num_stages > layers:
        yield f"{stages} is more than the {layers} layers of {model}"
    elif sum(counts) != layers or (plan.chunks > 1 and not said and layers % plan.num_stages):
        which = f"plan.{said[0]} {getattr(plan, said[0])} with {stages}" if said else stages
        yield (
            f"{which} do not divide the {layers} layers of {model}; "
            f"say in plan.layers_per_stage how many each stage has"
        )
    elif said and (min(counts) < 0 or 0 in counts[1:-1]):
        yield (
            f"plan.{said[0]}: {stages} leaves a stage without layers, of the {layers} of {model}; "
            "take fewer stages, or say in plan.layers_per_stage how many each has"
        )
