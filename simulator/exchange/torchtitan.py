"""torchtitan's TOML files of settings as scenarios, with an account of every key."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from simulator.describe import catalog
from simulator.describe.loader import (
    load_cluster,
    load_model,
    load_node,
    parse_override,
    scenario,
)
from simulator.describe.model import Model
from simulator.describe.plan import Plan
from simulator.describe.run import Run
from simulator.errors import DescriptionError, suggestion
from simulator.exchange.account import Imported
from simulator.exchange.titan_keys import (
    ALIASES,
    KEYS,
    KEYS_WITHOUT_EFFECT,
    MODELS,
    NOT_MODELLED,
    REFUSED,
    WITHOUT_EFFECT,
)
from simulator.schedules import SCHEDULES, schedule_name

DEFAULT_NODE = "dgx-h100"
CP_STYLES = {"allgather": "all_gather", "alltoall": "ring"}
_TYPES: Mapping[str, Any] = {
    "text": str,
    "count": int,
    "number": (int, float),
    "flag": bool,
    "texts": (list, tuple),
}


class _Settings:
    """The values of a file by dotted key, torchtitan's defaults for those that are absent."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = given
        self.problems: list[str] = []

    def __getitem__(self, name: str) -> Any:
        key = KEYS[name]
        value = self.given.get(name)
        if value is None:
            return key.default
        if key.kind == "texts" and isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()]
        wanted = _TYPES[key.kind]
        right = isinstance(value, wanted) and (key.kind == "flag") == isinstance(value, bool)
        number: Any = value
        if not right or (key.kind == "count" and number < 1 and number != -1):
            self.complain(name, f"{value!r} is no {key.kind}")
            return key.default
        return tuple(value) if key.kind == "texts" else value

    def complain(self, name: str, what: str) -> None:
        problem = f"{name}: {what}"
        if problem not in self.problems:
            self.problems.append(problem)

    def shown(self, name: str) -> str:
        """Return a key and its value, or its default in words."""
        if name in self.given:
            return f"{name} = {self.given[name]!r}"
        return f"{name} is {KEYS[name].default!r} by default"


def import_torchtitan(
    text: str,
    *,
    name: str = "imported",
    node: str | None = None,
    nodes: int | None = None,
    cluster: Mapping[str, Any] | None = None,
    settings: Sequence[str] = (),
) -> Imported:
    """Return the scenario that a TOML file of torchtitan describes.

    Args:
        text: the file.
        name: of the scenario.
        node: a node of the catalogue, which a file does not name.
        nodes: how many; as many as the degrees need where each is a number, when absent.
        cluster: the whole table of the cluster instead.
        settings: ``--section.key value`` or ``--section.key=value``, laid over the file.

    Raises:
        DescriptionError: when what is given contradicts itself, is not known, or is not modelled.
    """
    given = _given(text, settings)
    s = _Settings(given)
    notes: list[str] = []
    degrees = {
        axis: s[f"parallelism.{key}_parallel_degree"]
        for axis, key in (("tp", "tensor"), ("pp", "pipeline"), ("cp", "context"))
    }
    replicas = s["parallelism.data_parallel_replicate_degree"]
    shards = s["parallelism.data_parallel_shard_degree"]
    if s.problems:
        raise DescriptionError(s.problems)
    share = degrees["tp"] * degrees["pp"] * degrees["cp"]
    world_said = share * replicas * shards if shards > 0 else None
    table = dict(cluster) if cluster is not None else _cluster(node, nodes, world_said, notes)
    world = load_cluster(table).world_size
    if world % (share * replicas) or (world_said or world) != world:
        needed = world_said or f"a multiple of {share * replicas}"
        raise DescriptionError(
            f"the degrees of [parallelism] need {needed} devices, the cluster has {world}"
        )
    dp = world // share
    shards = dp // replicas if shards < 0 else shards
    model, layers = _model(s)
    tables: dict[str, Any] = {"name": name, "model": model, "cluster": table}
    left_out: list[str] = []
    tables["plan"] = _plan(s, degrees, dp, shards, layers, left_out)
    tables["run"] = _run(s, dp, left_out)
    for key, (why, neutral) in REFUSED.items():
        if key in given and given[key] not in neutral:
            s.complain(key, f"{given[key]!r}: {why}")
    for section, cls in (("plan", Plan), ("run", Run)):
        known = {field.name for field in dataclasses.fields(cls)}
        for key in set(tables[section]) - known:
            s.complain(f"{section}.{key}", f"{tables[section].pop(key)!r} is not built yet")
    if s.problems:
        raise DescriptionError(s.problems)
    left_out += [
        f"{key} = {given[key]!r}: {why}"
        for key, (why, neutral) in NOT_MODELLED.items()
        if key in given and given[key] not in neutral
    ]
    notes.append(f"plan.dp is left out: it fills the cluster ({dp} with {world} devices)")
    return Imported(
        scenario=scenario(tables, Path(f"{name}.toml")), tables=tables, why=_why(s, tables),
        mapped=tuple(s.shown(key) for key in given if key in KEYS),
        without_effect=_groups(given), not_modelled=tuple(left_out),
        unknown=tuple(_unknown(given)), notes=tuple(notes),
    )  # fmt: skip


