"""The `weightpath` command: one verb a file; one line and exit code 2 on bad input."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import typer

from weightpath.cli import build, convert, inspect, kv, plan, probe, quantize, run, serve, verify
from weightpath.cli.interrupt import CODE as INTERRUPTED
from weightpath.cli.interrupt import MESSAGE, leaving_at_once
from weightpath.errors import WeightpathError
from weightpath.version import __version__

SPIN_COUNT = "10000"
"""Turns that an idle thread of torch's OpenMP pool spins before it sleeps, read when torch is first
imported. libgomp's own 300,000 makes a forward pass 4 to 5 times slower where another program has
the core that it waits for (docs/experiments.md, spinning)."""

UsageProblem: type[Exception] = typer.BadParameter.__mro__[2]
"""ClickException, the base of usage errors; some versions of typer carry their own click."""

app = typer.Typer(
    help="Pick, make, prove and run the low-bit weights that suit a device.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for verb in (probe, plan, kv, build, quantize, convert, inspect, verify, run, serve):
    app.command(verb.NAME, epilog=verb.EXAMPLE)(verb.command)


@app.callback(invoke_without_command=True)
def version_option(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    """Pick, make, prove and run the low-bit weights that suit a device."""
    if version:
        print(__version__)
        raise typer.Exit()
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit()


def main() -> None:
    """Entry point. Errors of ours and of usage are one line on stderr; Ctrl-C keeps finished work."""
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    try:
        with leaving_at_once():
            code = app(standalone_mode=False)
    except WeightpathError as error:
        _fail(str(error), error.exit_code)
    except UsageProblem as error:
        _fail(error.format_message(), 2)  # type: ignore[attr-defined]
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except BrokenPipeError:
        sys.exit(0)
    if code == INTERRUPTED:  # typer answers a KeyboardInterrupt with it too
        _fail(MESSAGE, INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> NoReturn:
    print("weightpath: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(code)
