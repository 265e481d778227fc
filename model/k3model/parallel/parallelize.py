"""Put a network into a layout."""

from __future__ import annotations

import torch

from k3model.network import KimiK3ForConditionalGeneration
from k3model.parallel.expert_dispatch import shard_experts
from k3model.parallel.fully_sharded import shard_parameters
from k3model.parallel.legality import network_problems
from k3model.parallel.mesh import Mesh
from k3model.parallel.pipeline import keep_stage
from k3model.parallel.sequence import share_sequence
from k3model.text.moe import Experts


def parallelize(
    network: KimiK3ForConditionalGeneration, mesh: Mesh, *, compute_dtype: torch.dtype | None = None
) -> None:
    """Change a network with the same whole weights on every rank into this rank's part of a layout, in place.

    Afterwards every rank of a row of the batch gets the whole row, and computes its own run of tokens; see
    ``forward_backward``. See ``share_sequence`` for what the environment changes under ``sp``.

    Args:
        network: on a device, or on ``meta``: nothing is allocated then, and ``materialise`` comes after. Freeze
            parameters before, not after.
        mesh: the layout's.
        compute_dtype: where parameters are float32 and computed with in another dtype: each is cast where it is used,
            but for those that stay float32, and gradients are float32. None computes in the storage dtype.

    Raises:
        ValueError: the network cannot be laid out so, with every reason, or parameters to be cast are not float32;
            nothing has changed then. A value in the environment is neither 0 nor 1.
    """
    layout = mesh.layout
    if problems := network_problems(layout, network.config):
        raise ValueError("the network cannot be laid out so: " + "; ".join(problem.reason for problem in problems))
    if compute_dtype is not None:
        _check_master(network)
    # FSDP2 does the casts of replicated parameters too, in units of one rank each.
    casts_alone = compute_dtype not in (None, torch.float32) and not layout.shards_parameters
    meshes = mesh.units_of_one_rank if casts_alone else mesh.shared_units
    keep_stage(network, mesh.place("pp"), layout.pp)
    if layout.ep > 1:
        for module in network.modules():
            if isinstance(module, Experts):
                shard_experts(module, meshes.ep)
    share_sequence(network, mesh)
    if layout.shards_parameters or casts_alone:
        shard_parameters(network, meshes, compute_dtype)


def materialise(network: KimiK3ForConditionalGeneration, device: torch.device | str) -> None:
    """Give a network on ``meta`` its memory, in its layout: every parameter and buffer is NaN until it is filled.

    ``sharded_state`` has all of them by name; a checkpoint that lacks one leaves numbers that nobody can overlook.
    """
    network.to_empty(device=device)
    if network.is_first_stage and network.is_last_stage:
        network.language_model.tie_weights()
    with torch.no_grad():
        for tensor in (*network.parameters(), *network.buffers()):
            tensor.fill_(torch.nan)


def _check_master(network: KimiK3ForConditionalGeneration) -> None:
    others = [name for name, parameter in network.named_parameters() if parameter.dtype != torch.float32]
    if others:
        raise ValueError(
            f"{len(others)} parameters are not float32, which a compute dtype is cast from: {', '.join(others[:3])}"
        )
