"""``trainsim operate``."""

from __future__ import annotations

from typing import Literal

import click

from simulator.cli.options import check_report, jobs_option, load, scenario_options, write_json


@click.command()
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
@jobs_option
def operate(
    scenario: str, overrides: tuple[str, ...], days: float | None, seeds: int, intervals: bool,
    json_path: str | None, plot: str | None, engine: Literal["compiled", "reference"],
    jobs: int | None,
) -> None:  # fmt: skip
    """Run SCENARIO for days: failures, recovery, checkpoints, goodput, energy and money."""
    check_report(json_path, plot)
    loaded = load(scenario, overrides)
    from simulator.operate import operate as run_operations
    from simulator.operate.text import operated_dict, operated_text

    operated = run_operations(loaded, days=days, seeds=seeds, engine=engine, jobs=jobs)
    best = None
    if intervals:
        from simulator.operate.best import best_interval

        best = best_interval(operated)
    if json_path:
        write_json(operated_dict(operated, best), json_path)
    if json_path != "-":
        click.echo(operated_text(operated, best))
    if plot:
        from simulator.operate.plot import goodput_figure

        goodput_figure(operated, plot, best)
