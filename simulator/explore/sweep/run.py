"""Running a sweep: from a base and a grid to rows, on any workers, over any number of kills."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from simulator.describe.loader import read_table
from simulator.describe.scenario import Scenario
from simulator.errors import DescriptionError
from simulator.explore.sweep.frame import RUN_COLUMNS, SUFFIXES, save
from simulator.explore.sweep.grid import Grid, Settings, axis, read_rows, zipped
from simulator.explore.sweep.journal import SUFFIX, Journal
from simulator.explore.sweep.point import point, resolver
from simulator.explore.sweep.pools import Task
from simulator.explore.sweep.row import OK, Row, refused
from simulator.explore.sweep.swept import Swept
from simulator.explore.sweep.values import Listed
from simulator.explore.sweep.workers import alone, simulate_all
from simulator.files import check_writable

if TYPE_CHECKING:
    import pandas as pd


def run_sweep(
    base: str | Path | Scenario,
    grid: Grid,
    *,
    out: Path | None = None,
    workers: int | None = None,
    scheduler: str | None = None,
    tokens: float | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Swept:
    """Simulate every point of a grid; equal scenarios once.

    Args:
        base: scenario, or its file or name, over which settings are laid.
        grid: the settings.
        out: Parquet or CSV file for the rows; beside it lies a journal, from which the same sweep
            goes on, and a larger one too.
        workers: processes of this machine; None for as many as pay.
        scheduler: address of a Dask scheduler whose workers simulate instead.
        tokens: of a whole run (samples, of images), for its time and cost.
        progress: is told of points as they are done, how many more.

    Raises:
        DescriptionError: when the base or the output cannot be used, or no worker is there.
        TrainsimError: when workers have gone; what is done is in the journal.
    """
    if workers is not None and (type(workers) is not int or workers < 1):
        raise DescriptionError(f"workers {workers!r} must be a whole number and at least 1")
    if workers is not None and scheduler is not None:
        raise DescriptionError("workers are processes of this machine; a scheduler has its own")
    if tokens is not None and not tokens > 0:
        raise DescriptionError(f"tokens {tokens!r} must be above 0")
    if out is not None:
        check_writable(out, SUFFIXES)
    resolve = resolver(base)
    if not len(grid):
        raise DescriptionError("a sweep needs a point: give lists of values")
    beside = None if out is None else Path(f"{out}{SUFFIX}")
    opened: AbstractContextManager[Journal | None] = Journal(beside) if beside else nullcontext()
    with opened as journal:
        rows: dict[str, Row] = {} if journal is None else dict(journal.rows)
        places: list[tuple[Settings, str, Row]] = []
        mine: list[Task] = []
        asked: set[str] = set()

        def tasks() -> Iterator[Task]:
            """Yield each scenario that nobody has simulated yet."""
            for settings in grid:
                found = point(resolve, settings)
                if found.scenario is None:
                    places.append((settings, "", refused(found)))
                    progress(1)
                    continue
                key = found.key
                places.append((settings, key, {}))
                if key in rows or key in asked:
                    progress(1)
                    continue
                asked.add(key)
                if found.is_local:
                    mine.append((key, found.scenario))
                    continue
                yield key, found.scenario

        for where in (simulate_all(tasks(), len(grid), workers, scheduler), alone(iter(mine))):
            for records in where:
                if journal is not None:
                    journal.add(records)
                rows.update((record.key, record.row) for record in records)
                progress(len(records))
        swept = Swept(
            name=_name(base, grid), keys=grid.keys, varied=grid.varied, simulated=len(asked),
            rows=tuple(
                settings | _whole(row or rows[key], tokens) for settings, key, row in places
            ),
        )  # fmt: skip
        if out is not None:
            save(swept.to_frame(), out)
    return swept


def sweep(
    scenario: str | Path | Scenario,
    over: Mapping[str, Listed] | None = None,
    *,
    together: Mapping[str, Listed] | None = None,
    rows: str | Path | None = None,
    out: str | Path | None = None,
    workers: int | None = None,
    scheduler: str | None = None,
    tokens: float | None = None,
) -> pd.DataFrame:
    """Simulate every combination of some values and return a line for each.

    Where other settings change how many ranks are left to dp, dp fills the cluster, unless it is
    set too. What the scenario refuses is a line with the reason.

    >>> import simulator as sim
    >>> frame = sim.sweep("gpt2-xl-1f1b-32gpu", {"plan.pp": [1, 2, 4, ..., 8, 5]})
    >>> frame[["plan.pp", "dp", "status"]].values.tolist()
    [[1, 32, 'ok'], [2, 16, 'ok'], [4, 8, 'ok'], [8, 4, 'ok'], [5, <NA>, 'refused']]

    Args:
        scenario: a scenario, or its file or name.
        over: values by dotted key, as ``{"plan.tp": [1, 2, 4, ..., 64]}``. Two keys are no
            scenario's: ``devices`` fills nodes, ``samples_per_device`` scales the global batch
            with the devices, or leaves it alone where it is ``"fixed"``.
        together: the same, but the first values of all go together, then the second.
        rows: a CSV or TOML file of settings that go together.
        out: Parquet or CSV file to write too. A journal beside it keeps what is done, so that the
            same call, or one with more points, goes on after whatever ended the last one.
        workers: processes of this machine; as many as it has processors when absent.
        scheduler: address of a Dask scheduler, as ``tcp://host:8786``, in place of processes.
        tokens: of a whole run (samples, of images), for its time and cost.

    Raises:
        DescriptionError: when an argument is wrong.
        TrainsimError: when workers have gone.
    """
    grid = grid_of(over or {}, together or {}, rows)
    return run_sweep(
        scenario, grid, out=None if out is None else Path(out), workers=workers,
        scheduler=scheduler, tokens=tokens,
    ).to_frame()  # fmt: skip


def grid_of(
    over: Mapping[str, Listed], together: Mapping[str, Listed], rows: str | Path | None
) -> Grid:
    """Return the grid of listed rows, of values that go together, and of all other values.

    Raises:
        DescriptionError: when lists cannot be filled, are not equally long or name a key twice.
    """
    axes = [] if rows is None else [read_rows(Path(rows))]
    axes += [zipped(together)] if together else []
    return Grid((*axes, *(axis(key, values) for key, values in over.items())))


def _name(base: str | Path | Scenario, grid: Grid) -> str:
    """Return what a sweep is called: as its base, or as all its points are."""
    if "name" in grid.keys and "name" not in grid.varied:
        return str(next(iter(grid))["name"])
    if isinstance(base, Scenario):
        return base.name
    table, path = read_table(base)
    return str(table.get("name", path.stem))


def _whole(row: Row, tokens: float | None) -> Row:
    """Return a row with what a run of so many tokens takes."""
    if tokens is None or row["status"] != OK:
        return row
    steps = tokens / (row["tokens_per_s"] * row["step_time_s"])
    run = {"run_time_s": row["step_time_s"] * steps}
    for column in RUN_COLUMNS[1:]:
        value = row.get(column.replace("run_", "step_"))
        run[column] = None if value is None else value * steps
    return row | run
