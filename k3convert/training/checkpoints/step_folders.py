"""The folders of saved steps: which are complete, and why the others are not. Needs no torch.

A step grows under ``step-N.saving``, gets its name when all its files are there, and then a marker that names them with
their sizes. What a kill leaves behind therefore never looks complete.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = "checkpoints"
MARKER = "complete.json"
GROWING = ".saving"
_NAME = re.compile(r"step-(\d+)")


@dataclass(frozen=True, slots=True)
class Found:
    """The newest complete step of a run, and what was passed over on the way to it.

    Attributes:
        path: None where no step is complete.
        step: of ``path``; 0 without one.
        skipped: one text a folder that is newer, newest first.
    """

    path: Path | None
    step: int
    skipped: tuple[str, ...]


def step_path(out: Path, step: int) -> Path:
    """The folder of a step."""
    return out / FOLDER / f"step-{step}"


def growing_path(out: Path, step: int) -> Path:
    """Where a step is written before it has its name."""
    return out / FOLDER / f"step-{step}{GROWING}"


def newest_complete(out: Path) -> Found:
    """The newest step that can be resumed from."""
    skipped: list[str] = []
    for step, path in _folders(out):
        fault = why_incomplete(path)
        if fault is None:
            return Found(path, step, tuple(skipped))
        skipped.append(f"{path.name}: {fault}")
    return Found(None, 0, tuple(skipped))


def why_incomplete(folder: Path) -> str | None:
    """Why a step cannot be resumed from, or None."""
    if folder.name.endswith(GROWING):
        return "its save was cut short"
    marker = folder / MARKER
    if not marker.is_file():
        return f"it has no {MARKER}: its save was cut short"
    try:
        sizes: dict[str, int] = json.loads(marker.read_text("utf-8"))["files"]
    except (ValueError, KeyError, TypeError) as error:
        return f"{MARKER} cannot be read: {error!r}"
    wrong = []
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file():
            wrong.append(f"{name} is missing")
        elif path.stat().st_size != size:
            wrong.append(f"{name} has {path.stat().st_size} of {size} bytes")
    return f"{len(wrong)} of its {len(sizes)} files are wrong: {'; '.join(wrong[:3])}" if wrong else None


def begin(out: Path, step: int) -> Path:
    """An empty folder for a step that is about to be written; what an earlier try left is removed."""
    path = growing_path(out, step)
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def complete(out: Path, step: int, facts: Mapping[str, Any]) -> Path:
    """Give a written step its name and its marker; an incomplete folder of that name gives way.

    Args:
        out: the run's folder.
        step: the step.
        facts: what else the marker says.
    """
    growing, final = growing_path(out, step), step_path(out, step)
    files = {path.name: path.stat().st_size for path in sorted(growing.iterdir())}
    if final.exists():
        shutil.rmtree(final)
    os.rename(growing, final)
    _sync(final.parent)
    temporary = final / f"{MARKER}.tmp"
    with temporary.open("w", encoding="utf-8") as file:
        json.dump({**facts, "step": step, "files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.rename(temporary, final / MARKER)
    _sync(final)
    return final


def prune(out: Path, keep: int) -> None:
    """Remove all but the newest ``keep`` complete steps, and what is incomplete and older than these; 0 keeps all."""
    if not keep:
        return
    num_complete = 0
    for _, path in _folders(out):
        if num_complete >= keep:
            shutil.rmtree(path)
        elif why_incomplete(path) is None:
            num_complete += 1


def _folders(out: Path) -> list[tuple[int, Path]]:
    """Step folders, newest first; one that has its name comes before the same step still growing."""
    found = []
    for path in (out / FOLDER).glob("step-*"):
        match = _NAME.fullmatch(path.name.removesuffix(GROWING))
        if match and path.is_dir():
            found.append((int(match[1]), path))
    return sorted(found, key=lambda item: (item[0], not item[1].name.endswith(GROWING)), reverse=True)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
