"""``k3convert verify``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from k3convert.cli.console import Console
from k3convert.cli.options import AsJson, Debug, Quiet, Verbose

NAME = "verify"


def command(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="HF folder or DCP folder; every byte is read.")],
    against: Annotated[
        Path | None,
        typer.Option(metavar="OTHER", help="Compare the tensors' digests with those of this HF or DCP folder."),
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> int:
    """Check a checkpoint's structure and digests, alone or against another. Exit 1 if anything is wrong."""
    from k3convert.cli.progress import ProgressSink
    from k3convert.execution.verification import verify_checkpoint
    from k3convert.reporting.to_text import verification_text

    console = Console(as_json=as_json, quiet=quiet, verbose=verbose)
    sink = ProgressSink(console)
    try:
        verification = verify_checkpoint(path, against=against, on_event=sink)
    finally:
        sink.close()
    document = verification.document()
    console.result(document, verification_text(document))
    return 0 if verification.ok else 1
