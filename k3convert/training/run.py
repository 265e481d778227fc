"""A whole run on one rank: build, resume, train, save, and try whether resuming changes a bit."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from k3convert.errors import UsageError
from k3convert.loading.checked_source import open_checked
from k3convert.training.checkpoints.saving import Saver
from k3convert.training.checkpoints.state import run_state
from k3convert.training.checkpoints.step_folders import newest_complete, step_path
from k3convert.training.data.open_source import open_source
from k3convert.training.events import Event, Noted, Stepped
from k3convert.training.kernel_trace import KernelTrace
from k3convert.training.metrics import MetricsLog, StepMetrics
from k3convert.training.outcome import KernelReport, Outcome, ResumeCheck
from k3convert.training.recipe import Recipe
from k3convert.training.state_digest import state_digest
from k3convert.training.trainer import Trainer
from k3model.parallel.mesh import Mesh

Tell = Callable[[Event], None]


def train(recipe: Recipe, checkpoint: Path, out: Path, *, resume: bool, profile: bool, tell: Tell) -> Outcome:
    """Train by a recipe. Every rank of the process group calls it alike; the first one writes the metrics.

    Args:
        recipe: what to do.
        checkpoint: what to start from.
        out: the run's folder.
        resume: go on from the newest complete step, where there is one.
        profile: record the second step that is done, or the only one.
        tell: hears of every step on the first rank.

    Raises:
        UsageError: the newest step is beyond the recipe's last.
        BadInput: checkpoint or data are wrong.
    """
    is_first = dist.get_rank() == 0
    device = _own_device(recipe.device)
    mesh = Mesh.build(recipe.degrees, device.type)
    checked = open_checked(checkpoint, num_layers=recipe.model.num_layers)
    source = open_source(recipe, checked.config, checkpoint)
    trainer = Trainer.build(recipe, checked, source, mesh, device)
    if is_first and trainer.stream.num_left_out:
        tell(Noted(f"{trainer.stream.num_left_out} of {len(source)} documents are longer than a row and are left out"))
    resumed_from = _resume(trainer, out, tell if is_first else _silent) if resume else 0
    log = MetricsLog.resumed(out, resumed_from) if is_first else None
    saving = recipe.saving
    saver = Saver(out, keep=saving.keep, asynchronous=saving.asynchronous, facts={"layout": recipe.layout})
    last = recipe.training.steps
    profiled = min(resumed_from + 2, last) if profile else 0
    kernels = None
    is_finite = True
    while is_finite and trainer.progress.step < last:
        if trainer.progress.step + 1 == profiled:
            metrics, kernels = _traced_step(trainer, out)
        else:
            metrics = trainer.advance()
        is_finite = metrics.nonfinite is None
        if log is not None:
            log.add(metrics)
            tell(Stepped(metrics, last))
        saver.poll()
        if saving.every and is_finite and (metrics.step % saving.every == 0 or metrics.step == last):
            saver.save(metrics.step, _state(trainer))
    saver.wait()
    routes = () if trainer.routes is None else tuple(tuple(counts) for counts in trainer.routes.tolist())
    num_parameters, planned_bytes = _num_parameters(trainer), _largest(trainer, trainer.state_bytes.total)
    vocab_size, routed_layers = checked.config.text.vocab_size, tuple(trainer.routers.layers)
    check = None
    if saving.every and is_finite:
        if is_first:
            tell(Noted(f"trying to resume from step {trainer.progress.step}"))
        without = _probe(trainer)
        del trainer  # the other one wants its memory
        gc.collect()
        other = Trainer.build(recipe, checked, source, mesh, device)
        other.resume(step_path(out, last))
        check = _compared(without, _probe(other))
    return Outcome(resumed_from, vocab_size, num_parameters, planned_bytes, check, kernels, routes, routed_layers)


def _probe(trainer: Trainer) -> tuple[StepMetrics, tuple[str, ...]]:
    """The next step, and a digest of all that it changed. A collective."""
    return trainer.advance(), state_digest(trainer.network, trainer.optimizer)


def _compared(without: tuple[StepMetrics, tuple[str, ...]], after: tuple[StepMetrics, tuple[str, ...]]) -> ResumeCheck:
    """Of a step without resuming and the same step after it."""
    losses = without[0].loss, after[0].loss
    return ResumeCheck(without[0].step, losses, is_bitwise=losses[0] == losses[1] and without[1] == after[1])


def _resume(trainer: Trainer, out: Path, tell: Tell) -> int:
    """Go to the newest complete step; its number, or 0. All ranks take what the first one finds."""
    found = [newest_complete(out)]
    dist.broadcast_object_list(found)
    for reason in found[0].skipped:
        tell(Noted(f"passed over {reason}"))
    if found[0].path is None:
        tell(Noted(f"no complete step in {out}: starting anew"))
        return 0
    if found[0].step > trainer.recipe.training.steps:
        raise UsageError(
            f"{out} is at step {found[0].step} already, beyond the {trainer.recipe.training.steps} of the recipe",
            hint="--steps is the number of steps of the whole run",
        )
    trainer.resume(found[0].path)
    tell(Noted(f"going on from step {found[0].step}"))
    return found[0].step


def _traced_step(trainer: Trainer, out: Path) -> tuple[StepMetrics, KernelReport]:
    """The next step, recorded; the first rank's trace is written."""
    trace = KernelTrace(trainer.network, trainer.recipe.ops, trainer.device.type)
    with trace.recording():
        metrics = trainer.advance()
    if dist.get_rank() == 0:
        trace.write(out)
    return metrics, trace.report(metrics.step)


def _state(trainer: Trainer) -> dict[str, Any]:
    return run_state(trainer.network, trainer.optimizer, trainer.mesh, trainer.progress)


def _largest(trainer: Trainer, number: int) -> int:
    """Of all ranks' numbers. A collective."""
    largest = torch.tensor(number, device=trainer.device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)


def _num_parameters(trainer: Trainer) -> tuple[int, int]:
    """Of the whole network and of what is trained; stages are added up, shards count in full."""
    counts = torch.tensor(
        [
            sum(parameter.numel() for parameter in trainer.network.parameters()),
            sum(parameter.numel() for parameter in trainer.network.parameters() if parameter.requires_grad),
        ],
        device=trainer.device,
    )
    dist.all_reduce(counts, group=trainer.mesh.group("pp"))
    total, trained = counts.tolist()
    return total, trained


def _own_device(device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())


def _silent(event: Event) -> None:
    """Ranks other than the first say nothing."""
