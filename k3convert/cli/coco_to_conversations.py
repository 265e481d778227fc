"""``k3convert coco-to-conversations``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from k3convert.cli.console import Console
from k3convert.cli.options import AsJson, Debug, Overwrite, Quiet, Verbose

NAME = "coco-to-conversations"


class Captions(StrEnum):
    """Which captions of an image become conversations."""

    FIRST = "first"
    ALL = "all"


def command(
    annotations: Annotated[Path, typer.Argument(metavar="ANNOTATIONS", help="COCO captions, a JSON file.")],
    images: Annotated[Path, typer.Argument(metavar="IMAGES", help="The folder of the images.")],
    destination: Annotated[Path, typer.Argument(metavar="OUT", help="New file of JSON lines.")],
    captions: Annotated[Captions, typer.Option(help="The first caption of every image, or all.")] = Captions.FIRST,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="What the user asks about an image.")] = None,
    skip_missing: Annotated[
        bool, typer.Option("--skip-missing", help="Leave out captions of images that are not there, and list these.")
    ] = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> int:
    """Write COCO captions as conversations with images: a JSON line each, always in the same order."""
    from k3convert.training.data.coco import PROMPT, coco_to_conversations

    console = Console(as_json=as_json, quiet=quiet, verbose=verbose)
    report = coco_to_conversations(
        annotations,
        images,
        destination,
        captions=captions.value,
        prompt=PROMPT if prompt is None else prompt,
        skip_missing=skip_missing,
        overwrite=overwrite,
        on_progress=lambda done, total: console.detail(f"{done:,} of {total:,} captions"),
    )
    if report.missing:
        console.note(f"{len(report.missing)} images are missing: {', '.join(report.missing[:5])}")
    if report.without_caption:
        console.note(f"{len(report.without_caption)} images have no caption: {', '.join(report.without_caption[:5])}")
    if report.num_resumed:
        console.note(f"{report.num_resumed:,} conversations were there from an earlier run")
    console.result(
        report.document(), f"{destination}: {report.num_conversations:,} conversations on {report.num_images:,} images"
    )
    return 0
