"""``k3convert hf-to-dcp``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from k3convert.cli.console import Console
from k3convert.cli.options import (
    AsJson,
    Debug,
    DryRun,
    Finish,
    MemoryLimit,
    NoResume,
    Overwrite,
    PartOption,
    Quiet,
    Verbose,
    Workers,
)

NAME = "hf-to-dcp"


def command(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Checkpoint folder, or a hub id owner/name[@revision].")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="New DCP folder.")],
    experts: Annotated[
        str | None,
        typer.Option(metavar="packed|bf16", help="Move packed experts as bytes (default), or decode them exactly."),
    ] = None,
    num_layers: Annotated[
        int | None, typer.Option("--num-layers", min=1, metavar="N", help="Keep the first N decoder layers.")
    ] = None,
    workers: Workers = None,
    memory_limit: MemoryLimit = "1G",
    chunk_size: Annotated[
        str,
        typer.Option("--chunk-size", metavar="SIZE", help="Most bytes of one DCP chunk; whole experts, whole rows."),
    ] = "160M",
    keep_scales: Annotated[
        bool,
        typer.Option("--keep-scales/--no-keep-scales", help="With bf16: store the scales too, for an exact way back."),
    ] = True,
    allow_nan_scales: Annotated[
        bool, typer.Option("--allow-nan-scales", help="With packed: move scale bytes of 255 (NaN) as they are.")
    ] = False,
    download: Annotated[
        bool, typer.Option("--download", help="With a hub id: fetch what the local cache lacks, shard by shard.")
    ] = False,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    no_resume: NoResume = False,
    part: PartOption = None,
    finish: Finish = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> int:
    """Convert a Hugging Face checkpoint to PyTorch DCP shards, streaming and resumable."""
    from k3convert.checkpoint.hub import resolve_source
    from k3convert.cli.carry_out import carry_out, run_options, size_option
    from k3convert.planning.hf_to_dcp import ToDcpOptions, plan_hf_to_dcp

    console = Console(as_json=as_json, quiet=quiet, verbose=verbose)
    run = run_options(
        workers=workers,
        memory_limit=memory_limit,
        overwrite=overwrite,
        resume=not no_resume,
        part=part,
        finish=finish,
    )
    options = ToDcpOptions(
        experts=experts,
        num_layers=num_layers,
        chunk_bytes=size_option("--chunk-size", chunk_size),
        keep_scales=keep_scales,
        allow_nan_scales=allow_nan_scales,
    )
    return carry_out(
        console,
        destination,
        run,
        lambda: plan_hf_to_dcp(resolve_source(source, download=download), destination, options),
        dry_run=dry_run,
    )
