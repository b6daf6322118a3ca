"""The command line: ``trainsim run|operate|check|show|import|validate``.

Results go to stdout, everything else to stderr. Exit codes: 0 done, 1 failed while running, 2 wrong
input, 3 the answer is no (does not fit, deadlock), 130 interrupted. Heavy modules load when a
command needs them, so that ``--help`` is quick.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import click

from simulator.cli_import import import_group
from simulator.errors import DescriptionError, TrainsimError

if TYPE_CHECKING:
    from simulator.describe.scenario import Scenario
    from simulator.explore.remedies import Remedies
    from simulator.report.result import Result

T = TypeVar("T")

OVER_CAPACITY = 3

MOST_LISTED = 2_000_000
"""Ops that `show program` lists."""

scenario_argument = click.argument("scenario", metavar="SCENARIO")
set_option = click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE",
    help="Override a value of the scenario, as plan.tp=4 (repeatable).",
)  # fmt: skip


def scenario_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the scenario argument and ``--set``."""
    return scenario_argument(set_option(command))


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="trainsim", prog_name="trainsim")
def cli() -> None:
    """Simulate distributed deep-learning training before you rent the cluster.

    SCENARIO is a TOML file, or the name of one in the catalogue (trainsim show catalog).
    """


cli.add_command(import_group)


@cli.command()
@scenario_options
@click.option("--json", "json_path", metavar="FILE", help="Write the report as JSON; - for stdout.")
@click.option("--trace", metavar="FILE", help="Write a Perfetto/Chrome trace (.json, .json.gz).")
@click.option(
    "--plot",
    "plots",
    multiple=True,
    metavar="[NAME=]FILE",
    help="Draw pipeline (the default), breakdown, memory, links or topology (repeatable).",
)
@click.option(
    "--trace-ranks",
    default="some",
    show_default=True,
    metavar="all|some|R,R,...",
    help="Ranks of the trace; some: one of each stage of more than 64 ranks.",
)
@click.option("--no-fold", is_flag=True, help="Run every rank, also those that run alike.")
@click.option("--engine", type=click.Choice(["compiled", "events", "reference"]),
              default="compiled", show_default=True, help="All give the same times.")  # fmt: skip
def run(
    scenario: str, overrides: tuple[str, ...], json_path: str | None, trace: str | None,
    plots: tuple[str, ...], trace_ranks: str, no_fold: bool, engine: str,
) -> int:  # fmt: skip
    """Simulate SCENARIO and report step time, memory and the bottleneck.

    Where it does not fit, the nearest changes that do are listed too, and the exit code is 3.
    """
    figures = [_figure(text) for text in plots]
    _check_outputs(json_path, trace, [path for _, path in figures])
    if trace is None and trace_ranks != "some":
        raise DescriptionError("--trace-ranks says which ranks --trace shows; give --trace too")
    loaded = _load(scenario, overrides)
    ranks = _ranks(trace_ranks, loaded.cluster.world_size)
    _check_figures([name for name, _ in figures], loaded)
    from simulator.api import simulate

    result = simulate(loaded, engine=engine, folded=not no_fold)
    from simulator.explore.remedies import find_remedies

    remedies = find_remedies(result)
    if json_path:
        _write_json(result.to_dict() | _remedies_dict(remedies) | _cost_dict(result), json_path)
    if json_path != "-":
        click.echo(f"{result}{_remedies_text(remedies)}{_cost_text(result)}")
    if trace:
        result.save_trace(trace, ranks)
    for name, path in figures:
        getattr(result.plot, name)(path)
    return 0 if result.summary.fits else OVER_CAPACITY


@cli.command()
@scenario_options
@click.option("--days", type=click.FloatRange(min=0, min_open=True),
              help="How long it runs, in place of operations.days.")  # fmt: skip
@click.option("--seeds", type=click.IntRange(min=1), default=1000, show_default=True,
              help="Samples, from operations.seed on.")  # fmt: skip
@click.option("--intervals", is_flag=True, help="Find the best checkpoint interval too.")
@click.option("--json", "json_path", metavar="FILE", help="Write the report as JSON; - for stdout.")
@click.option("--plot", metavar="FILE", help="Draw where the time goes.")
@click.option("--engine", type=click.Choice(["compiled", "reference"]), default="compiled",
              show_default=True, help="Both give the same numbers.")  # fmt: skip
