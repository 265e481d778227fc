"""Reads a saved step into a run that is already laid out, under the same layout or another."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from k3convert.training.checkpoints.state import Progress, run_state, set_generator_states
from k3model.network import KimiK3ForConditionalGeneration
from k3model.parallel.mesh import Mesh


def load_step(
    folder: Path, network: KimiK3ForConditionalGeneration, optimizer: torch.optim.Optimizer, mesh: Mesh
) -> Progress:
    """Fill network and optimizer in place, and set this rank's generators where the step has them. A collective.

    A rank that the saving run did not have keeps its generators as they are seeded.
    """
    state = run_state(network, optimizer, mesh, Progress())
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    rank = str(dist.get_rank())
    has_generators = all(f"rng.{rank}.{name}" in stored for name in state["rng"][rank])
    if not has_generators:
        del state["rng"]
    load(state, checkpoint_id=folder)
    if has_generators:
        set_generator_states(state["rng"][rank], next(network.parameters()).device)
    return Progress.of(state["progress"])
