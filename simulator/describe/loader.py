"""Files to descriptions: strict TOML with unit strings, catalogue names, ``--set`` overrides.

Every problem of a file is found and reported at once, each with its place, the value and, where
one is near, a suggestion.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import tomllib
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from simulator.describe import catalog
from simulator.describe.cluster import Cluster, Node
from simulator.describe.fields import (
    Catalogued,
    OrFile,
    Rule,
    Unit,
    complaint,
    described,
    from_text,
    rules,
    split,
)
from simulator.describe.huggingface import read_config
from simulator.describe.layer_list import LayerList
from simulator.describe.model import Model
from simulator.describe.resnet import ResNet
from simulator.describe.scenario import Scenario
from simulator.errors import DescriptionError, suggestion

T = TypeVar("T")
Table = dict[str, Any]


def load(reference: str | Path, overrides: Mapping[str, object] | None = None) -> Scenario:
    """Return the scenario of a TOML file, or of a scenario's name in the catalogue.

    Args:
        reference: path of the file, or a name such as ``gpt2-xl-1f1b``.
        overrides: values by dotted key, as ``{"plan.tp": 4}``, laid over those of the file.

    Raises:
        DescriptionError: with all problems of the file.
    """
    table, path = read_table(reference)
    return scenario(overridden(table, overrides or {}), path)


def read_table(reference: str | Path) -> tuple[Table, Path]:
    """Return the table of a scenario's file, not to be changed, and its path.

    Raises:
        DescriptionError: when there is no such file, or it cannot be parsed.
    """
    path = catalog.find(str(reference), "scenarios", Path())
    if path.suffix != ".toml":
        raise DescriptionError(
            f"{path}: a scenario is a TOML file; name a model in one, as model = {str(path)!r}"
        )
    return _read(path, path.stat().st_mtime_ns), path


def overridden(table: Table, overrides: Mapping[str, object]) -> Table:
    """Return a copy of a table with values laid over it by dotted key."""
    table = copy.deepcopy(table)
    for key, value in overrides.items():
        _override(table, key, value)
    return table


def scenario(table: Table, path: Path) -> Scenario:
    """Return the scenario of an already parsed file; `path` places messages and relative names."""
    problems: list[str] = []
    table = {"name": path.stem, **table}
    table = _fill_dp(table, path)
    built = Builder(path, problems).build(Scenario, table, "")
    if built is None:
        raise DescriptionError(problems)
    return built


def parse_override(text: str) -> tuple[str, object]:
    """Return the dotted key and the value of a ``plan.tp=4``; values are TOML, or bare text.

    Raises:
        DescriptionError: when there is no ``=``.
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise DescriptionError(f"--set {text!r}: write KEY=VALUE, for example plan.tp=4")
    try:
        read = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()
    if list(read) != ["value"]:
        raise DescriptionError(f"--set {text!r}: holds more than one value; use --set for each")
    return key.strip(), read["value"]


def _override(table: Table, key: str, value: object) -> None:
    *path, last = key.split(".")
    for name in path:
        inner = table.get(name)
        if isinstance(inner, str):  # `node = "dgx-a100"` and `--set cluster.node.num_devices=4`
            inner = {"from": inner}
        table[name] = inner = dict(inner) if isinstance(inner, dict) else {}
        table = inner
    table[last] = value


