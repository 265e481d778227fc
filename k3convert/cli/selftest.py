"""``k3convert selftest``."""

from __future__ import annotations

from typing import Annotated

import typer

from k3convert.cli.console import Console
from k3convert.cli.options import AsJson, Debug, Quiet, Verbose
from k3convert.errors import ExitCode

NAME = "selftest"


def command(
    inject: Annotated[
        list[str] | None, typer.Option("--inject", metavar="NAME", help="Plant this fault only; may be repeated.")
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", min=1, metavar="S", help="Seconds for one run.")] = 300.0,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> int:
    """Plant faults into a generated checkpoint, and check that each is caught and found where it was planted."""
    from k3convert.parity.selftest import selftest
    from k3convert.reporting.selftest_text import selftest_text

    console = Console(as_json=as_json, quiet=quiet, verbose=verbose)
    report = selftest(inject or (), timeout_s=timeout, on_fault=lambda name, total: console.detail(f"planting {name}"))
    document = report.document()
    console.result(document, selftest_text(document))
    return ExitCode.DONE if report.passed else ExitCode.VERDICT_NO
