"""``trainsim run`` and ``check``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import click

from simulator.cli.options import (
    NO_JITTER,
    OVER_CAPACITY,
    check_figures,
    check_outputs,
    figure_of,
    jobs_option,
    load,
    scenario_options,
    write_json,
)
from simulator.errors import DescriptionError

if TYPE_CHECKING:
    from simulator.explore.remedies import Remedies
    from simulator.jitter import Jittered
    from simulator.report.result import Result


@click.command()
@scenario_options
@click.option("--json", "json_path", metavar="FILE", help="Write the report as JSON; - for stdout.")
@click.option(
    "--html", metavar="FILE", help="Write the report as one page with a timeline (.html)."
)
@click.option("--trace", metavar="FILE", help="Write a trace (.pftrace, .json; either .gz).")
@click.option(
    "--kineto", metavar="FOLDER", help="Write traces as torch.profiler does, a file a rank."
)
@click.option(
    "--plot",
    "plots",
    multiple=True,
    metavar="[NAME=]FILE",
    help="Draw pipeline (the default), density, breakdown, roofline, memory, loader, links, "
    "topology or jitter (repeatable).",
)
@click.option(
    "--trace-ranks",
    default="some",
    show_default=True,
    metavar="all|some|R,R,...",
    help="Ranks of traces; some: one of each stage of more than 64 ranks.",
)
@click.option("--no-fold", is_flag=True, help="Run every rank, also those that run alike.")
@click.option("--engine", type=click.Choice(["compiled", "events", "reference"]),
              default="compiled", show_default=True, help="All give the same times.")  # fmt: skip
@click.option("--samples", type=click.IntRange(min=1),
              help="Steps drawn under [jitter], in place of jitter.samples.")  # fmt: skip
@jobs_option
def run(
    scenario: str, overrides: tuple[str, ...], json_path: str | None, html: str | None,
    trace: str | None, kineto: str | None, plots: tuple[str, ...], trace_ranks: str,
    no_fold: bool, engine: str, samples: int | None, jobs: int | None,
) -> int:  # fmt: skip
    """Simulate SCENARIO and report step time, memory and the bottleneck.

    Where it does not fit, the nearest changes that do are listed too, and the exit code is 3. With
    a [jitter] table many disturbed steps are drawn and reported beside the undisturbed one.
    """
    figures = [figure_of(text, ("jitter",)) for text in plots]
    check_outputs(json_path, trace, [path for _, path in figures], html)
    if trace is None and kineto is None and trace_ranks != "some":
        raise DescriptionError("--trace-ranks says which ranks --trace shows; give --trace too")
    if kineto is not None:
        from simulator.files import check_folder

        check_folder(Path(kineto))
    loaded = load(scenario, overrides)
    ranks = ranks_of(trace_ranks, loaded.cluster.world_size)
    check_figures([name for name, _ in figures], loaded)
    for name, given in (("--samples", samples), ("--jobs", jobs)):
        if given is not None and loaded.jitter is None:
            raise DescriptionError(f"{name} {given}: {NO_JITTER}")
    from simulator.api import simulate

    result = simulate(loaded, engine=engine, folded=not no_fold)
    from simulator.explore.remedies import find_remedies

    remedies = find_remedies(result)
    jittered = _jittered(result, engine, samples, jobs)
    if json_path:
        write_json(
            result.to_dict()
            | remedies_dict(remedies)
            | _cost_dict(result)
            | _jitter_dict(jittered),
            json_path,
        )
    if json_path != "-":
        click.echo(f"{result}{remedies_text(remedies)}{_cost_text(result)}{_jitter_text(jittered)}")
    if html:
        result.save_html(html)
    if trace:
        result.save_trace(trace, ranks)
    if kineto:
        result.save_kineto(kineto, ranks)
    for name, path in figures:
        if name != "jitter":
            getattr(result.plot, name)(path)
        elif jittered is not None:
            from simulator.jitter.plot import jitter_figure

            jitter_figure(jittered, path)
    return 0 if result.summary.fits else OVER_CAPACITY


@click.command()
@scenario_options
def check(scenario: str, overrides: tuple[str, ...]) -> None:
    """Check SCENARIO and its program without running it."""
    loaded = load(scenario, overrides)
    from simulator.lower import lower

    program = lower(loaded)
    click.echo(
        f"{loaded.name}: ok, {program.num_ranks} ranks, {len(program):,} ops, "
        f"{len(program.joint_group):,} of them joint"
    )


def remedies_text(remedies: Remedies | None) -> str:
    """Return what goes below a report: nothing for a plan that fits."""
    return "" if remedies is None else f"\n\n{remedies}"


def remedies_dict(remedies: Remedies | None) -> dict[str, Any]:
    """Return what a document adds: nothing for a plan that fits."""
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


def _jittered(
    result: Result, engine: str, samples: int | None, jobs: int | None
) -> Jittered | None:
    """Return the steps under jitter, where a scenario has any."""
    if result.scenario is None or result.scenario.jitter is None:
        return None
    from simulator.jitter import study

    return study(result, engine=engine, samples=samples, jobs=jobs)


def _jitter_text(jittered: Jittered | None) -> str:
    if jittered is None:
        return ""
    from simulator.jitter.text import jittered_text

    return f"\n\n{jittered_text(jittered)}"


def _jitter_dict(jittered: Jittered | None) -> dict[str, Any]:
    if jittered is None:
        return {}
    from simulator.jitter.text import jittered_dict

    return {"jitter": jittered_dict(jittered)}


def ranks_of(text: str, world_size: int) -> list[int] | Literal["all", "some"]:
    """Return the ranks of a ``--trace-ranks`` value."""
    if text in ("all", "some"):
        return cast(Literal["all", "some"], text)
    words = text.split(",")
    if not all(word.isdigit() and int(word) < world_size for word in words):
        raise DescriptionError(
            f"--trace-ranks {text!r}: write all, some, or ranks from 0 to {world_size - 1} as 0,8"
        )
    return [int(word) for word in words]
