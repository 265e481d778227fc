"""A checkpoint as a network in its layout, ready to be trained."""

from __future__ import annotations

from pathlib import Path

import torch

from k3convert.loading import load_model
from k3convert.training.fake_quantization import quantize_experts
from k3convert.training.parameter_groups import freeze
from k3convert.training.recipe import Recipe
from k3model.network import KimiK3ForConditionalGeneration
from k3model.parallel.mesh import Mesh
from k3model.parallel.parallelize import parallelize


def build_network(recipe: Recipe, checkpoint: Path, mesh: Mesh, device: torch.device) -> KimiK3ForConditionalGeneration:
    """Load a checkpoint into float32 masters, and lay them out. A collective.

    Raises:
        BadInput: the checkpoint is no complete K3 checkpoint.
        RuntimeError: an implementation cannot run here.
    """
    network = load_model(
        checkpoint, dtype=torch.float32, device=device, ops=recipe.ops, num_layers=recipe.model.num_layers
    )
    freeze(network, recipe.training.freeze)
    network.set_activation_checkpointing(recipe.model.activation_checkpointing)
    if recipe.training.fake_quantization:
        quantize_experts(network)
    parallelize(network, mesh)
    return network.train()
