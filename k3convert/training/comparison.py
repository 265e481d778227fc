"""Implementations side by side: which ones ``--compare-impl`` names, and whether their curves stay together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from k3convert.errors import UsageError
from k3convert.training.curves import relative_distances
from k3convert.training.metrics import StepMetrics
from k3convert.training.recipe import Recipe
from k3convert.training.registered_ops import OPS_FIELDS, has_impl, unregistered
from k3convert.training.verdict import Check, Result
from k3kernels.selection import EAGER

SUFFIX = "_implementation"
AS_WRITTEN = "recipe"


def variants(recipe: Recipe, names: str) -> dict[str, Recipe]:
    """The recipes that a list of implementations stands for, the reference first.

    ``eager`` runs every op eagerly, ``recipe`` is the recipe as it is written. The name of an implementation puts it
    wherever it is registered, ``OP=NAME`` (several with ``+``) in one place; the rest is as the recipe has it.

    Args:
        recipe: what is compared.
        names: separated by commas.

    Raises:
        UsageError: fewer than two different names, or names that stand for nothing, all of them.
    """
    wanted = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    faults: list[str] = []
    found: dict[str, Recipe] = {}
    for name in wanted:
        try:
            ops = _ops(recipe, name)
        except ValueError as error:
            faults.append(f"{name}: {error}")
            continue
        found[name] = recipe.model_copy(update={"ops": ops})
    if faults:
        raise UsageError(f"--compare-impl {names}: {len(faults)} names stand for nothing", offenders=faults)
    if len(found) < 2:
        raise UsageError(f"--compare-impl {names}: name two implementations or more, the reference first")
    return found


def _ops(recipe: Recipe, name: str) -> dict[str, str]:
    if name == EAGER:
        return {}
    if name == AS_WRITTEN:
        return dict(recipe.ops)
    if "=" not in name:
        chosen = {field: name for field in OPS_FIELDS if has_impl(field, name)}
        if not chosen:
            raise ValueError("no op has an implementation of that name")
        return {**recipe.ops, **chosen}
    chosen = {}
    for part in name.split("+"):
        short, _, impl = part.partition("=")
        field = short if short.endswith(SUFFIX) else f"{short}{SUFFIX}"
        if field not in OPS_FIELDS:
            raise ValueError(f"no op {short!r}; there are: {', '.join(f.removesuffix(SUFFIX) for f in OPS_FIELDS)}")
        if fault := unregistered(field, impl):
            raise ValueError(fault)
        chosen[field] = impl
    return {**recipe.ops, **chosen}


@dataclass(frozen=True, slots=True)
class Distance:
    """How far a run's losses are from the reference's: the most, and at which step."""

    name: str
    largest: float
    step: int


def distances(runs: dict[str, Sequence[StepMetrics]]) -> list[Distance]:
    """Of every run but the first, which is the reference."""
    reference, *others = runs
    found = []
    for name in others:
        apart = relative_distances([m.loss for m in runs[name]], [m.loss for m in runs[reference]])
        largest = max(apart, default=0.0)
        found.append(Distance(name, largest, runs[name][apart.index(largest)].step if apart else 0))
    return found


def judge_envelope(runs: dict[str, Sequence[StepMetrics]], envelope: float) -> list[Check]:
    """Whether every run's losses stay within a relative distance of the reference's at every step."""
    reference = next(iter(runs))
    return [
        Check(
            f"{found.name} follows {reference}",
            Result.PASSED if found.largest <= envelope else Result.FAILED,
            f"losses are at most {found.largest:.2%} apart (step {found.step}); {envelope:.2%} is allowed",
        )
        for found in distances(runs)
    ]
