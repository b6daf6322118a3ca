"""A sweep that has run: its rows in the order of its grid, whoever simulated them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from simulator.explore.sweep.frame import to_frame, written
from simulator.explore.sweep.point import reshapes
from simulator.explore.sweep.row import FAILED, OK, REFUSED, Row
from simulator.report.summary import OWNERS
from simulator.report.text import SCHEMA_VERSION, table
from simulator.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    import pandas as pd

MOST_SHOWN = 60
"""Rows that the text lists."""

MOST_REASONS = 10
"""Reasons of rows without numbers that it lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """What every point of a sweep came to."""

    name: str
    keys: tuple[str, ...]
    """What points set."""
    varied: tuple[str, ...]
    """Of them, those in which points differ."""
    rows: tuple[Row, ...]
    """Settings and results, a row a point."""
    simulated: int
    """Rows that were simulated just now; the others were there, or are those of equal scenarios."""

    def count(self, status: str) -> int:
        """Return how many rows have a status."""
        return sum(row["status"] == status for row in self.rows)

    @property
    def ran(self) -> tuple[Row, ...]:
        """Rows that have numbers."""
        return tuple(row for row in self.rows if row["status"] == OK)

    def to_frame(self) -> pd.DataFrame:
        """Return one line for each point."""
        return to_frame(self.keys, self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Return the rows as plain values; keys carry their units."""
        return {
            "schema_version": SCHEMA_VERSION,
            "scenario": self.name,
            "settings": list(self.keys),
            "rows": list(self.rows),
        }

    def __str__(self) -> str:
        lines = [self.headline]
        if self.ran:
            lines += ["", *self._table()]
        return "\n".join([*lines, *self.reasons, "", *self.notes])

    @property
    def notes(self) -> list[str]:
        """What was assumed of every point that its row does not say."""
        filled = "dp fills the cluster; " if reshapes(self.keys) else ""
        return [
            f'note: {filled}run.detail is "stage" unless set; all else that is assumed of a point '
            "is what trainsim run lists for it"
        ]

    @property
    def headline(self) -> str:
        """How many points came to what."""
        counts = [f"{self.count(OK)} simulated"]
        for status, word in ((REFUSED, "refused"), (FAILED, "failed")):
            counts += [f"{self.count(status)} {word}"] if self.count(status) else []
        small = sum(not row["fits"] for row in self.ran)
        counts += [f"{small} do not fit in memory"] if small else []
        return f"{self.name}: {len(self.rows)} points, {', '.join(counts)}"

    def _table(self) -> list[str]:
        """Return the rows that ran, the fastest of them where there are many."""
        shown: Sequence[Row] = self.ran
        note = []
        if len(shown) > MOST_SHOWN:
            fastest = sorted(shown, key=lambda row: -row["tokens_per_s"])[:MOST_SHOWN]
            note = [f"the {MOST_SHOWN} with most tokens a second; --out writes all"]
            shown = fastest
        paid = any("run_devices_usd" in row for row in shown)
        head = [*self.varied, "step", "tokens/s", "MFU", "exposed", "bubble", "memory",
                *(["run", "devices"] if paid else []), "most of the step"]  # fmt: skip
        rows = [head] + [
            [
                *(written(row.get(key, "-")) for key in self.varied),
                format_seconds(row["step_time_s"]),
                f"{row['tokens_per_s']:,.0f}",
                f"{row['mfu']:.1%}",
                f"{row['exposed_communication_fraction']:.1%}",
                f"{row['bubble_fraction']:.1%}",
                format_bytes(row["device_memory_bytes"]) + ("" if row["fits"] else " TOO MUCH"),
                *(_run_cells(row) if paid else []),
                OWNERS[row["owner"]],
            ]
            for row in shown
        ]  # fmt: skip
        return [table(rows), *note]

    @property
    def reasons(self) -> list[str]:
        """Why rows have no numbers, each reason once, the most frequent first."""
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            if row["status"] != OK:
                found.setdefault(f"{row['status']}: {row['reason']}", []).append(row)
        lines = []
        for reason, rows in sorted(found.items(), key=lambda item: -len(item[1]))[:MOST_REASONS]:
            where = ", ".join(f"{key}={written(rows[0].get(key, '-'))}" for key in self.varied)
            lines.append(f"{where if len(rows) == 1 else f'{len(rows)} x'} {reason}")
        more = len(found) - len(lines)
        lines += [f"and {more} more reasons; --out writes all"] if more > 0 else []
        return ["", *lines] if lines else []


def _run_cells(row: Row) -> list[str]:
    usd = row.get("run_devices_usd")
    return [f"{row['run_time_s'] / 86400:.3g} d", "-" if usd is None else f"${format_count(usd)}"]
