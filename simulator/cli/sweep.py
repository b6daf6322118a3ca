"""``trainsim sweep``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from simulator.cli.options import OVER_CAPACITY, check_outputs, scenario_argument, write_json
from simulator.errors import DescriptionError

if TYPE_CHECKING:
    from simulator.explore.sweep.swept import Swept


@click.command()
@scenario_argument
@click.option("--set", "over", multiple=True, metavar="KEY=V,V,...",
              help="Values of a key, as plan.tp=1,2,4,8 or 1,2,4,...,64; every combination is run "
              "(repeatable).")  # fmt: skip
@click.option("--zip", "together", multiple=True, metavar="KEY=V,V,...",
              help="Values of several keys that go together (repeatable).")  # fmt: skip
@click.option("--rows", metavar="FILE", help="A CSV or TOML table of settings, a row a point.")
@click.option("--devices", metavar="N,N,...", help="Fill nodes with so many devices.")
@click.option("--samples-per-device", metavar="N,N,...",
              help="Samples a step for each device; fixed: the scenario's batch.")  # fmt: skip
@click.option("--out", metavar="FILE",
              help="Write the rows (.parquet, .csv); a journal beside it lets the same command go "
              "on after a kill.")  # fmt: skip
@click.option("--json", "json_path", metavar="FILE", help="Write the rows as JSON; - for stdout.")
@click.option("--plot", "plots", multiple=True, metavar="NAME=FILE",
              help="Draw scaling (over --devices), bubble (over microbatches) or cost (over time) "
              "(repeatable).")  # fmt: skip
@click.option("--tokens", type=click.FloatRange(min=0, min_open=True),
              help="Of a whole run (samples, of images): adds its time and cost.")  # fmt: skip
@click.option("--workers", type=click.IntRange(min=1),
              help="Processes of this machine.  [default: as many as processors]")  # fmt: skip
@click.option("--scheduler", metavar="ADDRESS",
              help="Simulate on workers of this Dask scheduler, as tcp://host:8786.")  # fmt: skip
def sweep(
    scenario: str, over: tuple[str, ...], together: tuple[str, ...], rows: str | None,
    devices: str | None, samples_per_device: str | None, out: str | None, json_path: str | None,
    plots: tuple[str, ...], tokens: float | None, workers: int | None, scheduler: str | None,
) -> int:  # fmt: skip
    """Simulate SCENARIO at every combination of listed values, thousands of them.

    Plans that are refused are rows too, with the reason. dp fills the cluster where other settings
    change how many ranks are left to it.
    """
    figures = [_figure(text) for text in plots]
    outputs = [path for _, path in figures]
    check_outputs(json_path, None, [Path(p) for p in (*outputs, *([out] if out else []))])
    from simulator.explore.sweep.point import DEVICES, SAMPLES
    from simulator.explore.sweep.run import grid_of, run_sweep
    from simulator.explore.sweep.values import parse_values

    lists = _once(parse_values(text) for text in over)
    for key, values in ((DEVICES, devices), (SAMPLES, samples_per_device)):
        if values is not None:
            option = f"--{key.replace('_', '-')}"
            lists |= _once([parse_values(f"{key}={values}", option)])
    grid = grid_of(lists, _once(parse_values(text, "--zip") for text in together), rows)
    drawn = [name for name, _ in figures]
    if "scaling" in drawn:
        if DEVICES not in lists:
            raise DescriptionError("--plot scaling draws over devices; give --devices 1,2,4,...,64")
        from simulator.explore.sweep.scaling_plot import check_lines

        check_lines(len(grid) // len(lists[DEVICES]))
    if "bubble" in drawn:
        from simulator.explore.sweep.bubble_plot import check_bubble

        check_bubble(grid.varied)
    try:
        with _bar(len(grid)) as progress:
            swept = run_sweep(
                scenario, grid, out=Path(out) if out else None, workers=workers,
                scheduler=scheduler, tokens=tokens, progress=progress,
            )  # fmt: skip
    except KeyboardInterrupt:
        if out:
            click.echo(f"the same command goes on from {out}.journal", err=True)
        raise
    text = str(swept)
    if "scaling" in drawn:
        from simulator.explore.sweep.scaling import scaling, scaling_text

        text = "\n".join((swept.headline, scaling_text(scaling(swept)), *swept.notes))
    for name, path in figures:
        _draw(name, swept, path)
    if json_path:
        write_json(swept.to_dict(), json_path)
    if json_path != "-":
        click.echo(text)
    if swept.count("failed"):
        return 1
    return 0 if swept.ran else OVER_CAPACITY


FIGURES = ("scaling", "bubble", "cost")


def _figure(text: str) -> tuple[str, str]:
    """Return the figure and the file of a ``--plot`` value, after checking both."""
    from simulator.report.palette import check_path

    name, equals, path = text.partition("=")
    if not equals or name not in FIGURES:
        known = ", ".join(f"{name}=FILE" for name in FIGURES)
        raise DescriptionError(f"--plot {text!r}: write one of {known}; there is no other figure")
    check_path(path)
    return name, path


def _draw(name: str, swept: Swept, path: str) -> None:
    """Save a figure of a sweep."""
    if name == "scaling":
        from simulator.explore.sweep.scaling import scaling
        from simulator.explore.sweep.scaling_plot import scaling_figure

        scaling_figure(scaling(swept), path)
    elif name == "bubble":
        from simulator.explore.sweep.bubble_plot import bubble_figure

        bubble_figure(swept, path)
    else:
        from simulator.explore.sweep.cost_plot import cost_figure

        cost_figure(swept, path)


def _once(pairs: Iterable[tuple[str, list[object]]]) -> dict[str, list[object]]:
    """Return values by key.

    Raises:
        DescriptionError: when a key is there twice.
    """
    lists: dict[str, list[object]] = {}
    for key, values in pairs:
        if key in lists:
            raise DescriptionError(f"{key!r} is given twice; list all its values once")
        lists[key] = values
    return lists


@contextmanager
def _bar(length: int) -> Iterator[Callable[[int], None]]:
    """Yield what is told of progress: a bar on a terminal's stderr, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    with click.progressbar(length=length, file=sys.stderr, show_pos=True) as bar:
        yield bar.update
