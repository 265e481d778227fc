"""The console script: one sub-command a file, errors and exit codes in one place."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from k3convert.cli import dcp_to_hf, diff, hf_to_dcp, inspect, make_tiny, ops, verify
from k3convert.cli.console import Console
from k3convert.errors import ExitCode, K3Error, UsageError
from k3convert.version import __version__

app = typer.Typer(
    name="k3convert",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for module in (make_tiny, inspect, hf_to_dcp, dcp_to_hf, verify, diff, ops):
    app.command(module.NAME)(module.command)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"k3convert {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Convert, validate and smoke-train Kimi K3 checkpoints."""


def run(arguments: Sequence[str]) -> int:
    """Run one command line; the exit code."""
    console = Console(as_json="--json" in arguments)
    debug = "--debug" in arguments
    try:
        code = app(list(arguments), standalone_mode=False)
    except K3Error as error:
        console.error(error)
        if debug:
            traceback.print_exc()
        return int(error.exit_code)
    except typer.TyperException as error:
        console.error(UsageError(error.format_message(), hint="k3convert COMMAND --help shows what there is"))
        return ExitCode.USAGE
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted; repeat the command to go on where it stopped", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the last line of defence: anything else is our bug
        bug = K3Error(f"a bug in k3convert: {error!r}", hint="repeat with --debug and report the traceback")
        bug.code, bug.exit_code = "internal", ExitCode.OUR_BUG
        console.error(bug)
        if debug:
            traceback.print_exc()
        return ExitCode.OUR_BUG
    return code if isinstance(code, int) else ExitCode.DONE


def main() -> None:
    """The entry point."""
    sys.exit(run(sys.argv[1:]))
