"""Points of a sweep: settings laid over a base, and the scenario that comes of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from simulator import __version__
from simulator.describe import loader
from simulator.describe.change import changed, changed_part
from simulator.describe.cluster import Cluster, Node
from simulator.describe.plan import Plan
from simulator.describe.scenario import Scenario
from simulator.errors import DescriptionError
from simulator.explore.sweep.grid import Settings
from simulator.schedules import is_file, schedule_of

DEVICES = "devices"
"""Setting that fills nodes with as many devices: below a whole node one node of fewer."""

SAMPLES = "samples_per_device"
"""Setting of the samples that a step has for each device, or `FIXED`."""

FIXED = "fixed"
"""The global batch of the scenario, however many devices share it: strong scaling."""

RESHAPES = ("plan.tp", "plan.pp", "plan.cp", "cluster", DEVICES)
"""Settings, or what they begin with, that leave another number of ranks to dp."""

Resolve: TypeAlias = Callable[[Settings], Scenario]


@dataclass(frozen=True, slots=True)
class Point:
    """One point: what it sets, and its scenario, or why there is none."""

    settings: Settings
    scenario: Scenario | None
    reason: str = ""

    @property
    def key(self) -> str:
        """Name of what the scenario says, all of it: equal keys are equal simulations."""
        assert self.scenario is not None
        text = f"{__version__}\n{self.scenario!r}"
        schedule = self.scenario.plan.schedule
        if is_file(schedule):
            text += Path(schedule).read_text(encoding="utf-8", errors="replace")
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @property
    def is_local(self) -> bool:
        """Whether only this process knows the schedule, which a user's function makes."""
        assert self.scenario is not None
        known = schedule_of(self.scenario.plan.schedule)
        return known.foreign and known.size is None


def point(resolve: Resolve, settings: Settings) -> Point:
    """Return the point of some settings; a scenario that is refused says why."""
    try:
        return Point(settings, resolve(settings))
    except DescriptionError as error:
        return Point(settings, None, one_line(error))


def one_line(error: BaseException) -> str:
    """Return the message of an error in one line."""
    return "; ".join(" ".join(line.split()) for line in str(error).splitlines() if line.strip())


def resolver(base: str | Path | Scenario) -> Resolve:
    """Return the function from settings to the scenario that they make of a base.

    Raises:
        DescriptionError: when the base's file cannot be read.
    """
    if isinstance(base, Scenario):
        return lambda settings: _of_scenario(base, settings)
    table, path = loader.read_table(base)
    return lambda settings: _of_table(table, path, settings)


def _of_table(base: dict[str, Any], path: Path, settings: Settings) -> Scenario:
    try:
        return _read(base, path, settings)
    except DescriptionError as error:  # a thousand rows need not name the same file
        raise DescriptionError(p.removeprefix(f"{path.name}: ") for p in error.problems) from None


def _read(base: dict[str, Any], path: Path, settings: Settings) -> Scenario:
    table = loader.overridden(base, _own(settings))
    for name in ("cluster", "plan", "run"):
        if not isinstance(table.setdefault(name, {}), dict):
            return loader.scenario(table, path)  # which refuses it
    if DEVICES in settings:
        node = table["cluster"].get("node")
        if node is None:
            raise DescriptionError(f"{DEVICES}: {path.name} has no cluster.node to fill")
        table["cluster"] |= _filled(loader.load_node(node, path.parent), settings[DEVICES])
    if reshapes(settings):
        table["plan"].pop("dp", None)
    cluster = loader.cluster_of(table, path) if _scales(settings) else None
    if cluster is not None:
        table["run"]["global_batch_size"] = _batch(settings, cluster)
    table["run"].setdefault("detail", "stage")
    return loader.scenario(table, path)


def _of_scenario(base: Scenario, settings: Settings) -> Scenario:
    own = {"run.detail": "stage", **_own(settings)}
    if not reshapes(settings) and not _scales(settings):
        return changed(base, own)
    # Checked as a whole only once dp and the batch follow the rest.
    now = {key: value for key, value in own.items() if key.startswith(("cluster", "plan"))}
    cluster: Cluster = changed_part(base.cluster, "cluster", now)
    if DEVICES in settings:
        cluster = replace(cluster, **_filled(cluster.node, settings[DEVICES]))
    plan: Plan = changed_part(base.plan, "plan", now)
    if reshapes(settings):
        dp = max(1, cluster.world_size // (plan.tp * plan.pp * plan.cp))
        plan = replace(plan, dp=dp)
    if _scales(settings):
        own["run.global_batch_size"] = _batch(settings, cluster)
    rest = {key: value for key, value in own.items() if key not in now}
    return changed(base, rest, cluster=cluster, plan=plan)


def _own(settings: Settings) -> Settings:
    """Return the settings that are a scenario's, those of a whole before those of its parts."""
    keys = [key for key in settings if key not in (DEVICES, SAMPLES)]
    return {key: settings[key] for key in sorted(keys, key=lambda key: key.count("."))}


def reshapes(keys: Iterable[str]) -> bool:
    """Return whether dp is to fill what settings of some keys leave."""
    keys = set(keys)
    return not keys & {"plan", "plan.dp"} and any(
        key in RESHAPES or key.startswith("cluster.") for key in keys
    )


def _scales(settings: Settings) -> bool:
    return bool(settings.get(SAMPLES, FIXED) != FIXED)


def _filled(node: Node, devices: object) -> dict[str, Any]:
    """Return how many nodes, and devices of each, make so many devices."""
    if type(devices) is not int or devices < 1:
        raise DescriptionError(f"{DEVICES}: {devices!r} must be a whole number and at least 1")
    if devices <= node.num_devices:
        return {"num_nodes": 1, "devices_per_node": devices}
    nodes, rest = divmod(devices, node.num_devices)
    if rest:
        below = nodes * node.num_devices
        raise DescriptionError(
            f"{DEVICES}: {devices} fill no whole number of nodes {node.name} of "
            f"{node.num_devices}; {below} or {below + node.num_devices} would"
        )
    return {"num_nodes": nodes, "devices_per_node": node.num_devices}


def _batch(settings: Settings, cluster: Cluster) -> int:
    """Return the global batch of so many samples a device."""
    samples = settings[SAMPLES]
    if isinstance(samples, bool) or not isinstance(samples, (int, float)) or not samples > 0:
        raise DescriptionError(f"{SAMPLES}: {samples!r} must be {FIXED!r} or a number above 0")
    batch = samples * cluster.world_size
    if batch != int(batch):
        raise DescriptionError(
            f"{SAMPLES}: {samples} x {cluster.world_size} devices = {batch:g} is no whole batch"
        )
    return int(batch)
