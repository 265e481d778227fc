"""Starts a run's ranks: a pool of this host's own, or the ranks that torchrun has started already."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from k3convert.errors import UsageError
from k3convert.ranks import RankPool
from k3convert.ranks.worker import BACKENDS
from k3convert.training.events import Event
from k3convert.training.outcome import Outcome
from k3convert.training.progress_channel import ProgressChannel
from k3convert.training.recipe import Recipe
from k3convert.training.recipe_reading import recipe_yaml

ENTRY = "k3convert.training.rank_entry:train_here"
# From the start of the ranks to the first step: reading the checkpoint and the data.
START_S = 1800.0
# Of one collective under torchrun: a rank may be reading or writing for as long.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)


def is_under_torchrun() -> bool:
    """Whether a launcher has started this process as one of several ranks."""
    return "TORCHELASTIC_RUN_ID" in os.environ or {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()


def is_first() -> bool:
    """Whether this process speaks and writes: the only one, or rank 0."""
    return not is_under_torchrun() or os.environ["RANK"] == "0"


def run_in_pool(
    recipe: Recipe, checkpoint: Path, out: Path, *, resume: bool, profile: bool, tell: Callable[[Event], None]
) -> Outcome:
    """Train on ranks of this host, which live as long as the run.

    Raises:
        RanksFailed, RanksSilent: ranks raised, died, or did not answer in time.
        K3Error: what all ranks raised alike.
    """
    arguments = {
        "recipe_yaml": recipe_yaml(recipe),
        "checkpoint": str(checkpoint.absolute()),
        "out": str(out.absolute()),
        "resume": resume,
        "profile": profile,
    }
    timeout_s = START_S + recipe.step_timeout_s * recipe.training.steps
    with (
        ProgressChannel(tell, secrets.token_bytes(16)) as channel,
        RankPool(recipe.degrees.world_size, device_type=recipe.device) as pool,
    ):
        answers: list[Outcome] = pool.run(ENTRY, {**arguments, "address": channel.address}, timeout_s=timeout_s)
    return answers[0]


def join_launcher(recipe: Recipe) -> None:
    """Enter the process group of the ranks that a launcher started.

    Raises:
        UsageError: it started another number of ranks than the layout needs.
    """
    import torch
    import torch.distributed as dist

    found, wanted = int(os.environ["WORLD_SIZE"]), recipe.degrees.world_size
    if found != wanted:
        raise UsageError(f"the launcher started {found} ranks, layout {recipe.layout or '(one rank)'!r} needs {wanted}")
    if recipe.device == "cpu":
        torch.set_num_threads(1)
    else:
        torch.get_device_module(recipe.device).set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(BACKENDS[recipe.device], timeout=COLLECTIVE_TIMEOUT)


def wait_for_first() -> None:
    """Hold ranks of a launcher until all are here: what the first one wrote is then there."""
    if is_under_torchrun():
        import torch.distributed as dist

        dist.barrier()


def run_in_place(
    recipe: Recipe, checkpoint: Path, out: Path, *, resume: bool, profile: bool, tell: Callable[[Event], None]
) -> Outcome:
    """Train as one of the ranks that a launcher started, after ``join_launcher``."""
    from k3convert.training.run import train

    return train(recipe, checkpoint, out, resume=resume, profile=profile, tell=tell)
