"""Many replays in one table: a row each, by two clocks kept apart, and the errors of all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from simulator.describe.scenario import Scenario
from simulator.schedules.rows import SCHEDULES
from simulator.units import format_seconds
from simulator.validate.torch.compare import QUIET, Comparison, Figure

COLUMNS = (
    "schedule", "ranks", "m", "measured", "noise", "predicted", "error", "engine error",
    "wall clock", "error", "engine error", "quiet steps", "bubble", "memory",
)  # fmt: skip
"""Of the table; ``wall clock`` and the two after it are by that clock, those before by the rebuilt
one; ``bubble`` is predicted / rebuilt, ``memory`` the worst rank's error at its peak."""


class Row(NamedTuple):
    """One replay."""

    schedule: str
    ranks: str
    """Degrees above 1, as ``pp 2``."""
    microbatches: int
    found: Comparison | None
    failed: str = ""
    """Why there is no comparison."""


class Accuracy(NamedTuple):
    """Errors of some figures, signed ones by their size."""

    figures: int
    engine_mean: float
    engine_worst: float
    mean: float
    worst: float

    @classmethod
    def of(cls, figures: Sequence[Figure]) -> Accuracy | None:
        """Return the errors of figures; None where there are none."""
        if not figures:
            return None
        engine, both = ([abs(getattr(f, n)) for f in figures] for n in ("engine_error", "error"))
        count = len(figures)
        return cls(count, sum(engine) / count, max(engine), sum(both) / count, max(both))


@dataclass(frozen=True)
class Table:
    """Replays of one scenario under several plans."""

    rows: tuple[Row, ...]

    def accuracy(self, clock: str) -> Accuracy | None:
        """Return the errors by a clock, a field of `Comparison`: ``clock`` or ``wall``."""
        found = (getattr(row.found, clock) for row in self.rows if row.found is not None)
        return Accuracy.of([figure for figure in found if figure is not None])

    @property
    def holds(self) -> bool:
        """Whether every replay trained what one process trains."""
        same = (row.found.sameness if row.found is not None else None for row in self.rows)
        return all(one is not None and one.holds for one in same)

    @property
    def failed(self) -> bool:
        """Whether some replay ended before its time."""
        return any(row.failed for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values for JSON."""
        accuracy = {"rebuilt_clock": self.accuracy("clock"), "wall_clock": self.accuracy("wall")}
        return {
            "schema_version": 1,
            "accuracy": {k: None if a is None else a._asdict() for k, a in accuracy.items()},
            "replays": [
                {
                    "schedule": row.schedule, "ranks": row.ranks, "microbatches": row.microbatches,
                    "failed": row.failed or None,
                    "found": None if row.found is None else row.found.to_dict(),
                }
                for row in self.rows
            ],
        }  # fmt: skip

    def __str__(self) -> str:
        lines = [_cells(_row(row)) for row in self.rows]
        head = [_cells(COLUMNS), _cells("---" if n < 2 else "---:" for n in range(len(COLUMNS)))]
        return "\n".join([*head, *lines, "", *self._notes()])

    def _notes(self) -> list[str]:
        lines = [f"{row.schedule}, {row.ranks}, m {row.microbatches}: {row.failed}"
                 for row in self.rows if row.failed]  # fmt: skip
        for clock, name in (("clock", "rebuilt clock"), ("wall", "wall clock of quiet steps")):
            found = self.accuracy(clock)
            if found is None:
                lines.append(f"by the {name}: no figure")
                continue
            lines.append(
                f"by the {name}, {found.figures} figures: op times measured apart mean "
                f"{found.mean:.1%}, worst {found.worst:.1%}; op times of these very steps mean "
                f"{found.engine_mean:.1%}, worst {found.engine_worst:.1%}"
            )
        same = [r.found.sameness for r in self.rows if r.found and r.found.sameness]
        lines.append(
            f"{sum(one.holds for one in same)} of {len(self.rows)} train what one process trains: "
            f"losses differ by at most {max((s.loss for s in same), default=0.0):.1e}, gradients "
            f"by {max((s.gradient for s in same), default=0.0):.1e} of a parameter's largest"
        )
        lines.append(
            "`wall clock` and the two columns after it are by that clock of quiet steps (whose "
            f"computing took at most {QUIET - 1:.0%} longer than it computed), those before by the "
            "rebuilt clock; bubble: predicted / by the rebuilt clock; memory: at its peak, the "
            "worst rank; predicted and error: from op times measured apart, visit by visit"
        )
        return lines


def _cells(texts: Iterable[str]) -> str:
    return "| " + " | ".join(texts) + " |"


def _row(row: Row) -> list[str]:
    texts = [row.schedule, row.ranks, str(row.microbatches)]
    found = row.found
    if found is None or found.clock is None:
        why = "failed" if found is None else "same" if found.sameness else "cut short"
        return [*texts, why, *[""] * (len(COLUMNS) - len(texts) - 1)]
    clock, wall = found.clock, found.wall
    texts += [
        format_seconds(clock.measured), f"{clock.spread:.1%}", format_seconds(clock.calibrated),
        f"{clock.error:+.1%}", f"{clock.engine_error:+.1%}",
    ]  # fmt: skip
    texts += [""] * 3 if wall is None else [
        format_seconds(wall.measured), f"{wall.error:+.1%}", f"{wall.engine_error:+.1%}",
    ]  # fmt: skip
    bubble = found.idle[0]
    memory = max((held.error for held in found.memory), key=abs, default=None)
    return [
        *texts, f"{found.quiet} of {found.steps}", f"{bubble.predicted:.1%} / {bubble.rebuilt:.1%}",
        "" if memory is None else f"{memory:+.1%}",
    ]  # fmt: skip


def plans(
    s: Scenario, schedules: Sequence[str], microbatches: Sequence[int],
    also: Sequence[Mapping[str, object]],
) -> list[dict[str, object]]:  # fmt: skip
    """Return what each replay changes of a scenario, by dotted key.

    Every schedule with every number of microbatches, the scenario's own where a list is empty;
    a schedule of several stages a rank has the scenario's chunks, or the fewest that it takes. Then
    each of `also` by itself.
    """
    out: list[dict[str, object]] = []
    for name in schedules or (s.plan.schedule,):
        fewest, most = SCHEDULES[name].chunks
        own = s.plan.chunks
        chunks = own if own >= fewest and (most is None or own <= most) else fewest
        for m in microbatches or (s.num_microbatches,):
            batch = m * s.plan.microbatch_size * s.plan.dp
            out.append({
                "plan.schedule": name, "plan.chunks": chunks, "run.global_batch_size": batch,
            })  # fmt: skip
    if also and not schedules and not microbatches:
        out = []
    return [*out, *map(dict, also)]


def run_all(
    scenarios: Iterable[Scenario], replayed: Callable[[Scenario], Comparison | str]
) -> Iterator[Table]:
    """Yield the table of replays as it grows, one after the other.

    Args:
        scenarios: what to replay.
        replayed: a replay, or in words how it failed.
    """
    rows: list[Row] = []
    for s in scenarios:
        found = replayed(s)
        degrees = {axis: getattr(s.plan, axis) for axis in ("pp", "dp", "tp")}
        ranks = ", ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1)
        failed = found if isinstance(found, str) else ""
        comparison = None if isinstance(found, str) else found
        name = s.plan.schedule
        rows.append(Row(name, ranks or "pp 1", s.num_microbatches, comparison, failed))
        yield Table(tuple(rows))
