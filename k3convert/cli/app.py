"""The console script: one sub-command a file, errors and exit codes in one place."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from io import TextIOWrapper
from typing import Annotated

import typer

from k3convert.cli import (
    coco_to_conversations,
    dcp_to_hf,
    diff,
    hf_to_dcp,
    inspect,
    make_tiny,
    ops,
    selftest,
    smoke_train,
    verify,
    verify_parity,
)
from k3convert.cli.console import Console
from k3convert.errors import ExitCode, Interrupted, K3Error, UsageError, error_of_system
from k3convert.version import __version__

STDOUT = 1  # its descriptor

app = typer.Typer(
    name="k3convert",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for module in (
    make_tiny, inspect, hf_to_dcp, dcp_to_hf, verify, diff, ops, verify_parity, selftest, smoke_train,
    coco_to_conversations,
):  # fmt: skip
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
    """Convert Kimi K3 checkpoints to PyTorch DCP and back, and check them."""


def run(arguments: Sequence[str]) -> int:
    """Run one command line; the exit code."""
    try:
        code = app(list(arguments), standalone_mode=False)
        sys.stdout.flush()
        if code == ExitCode.INTERRUPTED:
            # this is how typer hands a KeyboardInterrupt on
            raise KeyboardInterrupt
    except (BrokenPipeError, SystemExit):
        # the reader of stdout has gone, as in "| head" (typer makes an exit of it): nobody is left to speak to
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)
        return ExitCode.INTERRUPTED
    except (KeyboardInterrupt, Exception) as error:  # noqa: BLE001 - the last line of defence
        failure = _as_failure(error)
        Console(as_json="--json" in arguments and os.environ.get("RANK", "0") == "0").error(failure)
        if "--debug" in arguments:
            traceback.print_exc()
        return int(failure.exit_code)
    return code if isinstance(code, int) else ExitCode.DONE


def _as_failure(error: BaseException) -> K3Error:
    """Anything that was raised, as an error for its reader; what nobody foresaw is our bug."""
    if isinstance(error, K3Error):
        return error
    if isinstance(error, typer.TyperException):
        return UsageError(error.format_message(), hint="k3convert COMMAND --help shows what there is")
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return Interrupted("interrupted", hint="repeat the command to go on where it stopped")
    if isinstance(error, OSError):
        return error_of_system(error)
    bug = K3Error(f"a bug in k3convert: {error!r}", hint="repeat with --debug and report the traceback")
    bug.code, bug.exit_code = "internal", ExitCode.OUR_BUG
    return bug


def main() -> None:
    """The entry point."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # a file name need not be text in the terminal's encoding
            stream.reconfigure(errors="backslashreplace")
    sys.exit(run(sys.argv[1:]))
