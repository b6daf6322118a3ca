"""``trainsim compare``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from simulator.cli.options import check_report, load, write_json
from simulator.errors import DescriptionError

if TYPE_CHECKING:
    from simulator.describe.scenario import Scenario
    from simulator.explore.compare import Side


@click.command()
@click.argument("a", metavar="A")
@click.argument("b", metavar="[B]", required=False)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE",
              help="Override a value of B, as plan.tp=4 (repeatable).")  # fmt: skip
@click.option("--set-a", "overrides_a", multiple=True, metavar="KEY=VALUE",
              help="Override a value of A (repeatable).")  # fmt: skip
@click.option("--group", "groups", multiple=True, metavar="GROUP=AXIS",
              help="Axis of a process group of a measured run, as 3=tp (repeatable).")  # fmt: skip
@click.option("--json", "json_path", metavar="FILE", help="Write it as JSON; - for stdout.")
@click.option("--plot", metavar="FILE", help="Draw both steps and their difference.")
@click.option("--html", metavar="FILE", help="Write a page with both runs side by side (.html).")
def compare(
    a: str, b: str | None, overrides: tuple[str, ...], overrides_a: tuple[str, ...],
    groups: tuple[str, ...], json_path: str | None, plot: str | None, html: str | None,
) -> None:  # fmt: skip
    """Say what changed between runs A and B, and why.

    A and B are scenarios, which are simulated, or measured runs: a trace of torch.profiler
    (.json, .json.gz), a folder of them, or a pattern in quotes. Without B it is A, with the values
    of --set changed.
    """
    if not b and not overrides:
        raise DescriptionError("name what to compare with, or change A by --set plan.tp=4")
    check_report(json_path, plot, html)
    settings = overrides_a, overrides if b else (*overrides_a, *overrides)
    sides = _sides((a, b or a), settings, groups)
    from simulator.explore.compare import compare as compared
    from simulator.explore.compare.text import comparison_dict

    found = compared(*sides)
    if json_path:
        write_json(comparison_dict(found), json_path)
    if json_path != "-":
        click.echo(found)
    if plot is not None:
        from simulator.explore.compare.plot import comparison_figure

        comparison_figure(found, plot)
    if html:
        from simulator.report.html import save_html

        save_html([side.result for side in sides], html, names=[side.name for side in sides])


def _sides(
    names: tuple[str, str], settings: tuple[tuple[str, ...], ...], groups: tuple[str, ...]
) -> list[Side]:
    """Return both sides; all that is read is read before anything runs."""
    for text in groups:
        if "=" not in text[1:]:
            raise DescriptionError(f"--group {text!r}: write GROUP=AXIS, for example 3=tp")
    axes = dict(text.split("=", 1) for text in groups)
    if axes and not any(map(_is_measured, names)):
        raise DescriptionError("--group is for process groups of a measured run; there is none")
    loaded: list[Side | Scenario] = []
    for name, some in zip(names, settings, strict=True):
        if not _is_measured(name):
            loaded.append(load(name, some))
        elif some:
            raise DescriptionError(f"{some[0]!r} cannot change {name!r}, a run that was measured")
        else:
            loaded.append(_measured(name, axes))
    from simulator.api import simulate
    from simulator.explore.compare import Side

    return [
        one if isinstance(one, Side) else Side.of_result(simulate(one), some)
        for one, some in zip(loaded, settings, strict=True)
    ]


def _is_measured(name: str) -> bool:
    """Return whether a reference is of traces; a bare name is one of the catalogue."""
    return name.endswith((".json", ".json.gz")) or "*" in name or (
        "/" in name and Path(name).is_dir()
    )  # fmt: skip


def _measured(name: str, axes: dict[str, str]) -> Side:
    from simulator.exchange.kineto import read_kineto
    from simulator.explore.compare import Side

    run = read_kineto(name, axes)
    return Side.of_run(run.program, run.timeline, run.name, run.notes)
