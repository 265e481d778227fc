"""``smoke-train`` as a function: from a recipe to a verdict and a report."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3convert.checkpoint.hub import resolve_source
from k3convert.errors import NotPossibleHere, UsageError
from k3convert.layout.legality import check_layout
from k3convert.synthesis import make_checkpoint
from k3convert.training.checkpoint_files import checkpoint_config
from k3convert.training.comparison import judge_envelope, variants
from k3convert.training.events import Event, Noted
from k3convert.training.launch import (
    is_first,
    is_under_torchrun,
    join_launcher,
    run_in_place,
    run_in_pool,
    wait_for_first,
)
from k3convert.training.metrics import MetricsLog, Speed
from k3convert.training.out_folder import BASE_NAME, REPORT_NAME, VERDICT_NAME, claim
from k3convert.training.outcome import Outcome
from k3convert.training.recipe import Recipe, SyntheticData
from k3convert.training.training_report import RunRecord, write_report
from k3convert.training.verdict import Verdict, judge
from k3kernels.selection import OpsConfig

Tell = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class SmokeResult:
    """What a command run ends with, for its reader."""

    out: Path
    records: tuple[RunRecord, ...]
    verdict: Verdict

    def document(self) -> dict[str, Any]:
        """The result as a JSON object."""
        return {
            **self.verdict.document(),
            "out": str(self.out),
            "report": str(self.out / REPORT_NAME),
            "runs": [record.document() for record in self.records],
        }


def smoke_train(
    recipe: Recipe,
    out: Path,
    *,
    resume: bool = False,
    compare_impl: str | None = None,
    profile: bool = False,
    tell: Tell,
) -> SmokeResult | None:
    """Run a recipe, judge the run, and write ``report.html`` and ``verdict.json``.

    Args:
        recipe: what to do.
        out: the run's folder.
        resume: go on from the newest complete step of an earlier run there.
        compare_impl: implementations to run one after the other and compare, see ``comparison.variants``.
        profile: record a step's kernels, and judge them.
        tell: hears of every step.

    Returns:
        The result; None on ranks of a launcher other than the first.

    Raises:
        UsageError, BadInput: the recipe, the layout, the checkpoint or the data cannot be used together.
        NotPossibleHere: the device or an implementation is missing on this machine.
        WorkerDied: ranks failed.
    """
    recipes = {"": recipe} if compare_impl is None else variants(recipe, compare_impl)
    for one in recipes.values():
        _check_possible(one)
    if is_under_torchrun():
        join_launcher(recipe)
    if is_first():
        claim(out, recipe, resume=resume)
    checkpoint = _checkpoint(recipe, out, tell)
    wait_for_first()
    _check_network(recipe, checkpoint)
    records: list[RunRecord] = []
    for name, one in recipes.items():
        folder = out / name if name else out
        if is_first() and name:
            claim(folder, one, resume=resume)
            tell(Noted(f"running with {name}"))
        run = run_in_place if is_under_torchrun() else run_in_pool
        outcome = run(one, checkpoint, folder, resume=resume, profile=profile, tell=tell)
        if is_first():
            records.append(_record(name or "run", one, folder, outcome))
    if not is_first():
        return None
    checks = [check for record in records for check in record.named_checks(several=len(records) > 1)]
    if len(records) > 1:
        checks += judge_envelope({record.name: record.steps for record in records}, recipe.expect.envelope)
    verdict = Verdict(tuple(checks))
    result = SmokeResult(out, tuple(records), verdict)
    (out / VERDICT_NAME).write_text(json.dumps(result.document(), indent=1) + "\n", "utf-8")
    write_report(out / REPORT_NAME, recipe, records, verdict)
    return result


def _check_possible(recipe: Recipe) -> None:
    """Refuse what cannot run, here or anywhere, before anything is written."""
    if not isinstance(recipe.data, SyntheticData) and not recipe.data_path().is_file():
        raise UsageError(f"{recipe.data_path()} is not a file")
    if recipe.device != "cpu":
        _check_devices(recipe)
    if problems := OpsConfig.of(recipe.ops).problems(recipe.device):
        raise NotPossibleHere(f"{len(problems)} implementations cannot run here", offenders=problems)


def _check_devices(recipe: Recipe) -> None:
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != recipe.device:
        found = "none" if accelerator is None else accelerator.type
        raise NotPossibleHere(
            f"the recipe wants a {recipe.device} device; this machine has {found}",
            hint="--set device=cpu, with ops that run there, or another machine",
        )
    num_devices = torch.accelerator.device_count()
    if recipe.degrees.world_size > num_devices and not is_under_torchrun():
        raise NotPossibleHere(
            f"layout {recipe.layout} needs {recipe.degrees.world_size} devices, this host has {num_devices}",
            hint="a smaller --layout, or torchrun over several hosts",
        )


def _checkpoint(recipe: Recipe, out: Path, tell: Tell) -> Path:
    """The checkpoint to start from; one is generated where the recipe names none."""
    if recipe.model.checkpoint is not None:
        return resolve_source(recipe.model.checkpoint, download=False)
    generated = recipe.model.generate
    if generated is None:
        raise UsageError("the recipe names no checkpoint", hint="--checkpoint CKPT, a folder or a hub id")
    base = out / BASE_NAME
    if is_first() and not base.exists():
        tell(Noted(f"making a checkpoint of random values: {base}"))
        make_checkpoint(
            base,
            preset=generated.preset,
            num_layers=generated.num_layers,
            num_experts=generated.num_experts,
            seed=generated.seed,
        )
    return base


def _check_network(recipe: Recipe, checkpoint: Path) -> None:
    config = checkpoint_config(checkpoint, recipe.model.num_layers)
    check_layout(recipe.degrees, config, batch=recipe.batch.global_rows, sequence=recipe.batch.sequence_length)


def _record(name: str, recipe: Recipe, folder: Path, outcome: Outcome) -> RunRecord:
    steps = MetricsLog.read(folder).steps
    return RunRecord(name, recipe, tuple(steps), outcome, judge(recipe, steps, outcome), Speed.of(steps))