def operate(
    scenario: str, overrides: tuple[str, ...], days: float | None, seeds: int, intervals: bool,
    json_path: str | None, plot: str | None, engine: Literal["compiled", "reference"],
) -> None:  # fmt: skip
    """Run SCENARIO for days: failures, recovery, checkpoints, goodput, energy and money."""
    if plot is not None:
        from simulator.report.palette import check_path

        check_path(plot)
    _check_outputs(json_path, None, [Path(plot)] if plot else [])
    loaded = _load(scenario, overrides)
    from simulator.operate import operate as run_operations
    from simulator.operate.text import operated_dict, operated_text

    operated = run_operations(loaded, days=days, seeds=seeds, engine=engine)
    best = None
    if intervals:
        from simulator.operate.best import best_interval

        best = best_interval(operated)
    if json_path:
        _write_json(operated_dict(operated, best), json_path)
    if json_path != "-":
        click.echo(operated_text(operated, best))
    if plot:
        from simulator.operate.plot import goodput_figure

        goodput_figure(operated, plot, best)


@cli.command()
@scenario_options
def check(scenario: str, overrides: tuple[str, ...]) -> None:
    """Check SCENARIO and its program without running it."""
    loaded = _load(scenario, overrides)
    from simulator.lower import lower

    program = lower(loaded)
    click.echo(
        f"{loaded.name}: ok, {program.num_ranks} ranks, {len(program):,} ops, "
        f"{len(program.joint_group):,} of them joint"
    )


@cli.group()
def show() -> None:
    """Print a schedule, a collective, a program, a topology, ranks, memory or the catalogue."""


@show.command("schedule")
@click.argument("name", required=False, metavar="[NAME|FILE.csv]")
@click.option("--stages", type=int, help="Pipeline stages; with chunks, ranks.  [default: 4]")
@click.option("--chunks", type=int,
              help="Stages of each rank, which share its F and B.  [default: fewest]")  # fmt: skip
@click.option("--microbatches", type=int, help="Pipeline inputs.  [default: 8]")
@click.option("--group", type=int, metavar="COUNT",
              help="Microbatches of a round, of Interleaved1F1B.")  # fmt: skip
@click.option("--forward", type=float, default=1.0, show_default=True, help="Seconds of one F.")
@click.option("--backward", type=float, default=2.0, show_default=True, help="Seconds of one B.")
@click.option("--input-grad", type=float, help="Of them, seconds of I.  [default: half]")
@click.option("--pair", type=float, help="Seconds of an F and a B together.  [default: of both]")
@click.option("--latency", type=float, default=0.0, show_default=True, help="Seconds of a message.")
@click.option("--memory", type=float, metavar="SHARE",
              help="Most kept by a rank of ZB-auto, in 1F1B's most.  [default: 1]")  # fmt: skip
@click.option("--csv", "csv_path", metavar="FILE", help="Write it as torch's schedule CSV.")
@click.option("--comms", is_flag=True, help="With sends and receives in the CSV, as torch's.")
@click.option("--plot", metavar="[NAME=]FILE", help="Draw it.")
def show_schedule(
    name: str | None, stages: int | None, chunks: int | None, microbatches: int | None,
    group: int | None, memory: float | None, csv_path: str | None, comms: bool,
    plot: str | None, **times: Any,
) -> None:  # fmt: skip
    """Print a schedule over time: a registered one, or that of a CSV file of torch's.

    Without NAME list the schedules.
    """
    figure = _figure(plot) if plot else None
    if comms and not csv_path:
        raise DescriptionError("--comms says what --csv writes; give --csv too")
    from simulator import schedules
    from simulator.report.closed_forms import forms_text, schedules_text

    if name is None:
        if figure or csv_path:
            option = "--plot draws" if figure else "--csv writes"
            raise DescriptionError(f"{option} a schedule; give its NAME")
        click.echo(schedules_text())
        return
    _check_outputs(None, None, [Path(csv_path)] if csv_path else [])
    known = schedules.schedule_of(name)
    size = known.size or (4, 8)
    stages = size[0] if stages is None else stages
    microbatches = size[1] if microbatches is None else microbatches
    from simulator.api import simulate_schedule

    result = simulate_schedule(
        name, stages=stages, microbatches=microbatches, chunks=chunks, microbatch_group=group,
        memory=memory, **times,
    )  # fmt: skip
    forms = forms_text(result, name, (stages, microbatches, chunks), times) if not group else ""
    click.echo(f"{result}{forms}")
    if csv_path:
        actions = result.actions
        assert actions is not None  # of a bare schedule
        if comms:
            actions = schedules.add_messages_as_torch(schedules.add_reduce_grad(actions))
        schedules.write_csv(actions, csv_path)
    if figure:
        getattr(result.plot, figure[0])(figure[1])


