"""``trainsim validate torch`` and ``trainsim calibrate``: real torch processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from simulator.cli.options import check_outputs, load, scenario_options, write_json
from simulator.errors import DescriptionError

DIFFERENT = 3
"""Exit code where the ranks do not train what one process does."""

timeout_option = click.option(
    "--timeout", type=click.FloatRange(min=1), default=60.0, show_default=True, metavar="SECONDS",
    help="End all ranks when none has moved on for so long.",
)  # fmt: skip
device_option = click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True,
    help="Ranks on CPU cores with gloo, or on a GPU each with NCCL (not yet run on GPUs).",
)  # fmt: skip


@click.command("torch")
@scenario_options
@click.option(
    "--calibration",
    metavar="FILE",
    help="A table of trainsim calibrate; op times are measured between steps when absent.",
)
@click.option(
    "--visits",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="Times that op times are measured and steps are recorded, by turns.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Recorded steps of a visit.",
)
@click.option(
    "--warmup", type=click.IntRange(min=2), default=3, show_default=True, help="Steps before them."
)
@device_option
@timeout_option
@click.option(
    "--plot", metavar="FILE", help="Draw a predicted step over a measured one (png, svg, pdf)."
)
@click.option("--timeline", metavar="FILE", help="Write when every action began and ended (JSON).")
@click.option("--machine", metavar="FILE", help="Write devices, versions and clocks (JSON).")
@click.option("--json", "json_path", metavar="FILE", help="Write the report as JSON; - for stdout.")
def validate_torch(
    scenario: str, overrides: tuple[str, ...], calibration: str | None, visits: int, steps: int,
    warmup: int, device: str, timeout: float, plot: str | None, timeline: str | None,
    machine: str | None, json_path: str | None,
) -> int:  # fmt: skip
    """Replay SCENARIO on real torch processes and compare it with what is predicted.

    Starts a process for each rank, or joins those that torchrun has started. Exits with 3 when the
    ranks do not train what one process does, or wait for each other.
    """
    _check_files(timeline, machine, None if json_path == "-" else json_path, plot=plot)
    loaded = load(scenario, overrides)
    from simulator.validate.torch.job import Job
    from simulator.validate.torch.replay import joined, replay, write_document
    from simulator.validate.torch.text import comparison_text

    job = Job.of(loaded, visits=visits, steps=steps, warmup=warmup, device=device)
    where = {
        "calibration": Path(calibration) if calibration else None,
        "timeline": Path(timeline) if timeline else None,
    }
    if "TORCHELASTIC_RUN_ID" in os.environ:
        found = joined(job, **where)
        if found is None:
            return 0  # rank 0 reports
    else:
        with _counting(warmup + visits * steps) as count:
            found = replay(job, **where, timeout=timeout, progress=count)
    if plot:
        from simulator.validate.torch.plot import overlay

        # cut
        overlay(found, plot)
    if machine:
        write_document(found.machine, Path(machine))
    if json_path:
        write_json(found.to_dict(), json_path)
    if json_path != "-":
        click.echo(comparison_text(found))
    return DIFFERENT if found.sameness is None or not found.sameness.holds else 0


@click.command()
@scenario_options
@click.option("--out", metavar="FILE", required=True, help="Where the table goes (JSON).")
@device_option
@timeout_option
def calibrate(
    scenario: str, overrides: tuple[str, ...], out: str, device: str, timeout: float
) -> None:
    """Measure the op times of SCENARIO's stages here, on all its ranks at once, as a table."""
    _check_files(out)
    loaded = load(scenario, overrides)
    from simulator.validate.torch.job import REPETITIONS, Job
    from simulator.validate.torch.replay import calibrate as measured
    from simulator.validate.torch.replay import write_document
    from simulator.validate.torch.text import table_text

    job = Job.of(loaded, device=device)
    with _counting(REPETITIONS) as count:
        table = measured(job, timeout=timeout, progress=count)
    write_document(table, Path(out))
    click.echo(table_text(table))


def _check_files(*paths: str | None, plot: str | None = None) -> None:
    """Check before the work that files can be written, and that no two are one."""
    from simulator.files import check_writable

    files = [path for path in (*paths, plot) if path is not None]
    if "" in files:
        raise DescriptionError("an output needs the name of a file")
    if plot is not None:
        from simulator.report.palette import check_path

        check_path(plot)
    for path in files:
        check_writable(Path(path))
    check_outputs(None, None, [Path(path) for path in files])


@contextmanager
def _counting(length: int) -> Iterator[Callable[[int], None]]:
    """Give a function that takes how much is done; a bar on a terminal's stderr, else nothing."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    with click.progressbar(length=length, file=sys.stderr) as bar:
        yield lambda done: bar.update(done - bar.pos)
