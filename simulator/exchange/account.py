"""A scenario that was read from another program's file, with an account of what became of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from simulator.describe.scenario import Scenario
from simulator.exchange.toml_text import toml_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A scenario, and what became of each flag or key."""

    scenario: Scenario
    tables: Mapping[str, Any]
    """Of the scenario's file."""
    why: Mapping[str, str]
    """What is behind each dotted key of it."""
    mapped: tuple[str, ...]
    """What became part of the scenario, as it is given."""
    without_effect: Mapping[str, tuple[str, ...]]
    """What moves nothing that is simulated, by group."""
    not_modelled: tuple[str, ...]
    """Sentences: what would move something, and what is taken instead."""
    unknown: tuple[str, ...]
    """What the other program is not known to have, each with what is near."""
    notes: tuple[str, ...]
    """What was taken for granted, and what could not be followed."""

    def toml(self) -> str:
        """Return the scenario's file; comments say where each value is from."""
        return toml_text(self.tables, self.why, self.report(mapped=False).splitlines())

    def report(self, *, mapped: bool = True) -> str:
        """Return the account; what is mapped on demand."""
        groups = [f"  {g}: {', '.join(names)}" for g, names in self.without_effect.items()]
        parts = (
            ("mapped", [f"  {flag}" for flag in self.mapped if mapped]),
            ("not modelled, and what is taken instead", [f"  {s}" for s in self.not_modelled]),
            ("unknown, not read", [f"  {flag}" for flag in self.unknown]),
            ("without effect on what is simulated", groups),
            ("notes", [f"  {note}" for note in self.notes]),
        )
        lines = [self.scenario.name]
        for title, found in parts:
            lines += [title, *found] if found else []
        return "\n".join(lines)
