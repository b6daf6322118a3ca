"""The space of plans of a scenario: axes with their values, and the legal plans that they make.

An axis is a setting of the plan, or the number of nodes. Each has values by default, to which the
scenario's own is added, or values that the user gives. dp fills what is left of the cluster. What
the scenario's own checks refuse is no plan; nothing else is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from simulator.describe.plan import BUCKET_SIZE, Plan
from simulator.describe.scenario import Scenario
from simulator.describe.stages import even_layers
from simulator.errors import DescriptionError, suggestion
from simulator.explore.change import Settings, words
from simulator.schedules import SCHEDULES, schedule_name

CP_TOKENS = 8192
"""Tokens that each rank along cp keeps at least, by default: shorter shares are not worth it."""

STAGE_LAYERS = 2
"""Layers that each pipeline rank has at least, by default."""

MOST_PLANS = 200_000
"""Combinations of values that are looked at."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A legal plan of a space."""

    place: tuple[int, ...]
    """Where it lies: mesh, schedule, microbatch, recomputation, ZeRO, sequence parallelism, as
    numbers that are equal where two plans agree."""
    settings: Settings
    """How it differs from the scenario whose space this is."""
    scenario: Scenario


@dataclass(frozen=True, slots=True)
class Space:
    """Legal plans of a scenario."""

    base: Scenario
    axes: Mapping[str, tuple[Any, ...]]
    """Values of each axis, a dotted key."""
    candidates: tuple[Candidate, ...]
    refused: int
    """Combinations that fill the cluster, divide the batch and the layers, and that the checks
    refuse."""


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _context(s: Scenario) -> list[int]:
    shares = [d for d in _divisors(s.sequence_length) if s.sequence_length // d >= CP_TOKENS]
    return [d for d in shares if d & (d - 1) == 0 and s.cluster.world_size % d == 0] or [1]


def _experts(s: Scenario) -> list[int]:
    count = getattr(s.model, "num_experts", None)
    return [1] if count is None else [d for d in _divisors(count) if d <= s.cluster.world_size]


def _pipelines(s: Scenario) -> list[int]:
    most = s.model.num_hidden_layers // STAGE_LAYERS
    return [d for d in _divisors(s.cluster.world_size) if d <= max(most, 1)]


DEFAULTS: dict[str, Callable[[Scenario], Sequence[Any]]] = {
    "cluster.num_nodes": lambda s: [s.cluster.num_nodes],
    "plan.tp": lambda s: _divisors(s.cluster.ranks_per_node),
    "plan.pp": _pipelines,
    "plan.cp": _context,
    "plan.ep": _experts,
    "plan.schedule": lambda s: ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"],
    "plan.chunks": lambda s: [2, 3, 4, 5, 6, 8],
    "plan.microbatch_size": lambda s: [1, 2, 4, 8],
    "plan.recompute": lambda s: ["none", "selective", "full"],
    "plan.zero": lambda s: [1, 2, 3],
    "plan.sequence_parallel": lambda s: [True, False],
}
"""Axes, and their values where nobody gives others."""

ONE_PLAN = (
    "dp_shard", "microbatch_group", "schedule_times", "schedule_memory", "schedule_kept",
    "recompute_layers", "recompute_modules", "offload_layers", "layout", "first_stage_layers",
    "last_stage_layers",
)  # fmt: skip
"""Fields that hold for one plan only, so that no space can be around a scenario that sets them."""

PLAIN: tuple[tuple[str, object, Callable[[Plan], bool]], ...] = (
    ("p2p_overlap", True, lambda p: p.pp == 1),
    ("scatter_gather", False, lambda p: p.pp == 1 or p.tp == 1 or p.sequence_parallel),
    ("tp_overlap", "none", lambda p: p.tp == 1),
    ("tp_overlap", "grads", lambda p: p.tp_overlap == "all" and not p.sequence_parallel),
    ("cp_style", "ring", lambda p: p.cp == 1),
    ("cp_balance", "zigzag", lambda p: p.cp == 1),
    ("reshard_after_forward", True, lambda p: p.zero != 3),
    ("prefetch", 1, lambda p: p.zero != 3),
    ("sharding_library", "fsdp2", lambda p: p.zero != 3),
    ("grad_overlap", True, lambda p: p.replicas == 1 or p.zero > 1),
    ("bucket_size", BUCKET_SIZE, lambda p: p.zero == 3 or not p.grad_overlap),
    ("recompute_again", False, lambda p: p.recompute != "full"),
)
"""Fields of the scenario's plan, and the value that they have in plans where they mean nothing."""


def parse_axis(text: str) -> tuple[str, tuple[Any, ...]]:
    """Return the axis and the values of a ``plan.tp=1,2,4``.

    Raises:
        DescriptionError: when there is no such axis, or it has no values.
    """
    from simulator.describe.loader import parse_override

    key, equals, listed = text.partition("=")
    key = key.strip()
    if not equals or not listed.strip():
        raise DescriptionError(f"--over {text!r}: write AXIS=V,V,..., for example plan.tp=1,2,4")
    if key not in DEFAULTS:
        raise DescriptionError(
            f"--over {text!r}: no axis {key!r}{suggestion(key, DEFAULTS)}; "
            f"there are {', '.join(DEFAULTS)}; dp fills the cluster"
        )
    values = tuple(parse_override(f"{key}={value}")[1] for value in listed.split(","))
    if key == "plan.schedule":
        values = tuple(schedule_name(str(value)) for value in values)
    return key, values


def plan_space(s: Scenario, over: Mapping[str, tuple[Any, ...]] | None = None) -> Space:
    """Return the legal plans of a scenario.

    Args:
        s: the scenario; model, devices, batch and all that is no axis stay.
        over: values by axis in place of the default ones.

    Raises:
        DescriptionError: when the scenario says something that holds for one plan only, values are
            wrong, or there are too many of them.
    """
    _check_base(s)
    axes = {key: tuple((over or {}).get(key) or _values(key, s)) for key in DEFAULTS}
    _check_values(axes)
    base = _uncut(s)
    found, refused, count = [], 0, 0
    numbers: list[dict[object, int]] = [{} for _ in range(6)]
    for place, values in _combinations(base, axes):
        count += 1
        if count > MOST_PLANS:
            raise DescriptionError(
                f"more than {MOST_PLANS:,} combinations of plans; give fewer values with --over"
            )
        made = _candidate(base, values)
        if made is None:
            refused += 1
            continue
        at = tuple(n.setdefault(p, len(n)) for n, p in zip(numbers, place, strict=True))
        found.append(Candidate(at, *made))
    return Space(base, axes, tuple(found), refused)


def _check_base(s: Scenario) -> None:
    for name in ONE_PLAN:
        if getattr(s.plan, name) is not None:
            raise DescriptionError(
                f"plan.{name} {getattr(s.plan, name)!r} is for one plan, and a search tries many; "
                "leave it out of the scenario"
            )
    if not isinstance(s.plan.placement, str):
        raise DescriptionError(
            "plan.placement lists devices, which is for one plan, and a search tries many; leave "
            "it out of the scenario"
        )
    if SCHEDULES.get(s.plan.schedule) is None:
        raise DescriptionError(
            f"plan.schedule {s.plan.schedule!r} is a file of one size, and a search tries many; "
            "name a schedule"
        )
    if s.cluster.is_mixed:
        raise DescriptionError("a search over plans on nodes of several kinds is not modelled")


def _check_values(axes: Mapping[str, tuple[Any, ...]]) -> None:
    """Let the descriptions themselves complain of a value that is wrong whatever the others are."""
    for key, values in axes.items():
        for value in values:
            if key == "plan.sequence_parallel" or isinstance(value, bool):
                valid = key == "plan.sequence_parallel" and isinstance(value, bool)
            elif key in ("plan.schedule", "plan.recompute"):
                valid = isinstance(value, str)
            else:
                least = 0 if key == "plan.zero" else 1
                valid = isinstance(value, int) and value >= least
            if not valid:
                raise DescriptionError(f"--over {key}: {value!r} is no value of it")
            if key in ("plan.recompute", "plan.zero"):
                name = key.removeprefix("plan.")
                replace(Plan(), **{name: value})  # complains itself


def _values(key: str, s: Scenario) -> list[Any]:
    """Return the default values of an axis, with the scenario's own among them."""
    part, _, name = key.partition(".")
    own, every = getattr(getattr(s, part), name), list(DEFAULTS[key](s))
    if key == "plan.sequence_parallel" or (key, own) in (("plan.zero", 0), ("plan.chunks", 1)):
        return every
    return every if own in every else [*every, own]


def _uncut(s: Scenario) -> Scenario:
    """Return the scenario without the layers that `cuts` has found for its own plan."""
    if s.plan.stage_cut == "uniform":
        return s
    return replace(s, plan=replace(s.plan, layers_per_stage=None))


Place = tuple[object, ...]


def _combinations(
    s: Scenario, axes: Mapping[str, tuple[Any, ...]]
) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Yield what fills the cluster and divides batch and layers: its place, its values by field."""
    meshes = (axes[f"plan.{axis}"] for axis in ("tp", "pp", "cp", "ep"))
    for nodes, tp, pp, cp, ep in product(axes["cluster.num_nodes"], *meshes):
        dp, rest = divmod(nodes * s.cluster.ranks_per_node, tp * pp * cp)
        if rest or not dp:
            continue
        every = [pair for pair in _schedules(pp, axes) if _is_cut(s, pp, *pair)]
        mesh = {"num_nodes": nodes, "dp": dp, "tp": tp, "pp": pp, "cp": cp, "ep": ep}
        for size in axes["plan.microbatch_size"]:
            if s.run.global_batch_size % (size * dp):
                continue
            for schedule, chunks in every:
                for recompute, zero, parallel in _others(axes, dp * cp, tp):
                    values = {
                        **mesh, "schedule": schedule, "chunks": chunks, "microbatch_size": size,
                        "recompute": recompute, "zero": zero, "sequence_parallel": parallel,
                    }  # fmt: skip
                    place = (nodes, tp, pp, cp, ep), (schedule, chunks), size
                    yield (*place, recompute, zero, parallel), values


def _schedules(pp: int, axes: Mapping[str, tuple[Any, ...]]) -> Iterator[tuple[str, int]]:
    if pp == 1:  # one rank runs its microbatches in turn under each
        yield "1F1B", 1
        return
    for name in axes["plan.schedule"]:
        least, most = SCHEDULES[name].chunks
        if least == most:
            yield name, least
            continue
        yield from ((name, chunks) for chunks in axes["plan.chunks"] if chunks >= least)


def _others(
    axes: Mapping[str, tuple[Any, ...]], replicas: int, tp: int
) -> Iterator[tuple[str, int, bool]]:
    """Yield recomputation, ZeRO and sequence parallelism, where the last two mean something."""
    zeros = axes["plan.zero"] if replicas > 1 else (0,)
    parallel = axes["plan.sequence_parallel"] if tp > 1 else (False,)
    yield from product(axes["plan.recompute"], zeros, parallel)


def _candidate(base: Scenario, values: dict[str, Any]) -> tuple[Settings, Scenario] | None:
    """Return the settings and the scenario of values, or None where there is no such plan."""
    own = base.plan
    nodes = values.pop("num_nodes")
    try:
        values |= _layers(base, values)
        bare = replace(Plan(), **{k: v for k, v in values.items() if k in MESH})
        probe = _Probe(own, {**values, "replicas": bare.replicas})
        for name, plain, is_plain in PLAIN:
            if getattr(probe, name) != plain and is_plain(probe):  # type: ignore[arg-type]
                values[name] = plain
        plan = replace(own, **values)
        cluster = base.cluster
        if nodes != cluster.num_nodes:
            cluster = replace(cluster, num_nodes=nodes)
        scenario = replace(base, plan=plan, cluster=cluster)
    except DescriptionError:
        return None
    settings: Settings = {} if nodes == base.cluster.num_nodes else {"cluster.num_nodes": nodes}
    settings |= {f"plan.{k}": v for k, v in values.items() if v != getattr(own, k)}
    return settings, scenario


MESH = ("dp", "tp", "pp", "cp")


class _Probe:
    """A plan with other values that nobody has checked yet."""

    def __init__(self, plan: Plan, values: dict[str, Any]) -> None:
        self.plan, self.values = plan, values

    def __getattr__(self, name: str) -> Any:
        return self.values[name] if name in self.values else getattr(self.plan, name)


def _is_cut(base: Scenario, pp: int, schedule: str, chunks: int) -> bool:
    """Return whether the layers can be divided over the stages of a schedule."""
    stages = pp * chunks // SCHEDULES[schedule].copies
    layers = base.model.num_hidden_layers
    if base.plan.stage_cut != "uniform":
        return stages <= layers + 2
    return not (layers % stages) or _counts_ends(layers, stages) or pp * chunks == pp <= layers


def _counts_ends(layers: int, stages: int) -> bool:
    """Return whether layers are divided evenly when embedding and head count as one each."""
    return 1 < stages <= layers and bool(layers % stages) and not (layers + 2) % stages


def _layers(base: Scenario, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a plan says of its stages: equal ones, or the embedding and the head as a layer.

    Where the scenario lists its layers, so does the plan.
    """
    if base.plan.stage_cut != "uniform":
        return {}
    layers, pp, chunks = base.model.num_hidden_layers, values["pp"], values["chunks"]
    counted = _counts_ends(layers, pp * chunks // SCHEDULES[values["schedule"]].copies)
    flags: dict[str, Any] = {
        "account_for_embedding_in_pipeline_split": counted,
        "account_for_loss_in_pipeline_split": counted,
    }
    if base.plan.layers_per_stage is None:
        return flags
    bare = replace(Plan(pp=pp, chunks=chunks, schedule=values["schedule"]), **flags)
    return {"layers_per_stage": even_layers(bare, layers)}


def settings_text(candidate_settings: Settings) -> str:
    """Return settings as the options of a command, to paste."""
    return " ".join(f"--set {word}" for word in words(candidate_settings)) or "(as it is)"
