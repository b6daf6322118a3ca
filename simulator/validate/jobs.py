"""Published sources re-run by several processes at once: rows know nothing of each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

from simulator.pool import cores, mapped
from simulator.validate.published import Outcome, Report, Source, Unexpressed, report_of, rerun_row
from simulator.validate.sources import named

Found: TypeAlias = list[Outcome | Unexpressed]
Watch: TypeAlias = Callable[[Iterable[Found], int], Iterable[Found]]
"""Passes on what an iterable of some length yields, and may tell how far it is."""

ROWS = 12
"""Rows of a task, about; large ones lie next to each other in files, so they are dealt out."""


class Task(NamedTuple):
    """Some of the rows of a source."""

    source: str
    first: int
    """Index of the first one."""
    every: int
    """How many there are from one to the next."""


def rerun_all(
    sources: Sequence[Source], jobs: int | None = None, watch: Watch = lambda found, _: found
) -> list[Report]:
    """Re-run every row of some sources.

    Args:
        sources: what is re-run.
        jobs: processes, this one alone for 1; as many as there are processors when absent.
        watch: sees each task end.
    """
    counts = {source.name: len(source.rows()) for source in sources}
    tasks = [
        Task(name, first, -(-count // ROWS))
        for name, count in counts.items()
        for first in range(-(-count // ROWS))
    ]
    found: dict[str, Found] = {name: [Unexpressed("", "")] * n for name, n in counts.items()}
    parts = mapped(_run, tasks, jobs or cores())
    for task, part in zip(tasks, watch(parts, len(tasks)), strict=True):
        found[task.source][task.first :: task.every] = part
    return [report_of(source, found[source.name]) for source in sources]


def _run(task: Task) -> Found:
    (source,) = named((task.source,))
    return [rerun_row(source, row) for row in source.rows()[task.first :: task.every]]
