"""A checkpoint as a network in its layout, ready to be trained."""

from __future__ import annotations

import torch

from k3convert.loading.checked_source import CheckedSource
from k3convert.loading.filling import fill
from k3convert.training.fake_quantization import quantize_experts
from k3convert.training.parameter_groups import freeze
from k3convert.training.recipe import Compute, Recipe
from k3model.network import KimiK3ForConditionalGeneration
from k3model.parallel.mesh import Mesh
from k3model.parallel.parallelize import materialise, parallelize
from k3model.parallel.state import sharded_state


def build_network(
    recipe: Recipe, source: CheckedSource, mesh: Mesh, device: torch.device
) -> KimiK3ForConditionalGeneration:
    """Lay a network out without memory, then read this rank's part of a checkpoint into float32 masters. A collective.

    Raises:
        BadInput: a file of the checkpoint is damaged.
        RuntimeError: an implementation cannot run here.
    """
    with torch.device("meta"):
        network = KimiK3ForConditionalGeneration(source.config, recipe.ops)
    network.to(torch.float32)
    freeze(network, recipe.training.freeze)
    network.set_activation_checkpointing(recipe.model.activation_checkpointing)
    if recipe.training.fake_quantization:
        quantize_experts(network)
    parallelize(network, mesh, compute_dtype=torch.bfloat16 if recipe.compute is Compute.BF16 else None)
    materialise(network, device)
    fill(sharded_state(network, mesh), source)
    return network.train()
