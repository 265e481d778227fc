"""Put a network into a layout."""

from __future__ import annotations

from k3model.network import KimiK3ForConditionalGeneration
from k3model.parallel.expert_dispatch import shard_experts
from k3model.parallel.fully_sharded import shard_parameters
from k3model.parallel.mesh import Mesh
from k3model.parallel.pipeline import keep_stage
from k3model.parallel.sequence import share_sequence
from k3model.text.moe import Experts


def parallelize(network: KimiK3ForConditionalGeneration, mesh: Mesh) -> None:
    """Change a network with the same whole weights on every rank into this rank's part of a layout, in place.

    Afterwards every rank of a row of the batch calls the network with the whole row, and gets the logits, the loss sum
    and the label count of its own run of tokens. See ``global_loss`` and ``sum_gradients`` for what follows.
    See ``share_sequence`` for what the environment changes under ``sp``.

    Raises:
        ValueError: the environment's value is neither 0 nor 1, or an axis is asked for that has no form here.
        ValueError: heads or experts do not divide.
    """
    layout = mesh.layout
    keep_stage(network, mesh.place("pp"), layout.pp)
    if layout.ep > 1:
        for module in network.modules():
            if isinstance(module, Experts):
                shard_experts(module, mesh.expert["ep"])
    share_sequence(network, mesh)
    if layout.shards_parameters:
        shard_parameters(network, mesh)
