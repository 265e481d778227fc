"""Options that mean the same thing in every command."""

from __future__ import annotations

from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, also on failure.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print the result and errors only.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Print more on stderr.")]
Debug = Annotated[bool, typer.Option("--debug", help="Print a traceback with an error.")]

DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan and the space it needs; write nothing.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace an existing destination, once the new result is whole.")
]
NoResume = Annotated[bool, typer.Option("--no-resume", help="Discard the partial result of an interrupted run.")]
Workers = Annotated[
    int | None, typer.Option("--workers", min=1, metavar="N", help="Threads. Default: one a core, at most 8.")
]
MemoryLimit = Annotated[
    str, typer.Option("--memory-limit", metavar="SIZE", help="Memory of all processes of the command on one host.")
]
PartOption = Annotated[
    str | None, typer.Option("--part", metavar="I/N", help="Do part I (from 0) of N, as a job of an array.")
]
Finish = Annotated[bool, typer.Option("--finish", help="Complete the result once every part is done.")]
