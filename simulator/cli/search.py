"""``trainsim search``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from simulator.cli.options import OVER_CAPACITY, check_outputs, load, scenario_options, write_json
from simulator.errors import DescriptionError

if TYPE_CHECKING:
    from simulator.describe.scenario import Scenario
    from simulator.explore.batch import Advice
    from simulator.explore.objective import Deadline


@click.command()
@scenario_options
@click.option("--objective", default="time", show_default=True, metavar="NAME",
              help="time, tokens_per_dollar, energy or smallest_cluster.")  # fmt: skip
@click.option("--over", "axes", multiple=True, metavar="AXIS=V,V,...",
              help="Values of an axis in place of its own: plan.tp=4,8 (repeatable).")  # fmt: skip
@click.option("--trials", type=click.IntRange(min=1), default=1000, show_default=True,
              help="Plans that are simulated at most.")  # fmt: skip
@click.option("--sampler", type=click.Choice(["narrow", "optuna", "all"]), default="narrow",
              show_default=True, help="Who chooses them; all: try every plan.")  # fmt: skip
@click.option("--tokens", type=float, help="Tokens to be trained until --deadline.")
@click.option("--deadline", metavar="TIME", help='As "30 days".')
@click.option("--critical-batch", type=float, metavar="TOKENS",
              help="Say which of --batches reaches a loss first (McCandlish et al.).")  # fmt: skip
@click.option("--batches", metavar="N,N,...", help="Global batches for --critical-batch.")
@click.option("--jobs", type=click.IntRange(min=1), help="Processes.  [default: one a core]")
@click.option("--top", type=click.IntRange(min=1), default=8, show_default=True,
              help="Plans that are listed.")  # fmt: skip
@click.option("--json", "json_path", metavar="FILE", help="Write it as JSON; - for stdout.")
@click.option("--plot", metavar="[NAME=]FILE",
              help="Draw memory (the default), or cost, over the time of a step.")  # fmt: skip
def search(
    scenario: str, overrides: tuple[str, ...], axes: tuple[str, ...], top: int,
    tokens: float | None, deadline: str | None, critical_batch: float | None, batches: str | None,
    json_path: str | None, plot: str | None, **how: Any,
) -> int:  # fmt: skip
    """Find the best plans for SCENARIO's model, cluster and batch, and say why others lose.

    The exit code is 3 where no plan fits, or meets the deadline.
    """
    figure = _figure(plot)
    check_outputs(json_path, None, [figure[1]] if figure else [])
    until = _deadline(tokens, deadline)
    sizes = _batches(batches, critical_batch)
    from simulator.explore.search import search as run_search
    from simulator.explore.search_text import found_dict, found_text
    from simulator.explore.space import parse_axis

    over = dict(parse_axis(text) for text in axes)
    loaded = load(scenario, overrides)
    how["budget"] = how.pop("trials")
    with _bar() as watch:
        found = run_search(loaded, over=over, deadline=until, watch=watch, **how)
        advice = None
        if critical_batch is not None:
            advice = _advice(loaded, critical_batch, sizes, dict(over=over, watch=watch, **how))
    if json_path:
        more = {} if advice is None else {"batch_advice": advice.to_dict()}
        write_json(found_dict(found, max(top, 100)) | more, json_path)
    if json_path != "-":
        click.echo(found_text(found, top))
        if advice is not None:
            click.echo(f"\n{advice}")
    if figure:
        from simulator.explore.search_plot import search_figure

        search_figure(found, *figure)
    return 0 if found.best else OVER_CAPACITY


@contextmanager
def _bar() -> Iterator[Callable[[int], None] | None]:
    """Count plans on a terminal's stderr, and say nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    done = 0

    def watch(more: int) -> None:
        nonlocal done
        done += more
        click.echo(f"\r{done:,} plans simulated", nl=False, err=True)

    yield watch
    click.echo("\r" + " " * 32 + "\r", nl=False, err=True)


def _figure(text: str | None) -> tuple[str, Path] | None:
    if text is None:
        return None
    from simulator.report.palette import check_path

    name, equals, path = text.partition("=")
    if not equals:
        name, path = "memory", text
    if name not in ("memory", "cost"):
        raise DescriptionError(f"--plot {text!r}: no figure {name!r}; there are memory, cost")
    check_path(path)
    return name, Path(path)


def _deadline(tokens: float | None, text: str | None) -> Deadline | None:
    if (tokens is None) != (text is None):
        raise DescriptionError("--tokens and --deadline go together; give both")
    if tokens is None or text is None:
        return None
    from simulator.explore.objective import Deadline
    from simulator.units import parse_quantity

    try:
        seconds = parse_quantity(text, "seconds")
    except ValueError as error:
        raise DescriptionError(f"--deadline: {error}") from None
    if tokens <= 0 or seconds <= 0:
        raise DescriptionError("--tokens and --deadline must be above 0")
    return Deadline(tokens=tokens, seconds=seconds)


def _batches(text: str | None, critical: float | None) -> list[int]:
    if (text is None) != (critical is None):
        raise DescriptionError("--critical-batch and --batches go together; give both")
    if critical is not None and critical <= 0:
        raise DescriptionError(f"--critical-batch {critical:g} must be above 0")
    sizes = [] if text is None else text.split(",")
    if not all(word.strip().isdigit() and int(word) > 0 for word in sizes):
        raise DescriptionError(f"--batches {text!r}: write whole numbers, as 256,512,1024")
    return [int(word) for word in sizes]


def _advice(loaded: Scenario, critical: float, sizes: list[int], how: dict[str, Any]) -> Advice:
    """Return what the best plans at several batches say of the time to a loss."""
    from dataclasses import replace

    from simulator.explore.batch import advise
    from simulator.explore.search import search as run_search

    found, left_out = [], []
    for size in sizes:
        try:
            s = replace(loaded, run=replace(loaded.run, global_batch_size=size))
            found.append(run_search(s, **how))
        except DescriptionError as error:
            left_out.append(f"batch {size}: {' '.join(str(error).split())}")
    if not any(one.best for one in found):
        raise DescriptionError("--batches: no plan for any of them: " + "; ".join(left_out))
    return advise(found, critical, left_out)
