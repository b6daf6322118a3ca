"""``trainsim validate torch`` and ``trainsim calibrate``: real torch processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from simulator.cli.options import check_outputs, load, scenario_options, write_json
from simulator.errors import DescriptionError

if TYPE_CHECKING:
    from simulator.describe.scenario import Scenario

DIFFERENT = 3
"""Exit code where the ranks do not train what one process does."""

timeout_option = click.option(
    "--timeout", type=click.FloatRange(min=1), default=60.0, show_default=True, metavar="SECONDS",
    help="End all ranks when none has moved on for so long.",
)  # fmt: skip
device_option = click.option(
    "--device", type=click.Choice(["cpu", "cuda", "cuda-shared"]), default="cpu",
    show_default=True, help="Ranks on CPU cores with gloo, on a GPU each with NCCL, or in turns on "
    "one GPU (not yet run on GPUs).",
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
@click.option(
    "--patience",
    type=click.FloatRange(0, 30),
    default=0.0,
    show_default=True,
    metavar="SECONDS",
    help="Before each step wait so long, at most, until the host does nothing else (Linux).",
)
@click.option("--schedules", metavar="NAME,...", help="Replay under each of these, in one table.")
@click.option(
    "--microbatches", metavar="COUNT,...", help="Replay with each of these numbers of microbatches."
)
@click.option(
    "--also",
    multiple=True,
    metavar="KEY=VALUE,...",
    help="One more replay, of the scenario with these values (repeatable).",
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
    warmup: int, patience: float, schedules: str | None, microbatches: str | None,
    also: tuple[str, ...], device: str, timeout: float, plot: str | None, timeline: str | None,
    machine: str | None, json_path: str | None,
) -> int:  # fmt: skip
    """Replay SCENARIO on real torch processes and compare it with what is predicted.

    Starts a process for each rank, or joins those that torchrun has started. Exits with 3 when the
    ranks do not train what one process does, or wait for each other; of several replays in one
    table, with 1 when one of them failed.
    """
    _check_files(timeline, machine, None if json_path == "-" else json_path, plot=plot)
    if patience and not Path("/proc/stat").is_file():
        raise DescriptionError("--patience: this system does not say how busy it is (/proc/stat)")
    if 2 * patience > timeout:
        raise DescriptionError(
            f"--patience {patience:g}: ranks that wait look as if they hung; give --timeout "
            f"{2 * patience:g} or more"
        )
    options: dict[str, Any] = {
        "visits": visits, "steps": steps, "warmup": warmup, "device": device, "patience": patience,
    }  # fmt: skip
    if schedules or microbatches or also:
        _only_one({"--calibration": calibration, "--plot": plot, "--timeline": timeline})
        plans = _plans(scenario, overrides, schedules, microbatches, also)
        return _table(plans, options, timeout, machine, json_path)
    loaded = load(scenario, overrides)
    from simulator.validate.torch.job import Job
    from simulator.validate.torch.replay import joined, replay, write_document
    from simulator.validate.torch.text import comparison_text

    job = Job.of(loaded, **options)
    where = {
        "calibration": Path(calibration) if calibration else None,
        "timeline": Path(timeline) if timeline else None,
    }
    if "TORCHELASTIC_RUN_ID" in os.environ:
        found = joined(job, **where)
        if found is None:
            return 0  # rank 0 reports
    else:
        with _counting(warmup + 1 + visits * steps) as count:
            found = replay(job, **where, timeout=timeout, progress=count)
    if plot:
        from simulator.validate.torch.plot import overlay

        overlay(found, plot)
    if machine:
        write_document(found.machine, Path(machine))
    if json_path:
        write_json(found.to_dict(), json_path)
    if json_path != "-":
        click.echo(comparison_text(found))
    return DIFFERENT if found.sameness is None or not found.sameness.holds else 0


def _only_one(options: dict[str, str | None]) -> None:
    """Refuse what is for one replay, and ranks that torchrun has started for one plan."""
    if given := [name for name, value in options.items() if value is not None]:
        raise DescriptionError(
            f"{given[0]} is for one replay; leave out --schedules, --microbatches and --also"
        )
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise DescriptionError(
            "torchrun has started ranks for one plan; leave out --schedules, --microbatches and "
            "--also, or start the command without torchrun"
        )


def _plans(
    scenario: str, overrides: tuple[str, ...], schedules: str | None, microbatches: str | None,
    also: tuple[str, ...],
) -> list[Scenario]:  # fmt: skip
    """Return the scenarios of a table, each of them checked."""
    from simulator.describe.loader import load as read
    from simulator.describe.loader import set_all
    from simulator.schedules import schedule_name
    from simulator.validate.torch.table import plans

    names = [schedule_name(name.strip()) for name in (schedules or "").split(",") if name]
    counts = []
    for text in filter(None, (microbatches or "").split(",")):
        if not text.strip().isdecimal() or int(text) < 1:
            raise DescriptionError(f"--microbatches: {text!r} is not a number of microbatches")
        counts.append(int(text))
    further = [set_all(text.split(",")) for text in also]
    own = set_all(overrides)
    return [
        read(scenario, own | more) for more in plans(read(scenario, own), names, counts, further)
    ]


def _table(
    scenarios: list[Scenario], options: dict[str, Any], timeout: float, machine: str | None,
    json_path: str | None,
) -> int:  # fmt: skip
    """Replay scenarios one after the other and print one table."""
    from simulator.errors import TrainsimError
    from simulator.validate.torch.compare import Comparison
    from simulator.validate.torch.job import Job
    from simulator.validate.torch.replay import replay, write_document
    from simulator.validate.torch.table import run_all

    jobs = {id(s): Job.of(s, **options) for s in scenarios}

    def replayed(s: Scenario) -> Comparison | str:
        try:
            return replay(jobs[id(s)], timeout=timeout)
        except DescriptionError:  # as that torch is not there
            raise
        except TrainsimError as error:
            return str(error)

    with _counting(len(scenarios)) as count:
        for table in run_all(scenarios, replayed):
            count(len(table.rows))
            if json_path and json_path != "-":  # what has ended outlives a kill
                write_json(table.to_dict(), json_path)
    found = [row.found for row in table.rows if row.found is not None]
    if machine and found:
        write_document(found[0].machine, Path(machine))
    if json_path == "-":
        write_json(table.to_dict(), json_path)
    else:
        click.echo(table)
    return 1 if table.failed else 0 if table.holds else DIFFERENT


@click.command()
@scenario_options
@click.option(
    "--out",
    metavar="FILE",
    help="Times of the stages, messages and sums (JSON), for validate torch --calibration.",
)
@click.option(
    "--kernels",
    metavar="FILE",
    help="Times of single kernels over their sizes (TOML), for device.calibration.",
)
@device_option
@timeout_option
def calibrate(
    scenario: str, overrides: tuple[str, ...], out: str | None, kernels: str | None, device: str,
    timeout: float,
) -> None:  # fmt: skip
    """Measure the op times of SCENARIO's stages and kernels here, on all its ranks at once."""
    if out is None and kernels is None:
        raise DescriptionError("nothing to write: give --out FILE, or --kernels FILE, or both")
    _check_files(out, kernels)
    loaded = load(scenario, overrides)
    from simulator.validate.torch.job import REPETITIONS, Job
    from simulator.validate.torch.replay import calibrate as measured
    from simulator.validate.torch.replay import write_document, write_text
    from simulator.validate.torch.sizes import points, to_time
    from simulator.validate.torch.text import table_text

    job = Job.of(loaded, device=device)
    wanted = tuple(to_time(loaded)) if kernels else ()
    job = replace(job, kernels=wanted)
    with _counting(REPETITIONS + points(wanted)) as count:
        table, of_device = measured(job, timeout=timeout, progress=count)
    if out:
        write_document(table, Path(out))
    if kernels:
        write_text(of_device, Path(kernels))
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
