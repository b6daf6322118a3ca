"""``trainsim whatif``."""

from __future__ import annotations

import click

from simulator.cli.options import check_report, load, scenario_options, write_json


@click.command()
@scenario_options
@click.option("--json", "json_path", metavar="FILE", help="Write it as JSON; - for stdout.")
@click.option("--plot", metavar="FILE", help="Draw the gains and the critical path.")
def whatif(
    scenario: str, overrides: tuple[str, ...], json_path: str | None, plot: str | None
) -> None:
    """Run SCENARIO again with one thing ideal each time, and say what is worth a try."""
    check_report(json_path, plot)
    loaded = load(scenario, overrides)
    from simulator.explore.whatif import what_if, whatif_dict

    found = what_if(loaded)
    if json_path:
        write_json(whatif_dict(found), json_path)
    if json_path != "-":
        click.echo(found)
    if plot is not None:
        from simulator.explore.whatif_plot import whatif_figure

        whatif_figure(found, plot)
