"""A scenario under construction: its tables, why each value is there, and what was refused."""

from __future__ import annotations

import dataclasses
from typing import Any

from simulator.describe.model import Model
from simulator.describe.plan import Plan
from simulator.describe.run import Run
from simulator.exchange.megatron.arguments import Arguments

SECTIONS = {"model": Model, "plan": Plan, "run": Run}
"""Descriptions that tables become."""


class Draft:
    """Tables of a scenario, filled from flags."""

    def __init__(self, args: Arguments) -> None:
        self.args = args
        self.tables: dict[str, dict[str, Any]] = {name: {} for name in ("cluster", *SECTIONS)}
        self.why: dict[str, str] = {}
        """The flags behind each key, as they are given, or Megatron-LM's default."""
        self.mapped: set[str] = set()
        """Flags that are given and became part of the scenario."""
        self.refused: list[str] = []
        self.left_out: list[str] = []
        """What is given and not modelled, and what is taken instead."""

    def put(self, key: str, value: Any, *flags: str) -> None:
        """Set ``section.name``; what a description has by default is said only where a flag is."""
        args, (section, name) = self.args, key.split(".", 1)
        self.mapped.update(flag for flag in flags if args.said(flag))
        cls = SECTIONS.get(section)
        if cls is not None:
            fields = {f.name: f for f in dataclasses.fields(cls)}
            if name not in fields:
                said = [flag for flag in flags if args.said(flag)] or flags[:1]
                shown = ", ".join(map(args.shown, said))
                self.refused.append(f"{shown}: there is no {key} to say it with yet")
                return
            if value == fields[name].default and not args.said(*flags):
                return
        self.tables[section][name] = value
        given = [flag for flag in flags if args.said(flag)] or flags[:1]
        self.why[key] = ", ".join(args.shown(flag) for flag in given)

    def note(self, key: str, why: str) -> None:
        """Say why a key has its value, in words of its own."""
        self.why[key] = why

    def takes(self, *flags: str) -> None:
        """Count flags that are given as mapped, for what they say is what is done anyhow."""
        self.mapped.update(flag for flag in flags if self.args.said(flag))

    def refuse(self, flag: str, why: str) -> None:
        """Refuse what a flag asks for."""
        self.refused.append(f"{self.args.shown(flag)}: {why}")

    def leave_out(self, flag: str, instead: str) -> None:
        """List a flag that is given as not modelled."""
        self.left_out.append(f"{self.args.shown(flag)}: {instead}")
