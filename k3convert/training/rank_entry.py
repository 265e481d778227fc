"""What a rank of a pool is asked to do."""

from __future__ import annotations

from contextlib import closing, nullcontext
from pathlib import Path

import torch.distributed as dist

from k3convert.training.outcome import Outcome
from k3convert.training.progress_channel import Address, ProgressSender
from k3convert.training.recipe_reading import parse_recipe
from k3convert.training.run import train


def train_here(
    *, recipe_yaml: str, checkpoint: str, out: str, resume: bool, profile: bool, address: Address
) -> Outcome:
    """Train as ``run.train`` does; the first rank sends its events to the process that asked."""
    sender = ProgressSender(address) if dist.get_rank() == 0 else None
    with nullcontext() if sender is None else closing(sender):
        return train(
            parse_recipe(recipe_yaml),
            Path(checkpoint),
            Path(out),
            resume=resume,
            profile=profile,
            tell=_silent if sender is None else sender,
        )


def _silent(event: object) -> None:
    """Only the first rank speaks."""
