"""``k3convert smoke-train``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from k3convert.cli.console import Console
from k3convert.cli.options import AsJson, Debug, Quiet, Verbose

if TYPE_CHECKING:
    from k3convert.training.events import Event

NAME = "smoke-train"


def command(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="A shipped recipe's name, or a YAML file.")
    ] = "tiny_cpu",
    checkpoint: Annotated[
        str | None, typer.Option(metavar="CKPT", help="HF folder, DCP folder or hub id, instead of the recipe's.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, metavar="N", help="Optimizer steps of the whole run.")] = None,
    layout: Annotated[
        str | None, typer.Option(metavar="DEGREES", help="Parallel layout, for example sp=2,ep=2,fsdp=2.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set a field, e.g. optimizer.learning_rate=1e-4. Repeatable."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The run's folder. Default: smoke-train-RECIPE.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest complete step in DIR.")] = False,
    compare_impl: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,...",
            help="Run with each, A the reference: eager, recipe, an implementation's name, or OP=NAME.",
        ),
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Write a Chrome trace, and fail where a chosen kernel is not in it.")
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> int:
    """Train a checkpoint for minutes and judge it: loss, gradients, memory, save and resume. Exit 1 if not ok."""
    from k3convert.reporting.training_text import verdict_text
    from k3convert.training.launch import is_first, is_under_torchrun
    from k3convert.training.recipe_reading import load_recipe
    from k3convert.training.smoke_run import smoke_train

    given = {"model.checkpoint": checkpoint, "training.steps": steps, "layout": layout}
    chosen = [f"{key}={json.dumps(value)}" for key, value in given.items() if value is not None]
    loaded = load_recipe(recipe, [*(settings or ()), *chosen])
    folder = Path(f"smoke-train-{Path(recipe).stem}") if out is None else out
    console = Console(as_json=as_json and is_first(), quiet=quiet or not is_first(), verbose=verbose)
    result = smoke_train(
        loaded,
        folder,
        resume=resume,
        compare_impl=compare_impl,
        profile=profile,
        tell=lambda event: _show(console, event),
    )
    code = 0
    if result is not None:
        console.result(result.document(), verdict_text(result.document()))
        code = 0 if result.verdict.is_ok else 1
    if is_under_torchrun():
        # A process group may abort a correct process while it ends; everything is written.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _show(console: Console, event: Event) -> None:
    """A line a step on stderr, as soon as it is done."""
    from k3convert.training.events import Noted

    if isinstance(event, Noted):
        console.note(event.text)
    elif not console.quiet:
        print(event.metrics.line(event.num_steps), file=sys.stderr, flush=True)
