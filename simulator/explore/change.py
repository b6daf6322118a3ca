"""A scenario with some of its values changed, and the cheaper form in which searches run it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeAlias

from simulator.describe.network import Network
from simulator.describe.scenario import Scenario
from simulator.errors import DescriptionError

Settings: TypeAlias = dict[str, object]
"""Values by dotted key, as ``--set`` takes them."""

QUANTITIES = {"plan.bucket_size": ("MB", 1e6)}
"""Settings that a file writes with a unit, and its size."""


def changed(s: Scenario, settings: Settings) -> Scenario | None:
    """Return a scenario with other values, or None where it would be none."""
    parts: dict[str, dict[str, object]] = {}
    for key, value in settings.items():
        part, _, name = key.partition(".")
        parts.setdefault(part, {})[name] = value
    if s.plan.stage_cut != "uniform":  # to be cut anew
        parts.setdefault("plan", {})["layers_per_stage"] = None
    try:
        new = {part: replace(getattr(s, part), **values) for part, values in parts.items()}
        return replace(s, **new)
    except DescriptionError:
        return None


def words(settings: Mapping[str, object]) -> list[str]:
    """Return each setting as ``--set`` takes it."""
    return [f"{key}={_toml(key, value)}" for key, value in settings.items()]


def _toml(key: str, value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{','.join(map(str, value))}]"
    if key in QUANTITIES and isinstance(value, float):
        unit, size = QUANTITIES[key]
        return f"{value / size:g}{unit}"
    return str(value)


def by_stage(s: Scenario) -> Scenario:
    """Return a scenario with the fewest ops; that moves no time and no memory."""
    return replace(s, run=replace(s.run, detail="stage"))


def each_flow_alone(s: Scenario) -> Scenario:
    """Return a scenario with the fewest ops, and no flow that shares a link with another."""
    run = replace(s.run, detail="stage", network="alpha-beta")
    return replace(s, run=run, cluster=replace(s.cluster, network=Network()))
