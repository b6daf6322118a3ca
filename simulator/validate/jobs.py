"""Published sources re-run by several processes at once: rows know nothing of each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
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
    rows: tuple[int, ...]
    """Their indices."""


def rerun_all(
    sources: Sequence[Source], jobs: int | None = None, watch: Watch = lambda found, _: found
) -> list[Report]:
    """Re-run every row of some sources.

    Args:
        sources: what is re-run.
        jobs: processes, this one alone for 1; as many as there are processors when absent.
        watch: sees each task end.
    """
    tasks = [task for source in sources for task in _dealt(source)]
    found: dict[str, dict[int, Outcome | Unexpressed]] = {source.name: {} for source in sources}
    parts = mapped(_run, tasks, jobs or cores())
    for task, part in zip(tasks, watch(parts, len(tasks)), strict=True):
        found[task.source].update(zip(task.rows, part, strict=True))
    return [report_of(s, [one for _, one in sorted(found[s.name].items())]) for s in sources]


def _dealt(source: Source) -> list[Task]:
    """Return the tasks of a source; rows that may describe the same run are in one of them."""
    rows = source.rows()
    groups: dict[tuple[str, ...], list[int]] = {}
    for i, row in enumerate(rows):
        key = tuple(row[name] for name in source.together) or (str(i),)
        groups.setdefault(key, []).append(i)
    every, dealt = -(-len(rows) // ROWS), [*groups.values()]
    hands = [tuple(chain.from_iterable(dealt[first::every])) for first in range(every)]
    return [Task(source.name, hand) for hand in hands if hand]


def _run(task: Task) -> Found:
    (source,) = named((task.source,))
    rows = source.rows()
    return [rerun_row(source, rows[i]) for i in task.rows]
