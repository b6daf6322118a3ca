"""What a sweep keeps of one simulation: numbers of its report, or why there are none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from simulator.api import simulate
from simulator.describe.scenario import Scenario
from simulator.errors import DescriptionError, TrainsimError
from simulator.explore.sweep.columns import WORK
from simulator.explore.sweep.point import Point, one_line
from simulator.operate.cost import KWH, step_bills
from simulator.report.breakdown import COMMUNICATION
from simulator.report.result import Result
from simulator.schedules import schedule_name

Row: TypeAlias = dict[str, Any]
"""Plain values by column; units stand in the names."""

OK, REFUSED, FAILED = "ok", "refused", "failed"
"""Simulated, though perhaps too large for its devices; not legal; stopped by an error."""

MEMORY_ERROR = "out of memory while it was simulated"


@dataclass(frozen=True, slots=True)
class Record:
    """The row of a scenario by its key."""

    key: str
    row: Row
    is_final: bool = True
    """Whether another try would say the same; what is not is not kept for the next one."""


def measure(key: str, scenario: Scenario) -> Record:
    """Simulate one scenario; whatever goes wrong becomes its row."""
    try:
        return Record(key, _row(scenario))
    except DescriptionError as error:  # perhaps too large for the memory of this machine only
        return Record(key, {"status": REFUSED, "reason": one_line(error)}, is_final=False)
    except TrainsimError as error:
        return Record(key, {"status": FAILED, "reason": one_line(error)})
    except MemoryError:
        return Record(key, {"status": FAILED, "reason": MEMORY_ERROR}, is_final=False)
    except Exception as error:  # a fault of this package must not stop a thousand other rows
        reason = f"{type(error).__name__}: {one_line(error)}"
        return Record(key, {"status": FAILED, "reason": reason}, is_final=False)


def refused(point: Point) -> Row:
    """Return the row of a point that has no scenario."""
    return {"status": REFUSED, "reason": point.reason}


def _row(s: Scenario) -> Row:
    result = simulate(s)
    x, b, plan = result.summary, result.breakdown, s.plan
    exposed = {kind: x.shares[kind] for kind in COMMUNICATION}
    kinds = " + ".join(dict.fromkeys(node.device.name for node in s.cluster.kinds))
    row = {
        "status": OK,
        "reason": "" if x.fits else x.bottleneck,
        "fits": x.fits,
        "ranks": s.cluster.world_size,
        "num_nodes": s.cluster.num_nodes,
        "device": kinds,
        "dp": plan.dp,
        "tp": plan.tp,
        "pp": plan.pp,
        "cp": plan.cp,
        "schedule": schedule_name(plan.schedule),
        "chunks": plan.chunks,
        "microbatch_size": plan.microbatch_size,
        "num_microbatches": s.num_microbatches,
        "global_batch_size": s.run.global_batch_size,
        "step_time_s": x.step_time_s,
        "samples_per_s": x.samples_per_s,
        "tokens_per_s": x.tokens_per_s,
        "mfu": x.mfu,
        "hfu": x.hfu,
        "bubble_fraction": x.bubble_fraction,
        "work_fraction": sum(x.shares[owner] for owner in WORK),
        "optimizer_fraction": float(b.of("optimizer").sum() / b.window.sum()),
        **{f"{bound}_bound_fraction": x.shares[bound] for bound in WORK},
        "exposed_communication_fraction": sum(exposed.values()),
        **{f"exposed_{kind}_fraction": share for kind, share in exposed.items()},
        "owner": max(x.shares.items(), key=lambda item: item[1])[0],
        "bottleneck": x.bottleneck,
        "device_memory_bytes": x.device_memory_bytes,
        "memory_capacity_bytes": x.memory_capacity_bytes,
    }
    return row | _bill(s, result)


def _bill(s: Scenario, result: Result) -> Row:
    """Return what a step takes, where the scenario asks for it."""
    if s.cost is None:
        return {}
    step, _ = step_bills(result)
    return {
        "step_energy_kwh": step.joules / KWH,
        "step_carbon_kg": step.carbon_kg,
        "step_electricity_usd": step.electricity_usd,
        "step_devices_usd": step.devices_usd,
    }
