"""``k3convert ops``."""

from __future__ import annotations

from typing import Annotated

import typer

from k3convert.cli.console import Console
from k3convert.cli.options import AsJson, Debug, Quiet, Verbose
from k3convert.errors import UsageError

NAME = "ops"


def command(
    op: Annotated[str | None, typer.Argument(metavar="OP", help="Show the rows of this op alone.")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> int:
    """List the implementations of every op, and why one cannot be used on this machine."""
    from k3convert.reporting.to_text import ops_text
    from k3kernels import listing
    from k3kernels.registry import current_device

    device = current_device()
    try:
        rows = listing(op, device=device)
    except KeyError as error:
        raise UsageError(str(error.args[0]), hint="k3convert ops lists every op") from error
    document = {"device": device, "rows": [row.document() for row in rows]}
    Console(as_json=as_json, quiet=quiet, verbose=verbose).result(document, ops_text(document))
    return 0
