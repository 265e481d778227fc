"""``k3convert make-tiny``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from k3convert.cli.console import Console
from k3convert.cli.options import AsJson, Debug, Quiet, Verbose

NAME = "make-tiny"


class Preset(StrEnum):
    """Sizes of generated checkpoints."""

    TINY = "tiny"
    MANY = "many"
    LARGE = "large"
    RELEASE = "release"


def command(
    destination: Annotated[Path, typer.Argument(metavar="DST", help="New checkpoint folder.")],
    preset: Annotated[
        Preset,
        typer.Option(help="tiny: 7 MB; many: 2.2 GB in 43,000 tensors; large: 2.4 GB at true expert sizes; release."),
    ] = Preset.TINY,
    num_layers: Annotated[int | None, typer.Option("--num-layers", min=1, metavar="N", help="Decoder layers.")] = None,
    num_experts: Annotated[
        int | None, typer.Option("--num-experts", min=1, metavar="E", help="Routed experts a layer.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random values.")] = 0,
    sparse: Annotated[bool, typer.Option("--sparse", help="Write headers and leave the data as holes.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> int:
    """Write a generated checkpoint in the released layout, with every quirk of the release."""
    from k3convert.cli.progress import ProgressSink
    from k3convert.execution.events import Advanced, Started
    from k3convert.reporting.to_text import made_text
    from k3convert.synthesis import make_checkpoint

    console = Console(as_json=as_json, quiet=quiet, verbose=verbose)
    sink = ProgressSink(console)
    started = False

    def on_progress(done: int, total: int) -> None:
        nonlocal started
        if not started:
            started = True
            sink(Started(NAME, total, 0))
        sink(Advanced(done))

    try:
        summary = make_checkpoint(
            destination,
            preset=preset.value,
            num_layers=num_layers,
            num_experts=num_experts,
            seed=seed,
            sparse=sparse,
            on_progress=on_progress,
        )
    finally:
        sink.close()
    document = summary.document()
    console.result(document, made_text(document))
    return 0