@show.command("program")
@scenario_options
def show_program(scenario: str, overrides: tuple[str, ...]) -> None:
    """Print the program of SCENARIO: every op, its stream and what it waits for."""
    loaded = _load(scenario, overrides)
    from simulator.lower import lower
    from simulator.program_text import format_program

    program = lower(loaded)
    if len(program) > MOST_LISTED:
        raise DescriptionError(
            f"{loaded.name}: a listing of {len(program):,} ops is no use; describe fewer ranks, "
            "steps or microbatches, or --set run.detail=stage"
        )
    click.echo(format_program(program))


@show.command("topology")
@scenario_options
@click.option("--plot", metavar="FILE", help="Draw it, with the ranks on their devices.")
def show_topology(scenario: str, overrides: tuple[str, ...], plot: str | None) -> None:
    """Print the hardware of SCENARIO, its sources, and where each rank lies."""
    if plot is not None:
        from simulator.report.palette import check_path

        check_path(plot)
    loaded = _load(scenario, overrides)
    from simulator.report.placement import placement_text
    from simulator.report.topology import topology_text

    click.echo(f"{topology_text(loaded.cluster)}\n\n{placement_text(loaded)}")
    if plot is not None:
        from simulator.report.network_plots import fabric_figure

        fabric_figure(loaded, plot)


@show.command("placement")
@scenario_options
@click.option("--json", "json_path", metavar="FILE", help="Write it as JSON; - for stdout.")
def show_placement(scenario: str, overrides: tuple[str, ...], json_path: str | None) -> None:
    """Print which rank of SCENARIO lies on which device, and the nodes that groups lie on."""
    _check_outputs(json_path, None, [])
    loaded = _load(scenario, overrides)
    from simulator.report.placement import placement_dict, placement_text

    if json_path:
        _write_json(placement_dict(loaded), json_path)
    if json_path != "-":
        click.echo(placement_text(loaded))


@show.command("memory")
@scenario_options
@click.option("--json", "json_path", metavar="FILE", help="Write it as JSON; - for stdout.")
def show_memory(scenario: str, overrides: tuple[str, ...], json_path: str | None) -> int:
    """Print what fills the memory of every stage of SCENARIO, and what inference would need."""
    _check_outputs(json_path, None, [])
    loaded = _load(scenario, overrides)
    from simulator.api import simulate
    from simulator.explore.remedies import find_remedies
    from simulator.report.inference import inference_dict, inference_text
    from simulator.report.memory_text import memory_text
    from simulator.report.text import SCHEMA_VERSION

    result = simulate(loaded)
    remedies = find_remedies(result)
    if json_path:
        document = {
            "schema_version": SCHEMA_VERSION,
            "scenario": loaded.name,
            "peak_memory_bytes": result.peak_memory_bytes.tolist(),
            "memory_capacity_bytes": result.summary.memory_capacity_bytes,
            "host_memory_bytes": result.summary.host_memory_bytes,
            "fits": result.summary.fits,
            "inference": inference_dict(loaded),
        }
        _write_json(document | _remedies_dict(remedies), json_path)
    if json_path != "-":
        click.echo(f"{memory_text(result, loaded)}{_remedies_text(remedies)}")
        click.echo(f"\n{inference_text(loaded)}")
    return 0 if result.summary.fits else OVER_CAPACITY


@show.command("collective")
@click.option("--op", default="all_reduce", show_default=True, help="all_gather, all_to_all, ...")
@click.option("--sizes", default="1KB:8GB", show_default=True, metavar="MIN:MAX",
              help="Bytes, doubling; K, M, G are binary as in nccl-tests.")  # fmt: skip
