"""What verbs share: their scenario, their figures, where they write."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from simulator.errors import DescriptionError

if TYPE_CHECKING:
    from simulator.describe.scenario import Scenario

T = TypeVar("T")

OVER_CAPACITY = 3
"""Exit code where the answer is no."""

scenario_argument = click.argument("scenario", metavar="SCENARIO")
set_option = click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE",
    help="Override a value of the scenario, as plan.tp=4 (repeatable).",
)  # fmt: skip


jobs_option = click.option(
    "--jobs", type=click.IntRange(min=1), metavar="COUNT",
    help="Processes that share samples; the output is the same.  [default: one a core for many]",
)  # fmt: skip


def scenario_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the scenario argument and ``--set``."""
    return scenario_argument(set_option(command))


def progress(items: Iterable[T], length: int) -> Iterator[T]:
    """Go through items with a bar on a terminal's stderr, and without a word elsewhere."""
    if not sys.stderr.isatty():
        yield from items
        return
    with click.progressbar(items, length, file=sys.stderr) as bar:
        yield from bar


def load(scenario: str, overrides: tuple[str, ...]) -> Scenario:
    """Return a scenario with its overrides, its stages cut."""
    from simulator.describe.loader import load as read
    from simulator.describe.loader import set_all

    loaded = read(scenario, set_all(overrides))
    if loaded.plan.stage_cut == "uniform":
        return loaded
    from simulator.cuts import resolved

    return resolved(loaded)


NO_JITTER = (
    "the scenario has no [jitter] table, which says what disturbs its step; give it one, as by "
    "--set jitter.op_cv=0.05"
)


def figure_of(text: str, more: tuple[str, ...] = ()) -> tuple[str, Path]:
    """Return the figure and the file of a ``--plot`` value, after checking both.

    `more` are figures that a command has beside those of every result.
    """
    from simulator.report.palette import check_path
    from simulator.report.plots import FIGURES

    name, equals, path = text.partition("=")
    if not equals:
        name, path = "pipeline", text
    known = (*FIGURES, *more)
    if name not in known:
        raise DescriptionError(f"--plot {text!r}: no figure {name!r}; there are {', '.join(known)}")
    check_path(path)
    return name, Path(path)


def check_figures(names: list[str], loaded: Scenario) -> None:
    """Check before the work that a scenario has what its figures show."""
    if "links" in names and loaded.run.network != "fluid":
        from simulator.report.network_plots import NOT_SHARED

        raise DescriptionError(NOT_SHARED)
    if "jitter" in names and loaded.jitter is None:
        raise DescriptionError(f"--plot jitter=FILE shows samples; {NO_JITTER}")
    if "loader" in names and loaded.data is None:
        from simulator.report.loader_plot import NO_DATA

        raise DescriptionError(NO_DATA)


def check_outputs(
    json_path: str | None, trace: str | None, figures: list[Path], html: str | None = None
) -> None:
    """Check all outputs before the work; no two may be the same file."""
    from simulator.files import check_writable

    files = [p for p in (json_path, trace, html) if p not in (None, "-")]
    if "" in files:
        raise DescriptionError("--json, --html and --trace need the name of a file")
    if json_path and json_path != "-":
        check_writable(Path(json_path))
    if trace:
        from simulator.report.trace import SUFFIXES

        check_writable(Path(trace), SUFFIXES)
    if html:
        from simulator.report.html.page import SUFFIXES as PAGES

        check_writable(Path(html), PAGES)
    every = [os.path.realpath(p) for p in (json_path, trace, html, *figures) if p and p != "-"]
    if len(set(every)) < len(every):
        raise DescriptionError("two outputs have the same name; give each its own")


def check_report(json_path: str | None, plot: str | None, html: str | None = None) -> None:
    """Check before the work what a verb of one document, one figure and one page writes."""
    if plot is not None:
        from simulator.report.palette import check_path

        check_path(plot)
    check_outputs(json_path, None, [Path(plot)] if plot else [], html)


def write_json(document: dict[str, Any], target: str) -> None:
    """Write a document as JSON to a file, or to stdout for ``-``."""
    import json

    text = json.dumps(document, indent=2) + "\n"
    if target == "-":
        click.echo(text, nl=False)
        return
    from simulator.files import write_whole

    write_whole(Path(target), lambda path: _write_text(path, text))


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
