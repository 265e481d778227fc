"""``k3convert diff``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from k3convert.cli.console import Console
from k3convert.cli.options import AsJson, Debug, Quiet, Verbose, Workers

NAME = "diff"


def command(
    first: Annotated[Path, typer.Argument(metavar="A", help="HF folder (packed or plain) or DCP folder.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="The one to compare with.")],
    workers: Workers = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> int:
    """Compare the values of two checkpoints, whatever their form. Exit 1 if they differ."""
    from k3convert.cli.progress import ProgressSink
    from k3convert.execution.value_diff import diff_checkpoints
    from k3convert.reporting.to_text import diff_text

    console = Console(as_json=as_json, quiet=quiet, verbose=verbose)
    sink = ProgressSink(console)
    try:
        found = diff_checkpoints(first, second, workers=workers, on_event=sink)
    finally:
        sink.close()
    document = found.document()
    console.result(document, diff_text(document))
    return 0 if found.equal else 1
