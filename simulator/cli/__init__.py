"""The command line: ``trainsim VERB``, a file of this package for most verbs.

Results go to stdout, everything else to stderr. Exit codes: 0 done, 1 failed while running, 2 wrong
input, 3 the answer is no (does not fit, deadlock), 130 interrupted. Heavy modules load when a
command needs them, so that ``--help`` is quick.
"""

from __future__ import annotations

import os
import sys

import click

from simulator.cli.compare import compare
from simulator.cli.exchange import import_group
from simulator.cli.measured import export_group, import_chakra, import_kineto
from simulator.cli.operate import operate
from simulator.cli.ranks import calibrate
from simulator.cli.run import check, run
from simulator.cli.search import search
from simulator.cli.show import show
from simulator.cli.sweep import sweep
from simulator.cli.validate import validate
from simulator.cli.view import view
from simulator.cli.whatif import whatif
from simulator.errors import TrainsimError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="trainsim", prog_name="trainsim")
def cli() -> None:
    """Simulate distributed deep-learning training before you rent the cluster.

    SCENARIO is a TOML file, or the name of one in the catalogue (trainsim show catalog).
    """


VERBS = (
    run, view, compare, whatif, search, sweep, operate, check, show, import_group, export_group,
    validate,
    calibrate,
)  # fmt: skip

for command in VERBS:
    cli.add_command(command)
for command in (import_kineto, import_chakra):
    import_group.add_command(command)


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