# --- reading --------------------------------------------------------------------------------------


def _given(text: str, settings: Sequence[str]) -> dict[str, Any]:
    """Return the values of a file and of what is laid over it, by dotted key."""
    try:
        tables = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise DescriptionError(f"it is not valid TOML ({error})") from None
    if not any(isinstance(tables.get(part), dict) for part in ("parallelism", "training")):
        raise DescriptionError(
            "there is neither [parallelism] nor [training] in it: not a file of torchtitan"
        )
    out = dict(_flat(tables, ""))
    words = list(settings)
    while words:
        word = words.pop(0).removeprefix("--")
        if "=" not in word:
            value = words.pop(0) if words and not words[0].startswith("--") else "true"
            word = f"{word}={value}"
        key, read = parse_override(word)
        out[ALIASES.get(key, key)] = read
    return out


def _flat(tables: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tables.items():
        name = f"{prefix}{key}".replace("quantize.linear.", "")
        if isinstance(value, dict):
            yield from _flat(value, f"{name}.")
        else:
            yield ALIASES.get(name, name), value


def _unknown(given: Mapping[str, Any]) -> Iterator[str]:
    for key in given:
        if key not in KEYS and key not in NOT_MODELLED and not _group(key) and key not in REFUSED:
            yield f"{key}{suggestion(key, KEYS)}"


def _group(key: str) -> str | None:
    section = key.partition(".")[0]
    if key in KEYS_WITHOUT_EFFECT:
        return "of no weight"
    return next((group for group, names in WITHOUT_EFFECT.items() if section in names), None)


def _groups(given: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    out: dict[str, tuple[str, ...]] = {}
    for key, value in given.items():
        group = None if key in KEYS or key in REFUSED else _group(key)
        neutral = {**NOT_MODELLED, **REFUSED}.get(key, ("", ()))[1]
        if value in neutral:
            group = "what is modelled anyhow"
        if group:
            out[group] = (*out.get(group, ()), key)
    return out


def _cluster(
    node: str | None, nodes: int | None, world: int | None, notes: list[str]
) -> dict[str, Any]:
    if node is None:
        notes.append(f"the node is taken to be {DEFAULT_NODE}; say which with --node")
    size = load_node(node or DEFAULT_NODE).num_devices
    if nodes is None and world is None:
        raise DescriptionError(
            "parallelism.data_parallel_shard_degree is -1, whatever devices are left; say --nodes N"
        )
    table: dict[str, Any] = {"node": node or DEFAULT_NODE}
    table["num_nodes"] = nodes or max(1, (world or 1) // size)
    used = (world or 0) // table["num_nodes"]
    if world and 0 < used < size:
        table["devices_per_node"] = used
    return table


# --- mapping --------------------------------------------------------------------------------------


def _model(s: _Settings) -> tuple[str, int]:
    """Return the model's name in the catalogue, and its layers."""
    key = s["model.name"].removesuffix("_simple_fsdp"), s["model.flavor"]
    found, known = MODELS.get(key), catalog.names("models")
    if found not in known:
        some = ", ".join(f"{n} {flavor}" for (n, flavor), m in MODELS.items() if m in known)
        raise DescriptionError(f"model.flavor: {' '.join(key)} is not known; known are {some}")
    built = load_model(found)
    return found, built.num_hidden_layers if isinstance(built, Model) else 0


def _plan(
    s: _Settings, degrees: Mapping[str, int], dp: int, shards: int, layers: int,
    left_out: list[str],
) -> dict[str, Any]:  # fmt: skip
    tp, pp, cp = degrees["tp"], degrees["pp"], degrees["cp"]
    plan: dict[str, Any] = {"tp": tp, "pp": pp}
    if cp > 1:
        plan["cp"] = cp
        method = s["parallelism.context_parallel_rotate_method"]
        if method not in CP_STYLES:
            s.complain("parallelism.context_parallel_rotate_method", f"{method!r} is not known")
        plan["cp_style"] = CP_STYLES.get(method, "ring")
    for axis, key in (("ep", "expert"), ("etp", "expert_tensor")):
        if (degree := s[f"parallelism.{key}_parallel_degree"]) > 1:
            plan[axis] = degree
    plan["order"] = ["pp", "dp", "cp", "tp"]
    if shards * cp > 1:
        plan["zero"] = 3
        if shards < dp:
            plan["dp_shard"] = shards
        keep = s["parallelism.fsdp_reshard_after_forward"]
        plan["reshard_after_forward"] = keep == "always" or (keep == "default" and pp == 1)
        if pp > 1:
            plan["no_sync"] = True
    if tp > 1:
        plan["sequence_parallel"] = True
        asynchronous = s["parallelism.enable_async_tensor_parallel"] and _compiled(s)
        plan["tp_overlap"] = "all" if asynchronous else "none"
    plan["microbatch_size"] = s["training.local_batch_size"]
    if pp > 1:
        plan |= _pipeline(s, pp, layers)
    plan |= _recomputation(s, layers, left_out)
    if s["training.enable_cpu_offload"]:
        s.complain("training.enable_cpu_offload", "weights on the host are not modelled")
    return plan


def _pipeline(s: _Settings, pp: int, layers: int) -> dict[str, Any]:
    """Return the schedule, the chunks of its ranks and the layers of its stages."""
    csv = s["parallelism.pipeline_parallel_schedule_csv"]
    try:
        name = schedule_name(s["parallelism.pipeline_parallel_schedule"])
    except DescriptionError as error:
        s.complain("parallelism.pipeline_parallel_schedule", str(error))
        return {}
    ends = [
        s[f"parallelism.pipeline_parallel_{end}_stage_less_layers"] for end in ("first", "last")
    ]
    points = s["parallelism.pipeline_parallel_split_points"]
    per_stage = s["parallelism.pipeline_parallel_layers_per_stage"]
    single = SCHEDULES[name].chunks[1] == 1
    if points:
        stages = len(points) + 1
    elif per_stage:
        stages = -(-(layers + sum(ends)) // per_stage)
    else:
        stages = pp if single else 2 * pp
    if stages % pp or (single and stages > pp):
        s.complain(
            "parallelism.pipeline_parallel_layers_per_stage",
            f"{stages} stages are not {'one' if single else 'as many'} for each of {pp} ranks",
        )
    plan: dict[str, Any] = {
        "schedule": csv or name,
        "microbatch_size": s["parallelism.pipeline_parallel_microbatch_size"],
    }
    if stages > pp:
        plan["chunks"] = stages // pp
    if points:
        plan["layers_per_stage"] = _split(s, points, layers)
        return plan
    for end, key, less in zip(("first", "last"), ("embedding", "loss"), ends, strict=True):
        if less == 1:
            plan[f"account_for_{key}_in_pipeline_split"] = True
        elif less != 0:
            s.complain(
                f"parallelism.pipeline_parallel_{end}_stage_less_layers",
                f"{less} is not modelled; a stage may have one layer less",
            )
    return plan


def _split(s: _Settings, points: Sequence[str], layers: int) -> list[int]:
    """Return the layers of stages that begin at modules as ``layers.8``."""
    starts = [point.removeprefix("layers.") for point in points]
    if not all(start.isdecimal() and int(start) < layers for start in starts):
        s.complain("parallelism.pipeline_parallel_split_points", f"{list(points)} are no layers")
        return [layers]
    ends = [0, *map(int, starts), layers]
    return [after - before for before, after in pairwise(ends)]


def _recomputation(s: _Settings, layers: int, left_out: list[str]) -> dict[str, Any]:
    mode, option = s["activation_checkpoint.mode"], s["activation_checkpoint.selective_ac_option"]
    if mode in ("none", "full"):
        return {"recompute": mode}
    if mode != "selective":
        s.complain("activation_checkpoint.mode", f"{mode!r} is not one of none, selective, full")
        return {}
    if option == "op":
        return {"recompute": "selective-op"}
    if not option.isdecimal() or not int(option[:9]):
        s.complain(
            "activation_checkpoint.selective_ac_option", f"{option!r} is no number, nor 'op'"
        )
        return {}
    every = int(option[:9])
    if every == 1:
        return {"recompute": "full"}
    stages = s["parallelism.pipeline_parallel_degree"]
    count = max(1, layers // stages // every)
    left_out.append(
        f"{s.shown('activation_checkpoint.selective_ac_option')}: the first {count} layers of a "
        f"stage recompute, not one of every {every}"
    )
    return {"recompute": "full", "recompute_layers": count}


def _compiled(s: _Settings) -> bool:
    return s["compile.enable"] and "model" in s["compile.components"]


def _run(s: _Settings, dp: int, left_out: list[str]) -> dict[str, Any]:
    batch, local = s["training.global_batch_size"], s["training.local_batch_size"]
    if batch > local * dp and s["parallelism.pipeline_parallel_degree"] > 1:
        left_out.append(
            f"{s.shown('training.global_batch_size')}: all its microbatches go through the "
            "pipeline as one step; torchtitan lets it run empty between accumulated batches"
        )
    low = s["training.mixed_precision_param"] == "bfloat16"
    fp8 = any("float8" in converter for converter in s["model.converters"])
    kind = s["optimizer.name"]
    optimizers = {"AdamW": "adamw", "Adam": "adam"}
    if kind not in optimizers:
        s.complain("optimizer.name", f"{kind!r} is not one of {', '.join(optimizers)}")
    run: dict[str, Any] = {
        "global_batch_size": local * dp if batch < 0 else batch,
        "sequence_length": s["training.seq_len"],
        "precision": "fp8" if fp8 else "bf16" if low else "fp32",
        "compiled": _compiled(s),
        "compiled_loss": s["compile.enable"] and "loss" in s["compile.components"],
        "optimizer": optimizers.get(kind, "adamw"),
        "fused_optimizer": s["optimizer.implementation"] == "fused",
        "clip_grad": s["training.max_norm"] > 0,
        "loss_in_place": False,
    }
    if s["model.name"].startswith("llama3"):
        run["layer_code"] = "torchtitan"
    if low:
        run["gradient_dtype"] = "fp32"
    if fp8:
        run["fp8_scaling"] = "current"
    return run


def _why(s: _Settings, tables: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings behind each key of the plan and the run that is in the scenario."""
    out: dict[str, list[str]] = {}
    for name, key in KEYS.items():
        for target in key.becomes.split(", "):
            section, _, field = target.partition(".")
            if name in s.given and field and field in tables.get(section, {}):
                out.setdefault(target, []).append(s.shown(name))
    return {target: ", ".join(shown) for target, shown in out.items()}
