"""``trainsim view``."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("file", metavar="FILE")
@click.option(
    "--port", type=click.IntRange(1, 65535), help="Port to serve on; a free one if absent."
)
@click.option("--no-open", is_flag=True, help="Do not open a browser; print the address only.")
def view(file: str, port: int | None, no_open: bool) -> None:
    """Show a trace in Perfetto's interface, without the internet, until Ctrl-C.

    FILE is what --trace wrote (.pftrace, .json; either .gz), or another that Perfetto reads.
    """
    from simulator.report.viewer import Viewer

    with Viewer(Path(file), port or 0) as viewer:
        click.echo(f"{file}: {viewer.address} (Ctrl-C ends)")
        if not no_open:
            import webbrowser

            webbrowser.open(viewer.address)
        viewer.serve_forever()
