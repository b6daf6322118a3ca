"""``trainsim compare``."""

from __future__ import annotations

import click

from simulator.cli.options import check_report, load, write_json
from simulator.errors import DescriptionError


@click.command()
@click.argument("a", metavar="A")
@click.argument("b", metavar="[B]", required=False)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a value of B, as plan.tp=4 (repeatable).",
)
@click.option(
    "--set-a",
    "overrides_a",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a value of A (repeatable).",
)
@click.option("--json", "json_path", metavar="FILE", help="Write it as JSON; - for stdout.")
@click.option("--plot", metavar="FILE", help="Draw both steps and their difference.")
def compare(
    a: str, b: str | None, overrides: tuple[str, ...], overrides_a: tuple[str, ...],
    json_path: str | None, plot: str | None,
) -> None:  # fmt: skip
    """Simulate scenarios A and B, and say what changed and why.

    Without B it is A, with the values of --set changed.
    """
    if not b and not overrides:
        raise DescriptionError("name what to compare with, or change A by --set plan.tp=4")
    check_report(json_path, plot)
    settings = overrides_a, overrides if b else (*overrides_a, *overrides)
    loaded = [load(name, some) for name, some in zip((a, b or a), settings, strict=True)]
    from simulator.api import simulate
    from simulator.explore.compare import Side
    from simulator.explore.compare import compare as compared
    from simulator.explore.compare.text import comparison_dict

    sides = [Side.of_result(simulate(s), some) for s, some in zip(loaded, settings, strict=True)]
    found = compared(*sides)
    if json_path:
        write_json(comparison_dict(found), json_path)
    if json_path != "-":
        click.echo(found)
    if plot is not None:
        from simulator.explore.compare.plot import comparison_figure

        comparison_figure(found, plot)
