"""The command line's ``trainsim import kineto`` and ``chakra``, and ``export``: runs as traces."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from simulator.cli.options import check_outputs, figure_of, load, scenario_options, write_json
from simulator.errors import DescriptionError

if TYPE_CHECKING:
    from simulator.report.result import Result


def _outputs(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command what it may write besides its report."""
    for option in (
        click.option("--plot", "plots", multiple=True, metavar="[NAME=]FILE",
                     help="Draw pipeline (the default) or breakdown (repeatable)."),
        click.option("--html", metavar="FILE",
                     help="Write the report as one page with a timeline (.html)."),
        click.option("--trace", metavar="FILE",
                     help="Write a trace (.pftrace, .json; either .gz)."),
        click.option("--json", "json_path", metavar="FILE",
                     help="Write the report as JSON; - for stdout."),
    ):  # fmt: skip
        command = option(command)
    return command


def _checked(
    json_path: str | None, html: str | None, trace: str | None, plots: tuple[str, ...]
) -> list[tuple[str, Path]]:
    """Return the figures, after checking all outputs before the work."""
    figures = [figure_of(text) for text in plots]
    from simulator.report.measured import FIGURES

    if wrong := [name for name, _ in figures if name not in FIGURES]:
        raise DescriptionError(
            f"--plot {wrong[0]}: a run of traces has the figures {' and '.join(FIGURES)}"
        )
    check_outputs(json_path, trace, [path for _, path in figures], html)
    return figures


def _write(
    result: Result, text: str, document: dict[str, Any], json_path: str | None, html: str | None,
    trace: str | None, figures: list[tuple[str, Path]],
) -> None:  # fmt: skip
    if json_path:
        write_json(document, json_path)
    if json_path != "-":
        click.echo(text)
    if html:
        result.save_html(html)
    if trace:
        result.save_trace(trace)
    for name, path in figures:
        getattr(result.plot, name)(path)


@click.command("kineto")
@click.argument("files", nargs=-1, required=True, metavar="FILES...")
@click.option("--group", "groups", multiple=True, metavar="GROUP=AXIS",
              help="Mesh axis of a process group, as 3=tp (repeatable).")  # fmt: skip
@_outputs
def import_kineto(
    files: tuple[str, ...], groups: tuple[str, ...], json_path: str | None, html: str | None,
    trace: str | None, plots: tuple[str, ...],
) -> None:  # fmt: skip
    """Report a run from its traces of torch.profiler, one of FILES a rank.

    FILES are traces (.json, .json.gz), folders of them, or patterns in quotes. Times, communication
    and bubbles are those of the last step, as for a simulated run.
    """
    figures = _checked(json_path, html, trace, plots)
    for text in groups:
        if "=" not in text[1:]:
            raise DescriptionError(f"--group {text!r}: write GROUP=AXIS, for example 3=tp")
    from simulator.exchange.kineto import read_kineto
    from simulator.report.measured import measured_dict, measured_text, result_of

    measured = read_kineto(files, dict(text.split("=", 1) for text in groups))
    result = result_of(measured)
    _write(result, measured_text(measured, result), measured_dict(measured, result), json_path,
           html, trace, figures)  # fmt: skip


@click.command("chakra")
@click.argument("files", nargs=-1, required=True, metavar="PREFIX|FILES...")
@click.option("--cluster", metavar="SCENARIO",
              help="Price communication, and work without a duration, on its cluster.")  # fmt: skip
@click.option("--precision", default="bf16", show_default=True, metavar="NAME",
              help="Of work that states operations but no duration.")  # fmt: skip
@_outputs
def import_chakra(
    files: tuple[str, ...], cluster: str | None, precision: str, json_path: str | None,
    html: str | None, trace: str | None, plots: tuple[str, ...],
) -> None:  # fmt: skip
    """Run Chakra execution traces, PREFIX.RANK.et of all ranks, and report their step."""
    figures = _checked(json_path, html, trace, plots)
    from simulator.exchange.chakra import read_chakra
    from simulator.report.measured import overlap, run_dict, run_text
    from simulator.report.replayed import replayed

    on = None if cluster is None else load(cluster, ()).cluster
    traces = read_chakra(files, priced=on is not None, precision=precision)
    result = replayed(traces, on)
    over = overlap(result)
    _write(result, run_text(result, over, range(result.tiled.num_ranks)), run_dict(result, over),
           json_path, html, trace, figures)  # fmt: skip


@click.group("export")
def export_group() -> None:
    """Write what SCENARIO does in the form of other programs."""


@export_group.command("chakra")
@scenario_options
@click.argument("prefix", metavar="PREFIX")
def export_chakra(scenario: str, overrides: tuple[str, ...], prefix: str) -> None:
    """Write Chakra execution traces, PREFIX.RANK.et, as ASTRA-sim reads them.

    The ranks of groups go to PREFIX.comm_groups.json. Durations are those of the model of devices,
    each op alone.
    """
    loaded = load(scenario, overrides)
    from simulator.exchange.chakra import write_chakra
    from simulator.hardware import price
    from simulator.hardware.placement import devices
    from simulator.lower import lower

    program = lower(loaded)
    ticks = price(program, loaded.cluster, devices(loaded.plan, loaded.cluster))
    done = write_chakra(program, ticks, Path(prefix))
    click.echo(
        f"{loaded.name}: {done.files} traces of {done.nodes:,} nodes as {prefix}.RANK.et, groups "
        f"in {done.groups}"
    )
    for note in done.notes:
        click.echo(f"note: {note}")
