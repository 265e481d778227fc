"""``k3convert dcp-to-hf``."""

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

NAME = "dcp-to-hf"


def command(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="DCP folder, of this tool or of any trainer.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="New checkpoint folder.")],
    like: Annotated[
        Path | None,
        typer.Option(metavar="BASE", help="HF folder, or DCP of ours: config, names, order and scales come from it."),
    ] = None,
    experts: Annotated[
        str | None, typer.Option(metavar="packed|bf16", help="Form of the experts. Default: as source or base.")
    ] = None,
    scale_rule: Annotated[
        str,
        typer.Option(
            "--scale-rule",
            metavar="RULE",
            help="Scale of a changed block: source, compressed-tensors, ocp-floor or ceil.",
        ),
    ] = "compressed-tensors",
    max_shard_size: Annotated[
        str | None, typer.Option("--max-shard-size", metavar="SIZE", help="Cut new shards of at most this size.")
    ] = None,
    workers: Workers = None,
    memory_limit: MemoryLimit = "1G",
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
    """Convert DCP shards back to a Hugging Face checkpoint; unchanged weights come back byte for byte."""
    from k3convert.cli.carry_out import carry_out, run_options, size_option
    from k3convert.planning.dcp_to_hf import ToHfOptions, plan_dcp_to_hf

    run = run_options(
        workers=workers,
        memory_limit=memory_limit,
        overwrite=overwrite,
        resume=not no_resume,
        part=part,
        finish=finish,
    )
    options = ToHfOptions(
        like=like,
        experts=experts,
        scale_rule=scale_rule,
        max_shard_bytes=None if max_shard_size is None else size_option("--max-shard-size", max_shard_size),
    )
    return carry_out(
        Console(as_json=as_json, quiet=quiet, verbose=verbose),
        destination,
        run,
        lambda: plan_dcp_to_hf(source, destination, options),
        dry_run=dry_run,
    )
