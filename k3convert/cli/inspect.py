"""``k3convert inspect``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from k3convert.cli.console import Console
from k3convert.cli.options import AsJson, Debug, Quiet, Verbose

NAME = "inspect"


def command(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="HF folder, DCP folder, or an index file.")],
    index_only: Annotated[
        bool, typer.Option("--index-only", help="Look at config.json and the index alone, which may be .json.gz.")
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> int:
    """Show what a checkpoint holds and compare it with the tensors its config calls for. Exit 1 if they differ."""
    from k3convert.planning.inspection import inspect_checkpoint
    from k3convert.reporting.to_text import inspection_text

    console = Console(as_json=as_json, quiet=quiet, verbose=verbose)
    inspection = inspect_checkpoint(path, index_only=index_only)
    for note in inspection.notes:
        console.note(note)
    document = inspection.document()
    console.result(document, inspection_text(document))
    return 0 if inspection.ok else 1