@click.option("--cluster", "node", required=True, metavar="NODE", help="A node of the catalogue.")
@click.option("--nodes", type=int, default=1, show_default=True, help="How many nodes.")
@click.option("--per-node", type=int, help="Devices used in each node; all when absent.")
@click.option("--algorithm", help="Only this one: RING, TREE, NVLS, ... (NCCL_ALGO).")
@click.option("--protocol", help="Only this one: LL, LL128 or SIMPLE (NCCL_PROTO).")
def show_collective(
    op: str, sizes: str, node: str, nodes: int, per_node: int | None,
    algorithm: str | None, protocol: str | None,
) -> None:  # fmt: skip
    """Print a collective by size as nccl-tests would, with the algorithm that NCCL takes."""
    from simulator.describe.cluster import Cluster
    from simulator.describe.loader import load_node
    from simulator.report.collectives import collective_text, parse_sizes

    cluster = Cluster(node=load_node(node), num_nodes=nodes, devices_per_node=per_node)
    click.echo(
        collective_text(op, parse_sizes(sizes), cluster, algorithm=algorithm, protocol=protocol)
    )


@show.command("megatron")
@scenario_options
def show_megatron(scenario: str, overrides: tuple[str, ...]) -> None:
    """Print SCENARIO as the flags of Megatron-LM, and what of it they cannot say."""
    loaded = _load(scenario, overrides)
    from simulator.cuts import resolved
    from simulator.exchange.megatron import launcher_flags, to_megatron, unsaid

    loaded = resolved(loaded)
    flags = to_megatron(loaded)
    head = " ".join(("torchrun", *launcher_flags(loaded), "pretrain_gpt.py"))
    click.echo(" \\\n    ".join((head, *flags)))
    for sentence in unsaid(loaded):
        click.echo(f"no flag says {sentence}", err=True)


@show.command("catalog")
def show_catalog() -> None:
    """List the devices, nodes, models and scenarios that are known by name."""
    from simulator.describe import catalog

    for folder in catalog.FOLDERS:
        click.echo(f"{folder}: {', '.join(catalog.names(folder))}")


@cli.group()
def validate() -> None:
    """Compare predictions with published measurements."""


@validate.command("collectives")
def validate_collectives() -> None:
    """Print every measured collective beside its prediction, and the accuracy of each half."""
    from simulator.report.collectives import cases, validation_text

    click.echo(validation_text(cases()))


@validate.command("published")
@click.option("--source", "names", multiple=True, metavar="NAME",
              help="Only this source (repeatable); all when absent.")  # fmt: skip
@click.option("--json", "json_path", metavar="FILE", help="Write the rows as JSON; - for stdout.")
@click.option("--figure", metavar="FILE", help="Draw predicted against measured.")
@click.option("--max-error", type=click.FloatRange(min=0), metavar="PERCENT",
              help="Exit with 3 when a source's mean |error| is above it.")  # fmt: skip
def validate_published(
    names: tuple[str, ...], json_path: str | None, figure: str | None, max_error: float | None
) -> int:
    """Re-run every published step time and memory, and print how far off each prediction is."""
    if figure is not None:
        from simulator.report.palette import check_path

        check_path(figure)
    _check_outputs(json_path, None, [Path(figure)] if figure else [])
    from simulator.validate.published import document, rerun
    from simulator.validate.sources import named
    from simulator.validate.text import published_text

    reports = [rerun(source) for source in _progress(named(names))]
    if json_path:
        _write_json(document(reports), json_path)
    if json_path != "-":
        click.echo(published_text(reports))
    if figure:
        from simulator.validate.scatter import published_figure

        published_figure(reports, figure)
    found = [r.accuracy.mean for r in reports if r.accuracy]
    beyond = max_error is not None and not all(100 * mean <= max_error for mean in found)
    return OVER_CAPACITY if beyond else 0


def _remedies_text(remedies: Remedies | None) -> str:
    """Return what goes below a report: nothing for a plan that fits."""
    return "" if remedies is None else f"\n\n{remedies}"


def _remedies_dict(remedies: Remedies | None) -> dict[str, Any]:
    return {} if remedies is None else {"remedies": remedies.to_dict()}


def _cost_text(result: Result) -> str:
    """Return what goes below a report where a scenario asks for energy and money."""
    if result.scenario is None or result.scenario.cost is None:
        return ""
    from simulator.operate.cost import step_text

    return f"\n\n{step_text(result)}"


