"""The command line's ``trainsim import``: other programs' files as scenarios."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from simulator.errors import DescriptionError

if TYPE_CHECKING:
    from simulator.exchange.account import Imported


MOST_BYTES = 8_000_000
"""Of a file that is looked at; a script or settings of more are refused by their readers."""


@click.group("import")
def import_group() -> None:
    """Turn another program's launch script or settings into a scenario, or read its traces."""


def _options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command its file, the cluster, where to write, and how strict to be."""
    for option in (
        click.option("--strict", is_flag=True, help="Refuse flags and keys that are not known."),
        click.option("--out", metavar="FILE", help="Write the scenario there (.toml)."),
        click.option("--cluster", metavar="SCENARIO", help="Run on the cluster of this scenario."),
        click.option("--nodes", type=click.IntRange(min=1), metavar="N", help="How many nodes."),
        click.option("--node", metavar="NODE", help="A node of the catalogue, or its file."),
        click.argument("file", metavar="FILE|-"),
    ):
        command = option(command)
    return command


@import_group.command("megatron")
@_options
@click.option("--var", "variables", multiple=True, metavar="NAME=VALUE",
              help="Value of a shell variable, whatever the script sets (repeatable).")  # fmt: skip
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def import_megatron(
    file: str, node: str | None, nodes: int | None, cluster: str | None, out: str | None,
    strict: bool, variables: tuple[str, ...], flags: tuple[str, ...],
) -> None:  # fmt: skip
    """Print the scenario that a launch script of Megatron-LM describes.

    FILE is the script, a part of it, bare flags, or lines of "key: value"; nothing of it is run.
    FLAGS of Megatron-LM that follow -- are laid over those of the script.
    """
    from simulator.exchange import megatron

    for text in variables:
        if "=" not in text[1:]:
            raise DescriptionError(f"--var {text!r}: write NAME=VALUE, for example TP=8")
    imported = megatron.import_megatron(
        _read(file), name=_name(file), flags=flags,
        variables=dict(text.split("=", 1) for text in variables),
        **_cluster(node, nodes, cluster),
    )  # fmt: skip
    _finish(imported, out, strict)


@import_group.command("torchtitan")
@_options
@click.argument("settings", nargs=-1, type=click.UNPROCESSED)
def import_torchtitan(
    file: str, node: str | None, nodes: int | None, cluster: str | None, out: str | None,
    strict: bool, settings: tuple[str, ...],
) -> None:  # fmt: skip
    """Print the scenario that a TOML file of torchtitan describes.

    SETTINGS that follow --, as --parallelism.tensor_parallel_degree 4, are laid over the file.
    """
    from simulator.exchange import torchtitan

    imported = torchtitan.import_torchtitan(
        _read(file), name=_name(file), settings=settings, **_cluster(node, nodes, cluster)
    )
    _finish(imported, out, strict)


def _cluster(node: str | None, nodes: int | None, cluster: str | None) -> dict[str, Any]:
    """Return what was asked for of the cluster."""
    if cluster is None:
        return {"node": node, "nodes": nodes}
    if node is not None or nodes is not None:
        raise DescriptionError("--cluster is a whole cluster; leave --node and --nodes out")
    from simulator.describe.loader import cluster_table

    return {"cluster": cluster_table(cluster)}


def _name(file: str) -> str:
    return "imported" if file == "-" else Path(file).stem or "imported"


def _read(file: str) -> str:
    """Return the text of a file, or of the standard input.

    Raises:
        DescriptionError: when it cannot be read.
    """
    try:
        if file == "-":
            return sys.stdin.buffer.read(MOST_BYTES).decode("utf-8-sig", "strict")
        with Path(file).open("rb") as opened:
            return opened.read(MOST_BYTES).decode("utf-8-sig", "strict")
    except OSError as error:
        raise DescriptionError(f"{file!r} cannot be read ({error.strerror})") from None
    except ValueError:  # bytes that are no UTF-8, or a name that no file can have
        raise DescriptionError(f"{file!r} is not a UTF-8 text") from None


def _finish(imported: Imported, out: str | None, strict: bool) -> None:
    """Write or print a scenario, and the account of what became of each flag."""
    if strict and imported.unknown:
        raise DescriptionError(f"{flag}: not known (--strict)" for flag in imported.unknown)
    if out is None:
        click.echo(imported.toml(), nl=False)
        click.echo(imported.report(), err=True)
        return
    from simulator.files import check_writable, write_whole

    target = Path(out)
    check_writable(target, (".toml",))
    text = imported.toml()
    write_whole(target, lambda path: _write_text(path, text))
    click.echo(f"{imported.report()}\nwritten: {out}")


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
