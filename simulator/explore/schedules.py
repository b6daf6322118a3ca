"""Every schedule on the same work: one scenario, simulated under each that its plan can take.

Model, ranks, microbatches and all else stay; stages follow the schedule. What refuses the plan is
listed with its reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from simulator.api import simulate
from simulator.describe.scenario import Scenario
from simulator.errors import DescriptionError
from simulator.report.breakdown import COMMUNICATION, WORK
from simulator.report.text import SCHEMA_VERSION, table
from simulator.schedules import SCHEDULES, schedule_name
from simulator.units import format_bytes, format_seconds

MEMORY = (1.0, 2.0)
"""Limits under which ZB-auto is run, in 1F1B's most kept: the paper's ZB-1p and ZB-2p."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What one schedule makes of a step. Shares are of the step, averaged over ranks."""

    name: str
    step_time_s: float
    mfu: float
    work: float
    exposed: float
    """Communication that nothing hides, of all kinds."""
    bubble: float
    device_memory_bytes: float
    """In use on the fullest rank."""
    fits: bool
    changes_semantics: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Schedules of one scenario, fastest first, and those that it cannot take."""

    scenario: Scenario
    ran: tuple[Ran, ...]
    refused: tuple[tuple[str, str], ...]
    """Names and reasons."""

    def __str__(self) -> str:
        s = self.scenario
        rows = [["schedule", "step", "MFU", "work", "exposed", "bubble", "device memory"]]
        rows += [
            [
                r.name, format_seconds(r.step_time_s), f"{r.mfu:.1%}", f"{r.work:.1%}",
                f"{r.exposed:.1%}", f"{r.bubble:.1%}",
                format_bytes(r.device_memory_bytes) + ("" if r.fits else " DOES NOT FIT"),
            ]
            for r in self.ran
        ]  # fmt: skip
        lines = [
            f"{s.name}: pp {s.plan.pp}, {s.num_microbatches} microbatches of "
            f"{s.plan.microbatch_size}, each schedule with stages of its own",
            table(rows),
            "shares of the step, mean over ranks; exposed: communication that nothing hides; memory "
            "of the fullest rank",
        ]
        if any(r.changes_semantics for r in self.ran):
            lines.append("PipeDream changes what is computed: its steps are worth something else")
        lines += [f"left out: {name}: {reason}" for name, reason in self.refused]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as plain values; keys carry their units."""
        return {
            "schema_version": SCHEMA_VERSION,
            "scenario": self.scenario.name,
            "schedules": [
                {
                    "schedule": r.name,
                    "step_time_s": r.step_time_s,
                    "mfu": r.mfu,
                    "work_fraction": r.work,
                    "exposed_communication_fraction": r.exposed,
                    "bubble_fraction": r.bubble,
                    "device_memory_bytes": r.device_memory_bytes,
                    "fits": r.fits,
                }
                for r in self.ran
            ],
            "refused": [{"schedule": name, "reason": reason} for name, reason in self.refused],
        }


def compare_schedules(s: Scenario) -> Compared:
    """Return what every schedule makes of a scenario with a pipeline.

    Raises:
        DescriptionError: when there is no pipeline.
    """
    if s.plan.pp == 1:
        raise DescriptionError(f"{s.name}: plan.pp is 1, and schedules are of pipelines; set more")
    ran, refused = [], []
    for name, settings in _plans(s):
        try:
            result = simulate(replace(s, plan=replace(s.plan, **settings)))
        except DescriptionError as error:
            refused.append((name, " ".join(str(error).split())))
            continue
        summary, b = result.summary, result.breakdown
        step = float(b.window.mean())
        note = SCHEDULES[str(settings["schedule"])].note
        ran.append(
            Ran(
                name=name,
                step_time_s=summary.step_time_s,
                mfu=summary.mfu,
                work=float(b.of(*WORK).mean()) / step,
                exposed=float(b.of(*COMMUNICATION).mean()) / step,
                bubble=summary.bubble_fraction,
                device_memory_bytes=summary.device_memory_bytes,
                fits=summary.fits,
                changes_semantics=note.startswith("changes semantics"),
            )
        )
    ran.sort(key=lambda r: r.step_time_s)
    return Compared(scenario=s, ran=tuple(ran), refused=tuple(refused))


def _plans(s: Scenario) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each schedule as it is shown, and what of the plan says so.

    The plan's own keeps what the plan says of it; others have the fewest chunks that they take, and
    a list of layers only where it has as many stages.
    """
    own = schedule_name(s.plan.schedule)
    for name, schedule in SCHEDULES.items():
        if schedule.size is not None:
            continue  # a file of one size
        chunks = s.plan.chunks if name == own else schedule.chunks[0]
        settings: dict[str, Any] = {"schedule": name, "chunks": chunks}
        if s.plan.pp * chunks // schedule.copies != s.plan.num_stages:
            settings["layers_per_stage"] = None
        if "group" not in schedule.takes:
            settings["microbatch_group"] = None
        if "target" not in schedule.takes:
            yield name, settings | {"schedule_times": None, "schedule_memory": None}
            continue
        limits = MEMORY if s.plan.schedule_memory is None else (s.plan.schedule_memory,)
        for limit in limits:
            yield f"{name} {limit:g}x", settings | {"schedule_memory": limit}