def _cost_dict(result: Result) -> dict[str, Any]:
    if result.scenario is None or result.scenario.cost is None:
        return {}
    from simulator.operate.cost import bill_dict, step_bills

    step, million = step_bills(result)
    return {"cost": {"step": bill_dict(step), "million_tokens": bill_dict(million)}}


def _progress(items: Sequence[T]) -> Iterator[T]:
    """Go through items with a bar on a terminal's stderr, and without a word elsewhere."""
    if not sys.stderr.isatty():
        yield from items
        return
    with click.progressbar(items, file=sys.stderr) as bar:
        yield from bar


def _load(scenario: str, overrides: tuple[str, ...]) -> Scenario:
    from simulator.describe.loader import load, set_all

    loaded = load(scenario, set_all(overrides))
    if loaded.plan.stage_cut == "uniform":
        return loaded
    from simulator.cuts import resolved

    return resolved(loaded)


def _figure(text: str) -> tuple[str, Path]:
    """Return the figure and the file of a ``--plot`` value, after checking both."""
    from simulator.report.palette import check_path
    from simulator.report.plots import FIGURES

    name, equals, path = text.partition("=")
    if not equals:
        name, path = "pipeline", text
    if name not in FIGURES:
        known = ", ".join(FIGURES)
        raise DescriptionError(f"--plot {text!r}: no figure {name!r}; there are {known}")
    check_path(path)
    return name, Path(path)


def _check_figures(names: list[str], loaded: Scenario) -> None:
    """Check before the work that a scenario has what its figures show."""
    if "links" in names and loaded.run.network != "fluid":
        from simulator.report.network_plots import NOT_SHARED

        raise DescriptionError(NOT_SHARED)


def _ranks(text: str, world_size: int) -> list[int] | Literal["all", "some"]:
    """Return the ranks of a ``--trace-ranks`` value."""
    if text in ("all", "some"):
        return cast(Literal["all", "some"], text)
    words = text.split(",")
    if not all(word.isdigit() and int(word) < world_size for word in words):
        raise DescriptionError(
            f"--trace-ranks {text!r}: write all, some, or ranks from 0 to {world_size - 1} as 0,8"
        )
    return [int(word) for word in words]


def _check_outputs(json_path: str | None, trace: str | None, figures: list[Path]) -> None:
    """Check all outputs before the work; no two may be the same file."""
    from simulator.files import check_writable

    files = [p for p in (json_path, trace) if p not in (None, "-")]
    if "" in files:
        raise DescriptionError("--json and --trace need the name of a file")
    if json_path and json_path != "-":
        check_writable(Path(json_path))
    if trace:
        from simulator.report.trace import SUFFIXES

        check_writable(Path(trace), SUFFIXES)
    every = [os.path.realpath(p) for p in (json_path, trace, *figures) if p and p != "-"]
    if len(set(every)) < len(every):
        raise DescriptionError("two outputs have the same name; give each its own")


def _write_json(document: dict[str, Any], target: str) -> None:
    import json

    text = json.dumps(document, indent=2) + "\n"
    if target == "-":
        click.echo(text, nl=False)
        return
    from simulator.files import write_whole

    write_whole(Path(target), lambda path: _write_text(path, text))


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def main() -> None:
    """Run the command line and exit with its code."""
    try:
        with cli.make_context("trainsim", sys.argv[1:]) as context:
            code = cli.invoke(context)
        if sys.stdout is not None:
            sys.stdout.flush()
        sys.exit(code or 0)
    except click.exceptions.Exit as end:
        sys.exit(end.exit_code)
    except TrainsimError as error:
        _complain(str(error))
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.exceptions.Abort):
        _complain("interrupted")
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except BrokenPipeError:  # the reader has gone, as `head` does: end quietly
        _discard_stdout()
        sys.exit(0)
    except OSError as error:
        _discard_stdout()
        _complain(f"cannot write to standard output: {error.strerror}")
        sys.exit(1)


def _discard_stdout() -> None:
    """Let what is still in the buffer go nowhere when the interpreter ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(message: str) -> None:
    lines = message.splitlines() or [""]
    click.echo(f"trainsim: {lines[0]}", err=True)
    for line in lines[1:]:
        click.echo(line if line.startswith(" ") else f"trainsim: {line}", err=True)
