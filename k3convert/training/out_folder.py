"""The folder of a run: its recipe, its metrics, its checkpoints, its report."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from k3convert.errors import DestinationExists, ResumeRefused, UsageError
from k3convert.training.metrics import METRICS_NAME
from k3convert.training.recipe import Recipe
from k3convert.training.recipe_reading import parse_recipe, recipe_yaml

RECIPE_NAME = "recipe.yaml"
REPORT_NAME = "report.html"
VERDICT_NAME = "verdict.json"
BASE_NAME = "base"

# What may differ when a run goes on: where and how it computes, how long, what is kept and expected. The rest decides
# which numbers it computes.
_FREE = ("description", "device", "ops", "layout", "saving", "expect", "step_timeout_s")
_FREE_INSIDE = {"training": ("steps",), "model": ("activation_checkpointing",)}


def claim(out: Path, recipe: Recipe, *, resume: bool) -> None:
    """Make the folder ready for a recipe.

    Raises:
        DestinationExists: it holds files of somebody else's, or a run, and ``resume`` is off.
        ResumeRefused: it holds the run of a recipe that computes other numbers.
        UsageError: its parent is no folder.
    """
    if not out.parent.is_dir():
        raise UsageError(f"{out.parent} is not a folder")
    path = out / RECIPE_NAME
    if path.exists() and (out / METRICS_NAME).exists():
        if not resume:
            raise DestinationExists(f"{out} holds a run", hint="--resume goes on with it; --out names another folder")
        earlier = parse_recipe(path.read_text("utf-8"), where=str(path))
        differing = differences(earlier, recipe)
        if differing:
            raise ResumeRefused(
                f"{out} holds a run of another recipe: {len(differing)} fields differ", offenders=differing
            )
    elif path.exists():
        # No step was ever begun here; what was generated may be another recipe's.
        shutil.rmtree(out / BASE_NAME, ignore_errors=True)
    elif out.exists() and any(out.iterdir()):
        raise DestinationExists(f"{out} holds files that are no run", hint="--out names another folder")
    out.mkdir(exist_ok=True)
    path.write_text(recipe_yaml(recipe), "utf-8")


def differences(earlier: Recipe, now: Recipe) -> list[str]:
    """The fields that make two recipes compute different numbers, with both values."""
    before, after = _binding(earlier.model_dump(mode="json")), _binding(now.model_dump(mode="json"))
    return [
        f"{key}: {before.get(key)!r} there, {after.get(key)!r} now"
        for key in sorted({**before, **after})
        if before.get(key) != after.get(key)
    ]


def _binding(document: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys and values of everything that must stay."""
    out: dict[str, Any] = {}
    for name, block in document.items():
        if name in _FREE:
            continue
        if not isinstance(block, dict):
            out[name] = block
            continue
        out |= {f"{name}.{key}": value for key, value in block.items() if key not in _FREE_INSIDE.get(name, ())}
    return out
