"""``trainsim validate``: predictions beside measurements."""

from __future__ import annotations

import click

from simulator.cli.options import OVER_CAPACITY, check_report, progress, write_json
from simulator.cli.ranks import validate_torch


@click.group()
def validate() -> None:
    """Compare predictions with measurements, published or made here."""


validate.add_command(validate_torch)


@validate.command("collectives")
def validate_collectives() -> None:
    """Print every measured collective beside its prediction, and the accuracy of each half."""
    from simulator.report.collectives import cases, validation_text

    click.echo(validation_text(cases()))


@validate.command("kernels")
@click.option("--system", "names", multiple=True, metavar="NAME",
              help="Only this system (repeatable); all when absent.")  # fmt: skip
@click.option("--json", "json_path", metavar="FILE", help="Write the rows as JSON; - for stdout.")
def validate_kernels(names: tuple[str, ...], json_path: str | None) -> None:
    """Print every measured kernel beside its prediction, and the accuracy of each half."""
    check_report(json_path, None)
    from simulator.validate.kernels import cases, document, kernels_text

    found = cases(names)
    if json_path:
        write_json(document(found), json_path)
    if json_path != "-":
        click.echo(kernels_text(found))


@validate.command("published")
@click.option("--source", "names", multiple=True, metavar="NAME",
              help="Only this source (repeatable); all when absent.")  # fmt: skip
@click.option("--json", "json_path", metavar="FILE", help="Write the rows as JSON; - for stdout.")
@click.option("--figure", metavar="FILE", help="Draw predicted against measured.")
@click.option("--max-error", type=click.FloatRange(min=0), metavar="PERCENT",
              help="Exit with 3 when a source's mean |error| is above it.")  # fmt: skip
@click.option("--jobs", type=click.IntRange(min=1), metavar="COUNT",
              help="Processes; as many as processors when absent.")  # fmt: skip
def validate_published(
    names: tuple[str, ...], json_path: str | None, figure: str | None, max_error: float | None,
    jobs: int | None,
) -> int:  # fmt: skip
    """Re-run every published step time and memory, and print how far off each prediction is."""
    check_report(json_path, figure)
    from simulator.validate.jobs import rerun_all
    from simulator.validate.published import document
    from simulator.validate.sources import named
    from simulator.validate.text import published_text

    reports = rerun_all(named(names), jobs, progress)
    if json_path:
        write_json(document(reports), json_path)
    if json_path != "-":
        click.echo(published_text(reports))
    if figure:
        from simulator.validate.scatter import published_figure

        published_figure(reports, figure)
    found = [r.accuracy.mean for r in reports if r.accuracy]
    beyond = max_error is not None and not all(100 * mean <= max_error for mean in found)
    return OVER_CAPACITY if beyond else 0
