"""Scenarios with some values changed: by dotted key, held to the same rules as a file's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from simulator.describe import loader
from simulator.describe.fields import rules
from simulator.describe.scenario import Scenario
from simulator.errors import DescriptionError, suggestion

T = TypeVar("T")


def changed(s: Scenario, settings: Mapping[str, object], **parts: Any) -> Scenario:
    """Return a scenario with values changed by dotted key, as ``{"plan.tp": 4}``.

    Args:
        s: what to change; it stays as it is.
        settings: values by dotted key, as a file would hold them.
        parts: whole fields, such as ``plan``, that are changed with them.

    Raises:
        DescriptionError: with all that is wrong with them.
    """
    new: Scenario = _changed(s, _tree(settings), "", **parts)
    return new


def changed_part(part: T, name: str, settings: Mapping[str, object]) -> T:
    """Return a scenario's part of a name with those values changed that lie in it.

    Raises:
        DescriptionError: with all that is wrong with them.
    """
    branch = _tree(settings).get(name, {})
    if isinstance(branch, _Leaf):
        raise DescriptionError(f"{name!r} cannot be set whole; set its parts, as {name}.x")
    new: T = _changed(part, branch, name)
    return new


def _tree(settings: Mapping[str, object]) -> dict[str, Any]:
    """Return values by dotted key as nested tables with leaves."""
    tree: dict[str, Any] = {}
    for key in sorted(settings, key=lambda key: key.count(".")):  # a whole before its parts
        *path, last = key.split(".")
        inner = tree
        for name in path:
            branch = inner.setdefault(name, {})
            if isinstance(branch, _Leaf):  # a node by its name, and a part of it changed
                inner[name] = branch = {"from": branch}
            inner = branch
        inner[last] = _Leaf(settings[key])
    return tree


@dataclasses.dataclass(frozen=True, slots=True)
class _Leaf:
    """A value that was given, apart from the tables that lead to it."""

    value: object


def _changed(old: Any, tree: Mapping[str, Any], where: str, **parts: Any) -> Any:
    """Return a description with the fields of a tree changed."""
    cls: type = type(old)
    known, values = rules(cls), {}
    problems: list[str] = []
    builder = loader.Builder(Path("settings"), problems)
    for name, branch in tree.items():
        here = f"{where}.{name}".strip(".")
        if name not in known:
            raise DescriptionError(f"[{where}]: unknown key {name!r}{suggestion(name, known)}")
        part = getattr(old, name)
        if isinstance(branch, _Leaf):
            values[name] = builder.value(known[name], branch.value, here, where)
        elif dataclasses.is_dataclass(part) and "from" not in branch:
            values[name] = _changed(part, branch, here)
        elif isinstance(part, dict):
            table = {**part, **_table(branch)}
            values[name] = builder.value(known[name], table, here, where)
        else:  # nothing is there yet: the branch is the whole of it
            values[name] = builder.value(known[name], _table(branch), here, where)
    if problems:
        raise DescriptionError(problems)
    try:
        return replace(old, **values, **parts)
    except DescriptionError as error:
        raise DescriptionError(p.removeprefix(f"{cls.__name__}.") for p in error.problems) from None


def _table(branch: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: part.value if isinstance(part, _Leaf) else _table(part)
        for name, part in branch.items()
    }
