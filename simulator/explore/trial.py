"""One plan, simulated, and what a search keeps of it; trials run in processes beside each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from simulator.api import simulate
from simulator.describe.plan import Plan
from simulator.describe.scenario import Scenario
from simulator.errors import DeadlockError, DescriptionError
from simulator.explore.change import Settings
from simulator.operate.cost import step_bills
from simulator.pool import mapped


class Task(NamedTuple):
    """A plan to be simulated."""

    number: int
    place: tuple[int, ...]
    settings: Settings
    scenario: Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A plan and what its simulation says."""

    number: int
    """Of its candidate in the space."""
    place: tuple[int, ...]
    settings: Settings
    """How it differs from the scenario, by dotted key."""
    name: str
    """The plan in a line."""
    num_devices: int
    step_time_s: float = 0.0
    tokens_per_s: float = 0.0
    mfu: float = 0.0
    bubble_fraction: float = 0.0
    device_memory_bytes: float = 0.0
    """In use on the fullest rank."""
    over_bytes: float = 0.0
    """What it needs beyond its device's memory, or the host's; 0 where it fits."""
    owners_s: dict[str, float]
    """Seconds of a step by owner, a key of `report.summary.OWNERS`; mean over ranks."""
    energy_j_per_token: float | None = None
    tokens_per_usd: float | None = None
    failed: str = ""
    """Why it could not be run; empty where it was."""

    @property
    def fits(self) -> bool:
        """Whether it ran and fits in memory."""
        return not self.failed and not self.over_bytes


def plan_name(p: Plan) -> str:
    """Return a plan in a line."""
    mesh = [f"{axis} {getattr(p, axis)}" for axis in ("dp", "tp", "pp", "cp", "ep")
            if getattr(p, axis) > 1]  # fmt: skip
    chunks = f" x{p.chunks}" if p.chunks > 1 else ""
    parts = [" ".join(mesh) or "1 rank"]
    parts += [f"{p.schedule}{chunks}"] * (p.pp > 1)
    parts += [f"microbatch {p.microbatch_size}", f"recompute {p.recompute}"]
    parts += [f"ZeRO-{p.zero}"] * (p.zero > 0) + ["SP"] * p.sequence_parallel
    return ", ".join(parts)


def run_trial(task: Task) -> Trial:
    """Simulate a plan."""
    s = task.scenario
    here = {
        "number": task.number, "place": task.place, "settings": task.settings,
        "name": plan_name(s.plan), "num_devices": s.cluster.world_size,
    }  # fmt: skip
    try:
        result = simulate(s)
    except (DescriptionError, DeadlockError) as error:
        reason = " ".join(str(error).partition("\n")[0].split())
        return Trial(**here, owners_s={}, failed=reason)  # type: ignore[arg-type]
    found = result.summary
    energy, per_usd = None, None
    if s.cost is not None:
        step, _ = step_bills(result)
        energy = step.joules / s.tokens_per_step
        paid = step.electricity_usd if step.devices_usd is None else step.devices_usd
        per_usd = s.tokens_per_step / paid if paid else None
    return Trial(
        **here,  # type: ignore[arg-type]
        step_time_s=found.step_time_s,
        tokens_per_s=found.tokens_per_s,
        mfu=found.mfu,
        bubble_fraction=found.bubble_fraction,
        device_memory_bytes=found.device_memory_bytes,
        over_bytes=max(
            0.0,
            found.device_memory_bytes - found.memory_capacity_bytes,
            found.host_memory_bytes - found.host_capacity_bytes,
        ),
        owners_s={owner: share * found.step_time_s for owner, share in found.shares.items()},
        energy_j_per_token=energy,
        tokens_per_usd=per_usd,
    )


def run_trials(tasks: Sequence[Task], jobs: int) -> Iterator[Trial]:
    """Simulate plans in `jobs` processes; trials come in the order of their tasks.

    Neighbouring tasks go to one process, so that it finds what plans share only once.
    """
    size = max(1, min(CHUNK, -(-len(tasks) // (2 * jobs))))
    chunks = [tasks[i : i + size] for i in range(0, len(tasks), size)]
    for done in mapped(_run_chunk, chunks, jobs if len(tasks) >= FEW else 1):
        yield from done


CHUNK, FEW = 24, 16
"""Trials that a process is given at once; fewer than this run where they are."""


def _run_chunk(tasks: Iterable[Task]) -> list[Trial]:
    return [run_trial(task) for task in tasks]