def _fill_dp(table: Table, path: Path) -> Table:
    """Let a plan without dp use the whole cluster, which is what a sweep over nodes means."""
    plan = table.get("plan", {})
    if not isinstance(plan, dict) or "dp" in plan or not isinstance(table.get("cluster"), dict):
        return table
    cluster = cluster_of(table, path)
    share = [plan.get(axis, 1) for axis in ("tp", "pp", "cp")]
    if cluster is None or any(type(degree) is not int or degree < 1 for degree in share):
        return table
    dp = max(1, cluster.world_size // math.prod(share))
    return {**table, "plan": {**plan, "dp": dp}}


def cluster_of(table: Table, path: Path) -> Cluster | None:
    """Return the cluster of a scenario's table, or None where something is wrong with it."""
    raw = table.get("cluster")
    return Builder(path, []).build(Cluster, raw, "cluster") if isinstance(raw, dict) else None


class Builder:
    """Builds descriptions from tables and keeps the list of what was wrong."""

    def __init__(self, path: Path, problems: list[str]) -> None:
        self.path = path
        self.problems = problems

    def report(self, where: str, what: str) -> None:
        """Add a problem at a place of the file."""
        place = f"{self.path.name} [{where}]" if where else self.path.name
        self.problems.append(f"{place}: {what}")

    def build(self, cls: Callable[..., T], table: Table, where: str) -> T | None:
        """Return the description that a table holds, or None after reporting why not."""
        before = len(self.problems)
        cls = _named(cls, table)
        known = rules(typing.cast(type, cls))
        values: dict[str, object] = {}
        for key in table:
            if key not in known:
                self.report(where, f"unknown key {key!r}{suggestion(key, known)}")
        for name, rule in known.items():
            if name in table:
                values[name] = self.value(rule, table[name], f"{where}.{name}".strip("."), where)
            elif rule.required:
                self.report(where, f"key {name!r} is missing")
        if len(self.problems) > before:
            return None
        try:
            return cls(**values)
        except DescriptionError as error:
            for problem in error.problems:
                self.report(where, problem.removeprefix(f"{typing.cast(type, cls).__name__}."))
            return None

    def value(self, rule: Rule, raw: object, here: str, parent: str) -> object:
        """Return the value of one field, or None after reporting what is wrong with it."""
        name = here.rpartition(".")[2]
        if rule.descriptions:
            folder = next((m.folder for m in rule.markers if isinstance(m, Catalogued)), None)
            if name == "model":
                folder = "models"
            return self.nested(typing.cast(type, rule.base), raw, here, folder)
        if typing.get_origin(rule.base) is tuple:
            item = typing.get_args(rule.base)[0]
            if described(item) and isinstance(raw, (list, tuple)):
                return tuple(self.nested(typing.cast(type, item), r, here, None) for r in raw)
            base, markers = split(item)
            if any(isinstance(m, Unit) for m in markers) and isinstance(raw, (list, tuple)):
                one = Rule(base, markers, False, True, (), dataclasses.MISSING)
                return tuple(self.value(one, r, here, parent) for r in raw)
            wrong = complaint(raw, rule.base, rule.markers)
            if wrong is None:
                return tuple(typing.cast("list[object]", raw))
        elif typing.get_origin(rule.base) is dict and isinstance(raw, dict):
            base, markers = split(typing.get_args(rule.base)[1])
            item = Rule(base, markers, False, True, described(base), dataclasses.MISSING)
            return {k: self.value(item, v, f"{here}.{k}", here) for k, v in raw.items()}
        else:
            try:
                read = from_text(self._placed(raw, rule.markers), rule.markers)
            except ValueError as error:
                self.report(parent, f"{name}: {error}")
                return None
            wrong = complaint(read, rule.base, rule.markers)
            if wrong is None:
                return float(read) if rule.base is float else read  # type: ignore[arg-type]
        self.report(parent, f"{name}: {wrong}")
        return None

    def _placed(self, raw: object, markers: tuple[object, ...]) -> object:
        """Return a text as it is, or the path of a file from here where it names one."""
        suffixes = [m.suffix for m in markers if isinstance(m, OrFile)]
        if isinstance(raw, str) and any(raw.lower().endswith(s) for s in suffixes):
            return str(self.path.parent / Path(raw).expanduser())
        return raw

    def nested(self, cls: type, raw: object, here: str, folder: str | None) -> object:
        """Return a description inside another: a table, or a name that stands for a file."""
        if isinstance(raw, str) and folder:
            raw = {"from": raw}
        if not isinstance(raw, dict):
            self.report(here, f"{raw!r} is not a table{' or a name' if folder else ''}")
            return None
        if folder is None or "from" not in raw:
            return self.build(cls, raw, here)
        reference, own = raw["from"], {k: v for k, v in raw.items() if k != "from"}
        if not isinstance(reference, str):
            self.report(here, f"from: {reference!r} is not a text")
            return None
        try:
            path = catalog.find(reference, folder, self.path.parent)
            stamp = path.stat().st_mtime_ns
            if own:  # facts of the file with some of them changed; the place is the scenario's
                facts = _absolute(cls, _read(path, stamp), path.parent)
                return self.build(cls, _merged(facts, own), here)
            built, problems = _whole(cls, path, stamp)
        except DescriptionError as error:
            self.problems.extend(f"{self.path.name} [{here}]: {p}" for p in error.problems)
            return None
        self.problems += problems
        return built


def _named(cls: Any, table: Table) -> Any:
    """Return that of several descriptions whose `model_type` a table names, else the first."""
    kinds = described(cls)
    for kind in kinds:
        rule = rules(kind).get("model_type")
        if rule and table.get("model_type") in typing.get_args(rule.base):
            return kind
    return kinds[0]


def _absolute(cls: type, facts: Table, folder: Path) -> Table:
    """Return the facts of a file with the paths in it made absolute: the file is left behind."""
    out = dict(facts)
    for name, rule in rules(_named(cls, facts)).items():
        value = facts.get(name)
        named = any(isinstance(marker, Catalogued) for marker in rule.markers)
        if named and isinstance(value, str) and catalog.is_path(value):
            out[name] = str((folder / value).absolute())
    return out


@lru_cache(maxsize=64)
def _whole(cls: type, path: Path, stamp: int) -> tuple[object, tuple[str, ...]]:
    """Return the description that a file holds, and its problems; remembered until it changes."""
    problems: list[str] = []
    built = Builder(path, problems).build(cls, _read(path, stamp), "")
    return built, tuple(problems)


def _merged(facts: Table, own: Table) -> Table:
    merged = dict(facts)
    for key, value in own.items():
        old = merged.get(key)
        if isinstance(value, dict) and isinstance(old, str):
            old = {"from": old}
        if isinstance(old, dict) and isinstance(value, dict):
            value = _merged(old, value)
        merged[key] = value
    return merged


def _toml(text: str) -> Table:
    return tomllib.loads(text)


def _json(text: str) -> Table:
    config = json.loads(text, object_pairs_hook=_once)
    if not isinstance(config, dict):
        raise ValueError("the top level is not an object")
    return config


def _once(pairs: list[tuple[str, Any]]) -> Table:
    """Return an object of JSON whose keys are there once each, as TOML demands of tables."""
    out = dict(pairs)
    if len(out) < len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
        raise ValueError(f"key {twice!r} is there twice")
    return out


READERS: Mapping[str, tuple[str, Callable[[str], Table]]] = {
    ".toml": ("TOML", _toml),
    ".json": ("JSON", _json),
}


@lru_cache(maxsize=64)
def _read(path: Path, _stamp: int) -> Table:
    """Return the table of a file; a Hugging Face config becomes the fields of a model.

    It is remembered for as long as the file's time of change stays; nobody changes it.

    Raises:
        DescriptionError: when it cannot be read or parsed.
    """
    if path.suffix not in READERS:
        raise DescriptionError(f"{path}: a file must end in {' or '.join(READERS)}")
    kind, parse = READERS[path.suffix]
    try:
        table = parse(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise DescriptionError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise DescriptionError(f"{path}: is not a UTF-8 text") from None
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, ValueError, RecursionError) as error:
        raise DescriptionError(f"{path}: is not valid {kind} ({error})") from None
    if path.suffix == ".json":
        try:
            return {"name": path.parent.name if path.stem == "config" else path.stem,
                    **read_config(table)}  # fmt: skip
        except DescriptionError as error:
            raise DescriptionError(f"{path.name}: {p}" for p in error.problems) from None
    return table


def set_all(texts: Sequence[str]) -> dict[str, object]:
    """Return the overrides that several ``KEY=VALUE`` texts hold."""
    return dict(parse_override(text) for text in texts)


def load_node(reference: str | Table, base: Path = Path()) -> Node:
    """Return the node that a name, a path or a table with ``from`` stands for.

    Raises:
        DescriptionError: with all problems of its file.
    """
    problems: list[str] = []
    built = Builder(base / "node", problems).nested(Node, reference, "node", "nodes")
    if problems:
        raise DescriptionError(problems)
    return typing.cast(Node, built)


def load_model(reference: str) -> Model | ResNet | LayerList:
    """Return the model that a name of the catalogue or a path stands for.

    Raises:
        DescriptionError: with all problems of its file.
    """
    problems: list[str] = []
    cls = typing.cast(type, rules(Scenario)["model"].base)
    built = Builder(Path("model"), problems).nested(cls, reference, "model", "models")
    if problems:
        raise DescriptionError(problems)
    return typing.cast("Model | ResNet | LayerList", built)


def load_cluster(table: Table) -> Cluster:
    """Return the cluster of a table.

    Raises:
        DescriptionError: with all problems of it.
    """
    problems: list[str] = []
    built = Builder(Path("cluster"), problems).build(Cluster, table, "")
    if built is None:
        raise DescriptionError(problems)
    return built


def cluster_table(reference: str) -> Table:
    """Return the table of the cluster of a scenario, by its name or path.

    Raises:
        DescriptionError: when there is no such file, or no cluster in it.
    """
    path = catalog.find(reference, "scenarios", Path())
    table = _read(path, path.stat().st_mtime_ns).get("cluster")
    if not isinstance(table, dict):
        raise DescriptionError(f"{path}: it has no table [cluster]")
    return _absolute(Cluster, table, path.parent)
