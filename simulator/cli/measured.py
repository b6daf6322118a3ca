"""The command line's ``trainsim import kineto``: runs that were measured."""

from __future__ import annotations

import click

from simulator.cli.options import check_outputs, figure_of, write_json
from simulator.errors import DescriptionError


@click.command("kineto")
@click.argument("files", nargs=-1, required=True, metavar="FILES...")
@click.option("--json", "json_path", metavar="FILE", help="Write the report as JSON; - for stdout.")
@click.option(
    "--html", metavar="FILE", help="Write the report as one page with a timeline (.html)."
)
@click.option("--trace", metavar="FILE", help="Write a Perfetto/Chrome trace (.json, .json.gz).")
@click.option("--plot", "plots", multiple=True, metavar="[NAME=]FILE",
              help="Draw pipeline (the default) or breakdown (repeatable).")  # fmt: skip
@click.option("--group", "groups", multiple=True, metavar="GROUP=AXIS",
              help="Mesh axis of a process group, as 3=tp (repeatable).")  # fmt: skip
def import_kineto(
    files: tuple[str, ...], json_path: str | None, html: str | None, trace: str | None,
    plots: tuple[str, ...], groups: tuple[str, ...],
) -> None:  # fmt: skip
    """Report a run from its traces of torch.profiler, one of FILES a rank.

    FILES are traces (.json, .json.gz), folders of them, or patterns in quotes. Times, communication
    and bubbles are those of the last step, as for a simulated run.
    """
    figures = [figure_of(text) for text in plots]
    from simulator.report.measured import FIGURES, measured_dict, measured_text, result_of

    if wrong := [name for name, _ in figures if name not in FIGURES]:
        raise DescriptionError(
            f"--plot {wrong[0]}: a measured run has the figures {' and '.join(FIGURES)}"
        )
    check_outputs(json_path, trace, [path for _, path in figures], html)
    for text in groups:
        if "=" not in text[1:]:
            raise DescriptionError(f"--group {text!r}: write GROUP=AXIS, for example 3=tp")
    from simulator.exchange.kineto import read_kineto

    measured = read_kineto(files, dict(text.split("=", 1) for text in groups))
    result = result_of(measured)
    if json_path:
        write_json(measured_dict(measured, result), json_path)
    if json_path != "-":
        click.echo(measured_text(measured, result))
    if html:
        result.save_html(html)
    if trace:
        result.save_trace(trace)
    for name, path in figures:
        getattr(result.plot, name)(path)
