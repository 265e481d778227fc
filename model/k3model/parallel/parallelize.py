"""Put a network into a layout."""

from __future__ import annotations

import os
from dataclasses import dataclass

from torch import Tensor

from k3model.network import KimiK3ForConditionalGeneration
from k3model.parallel.context import LatentGatheringMla, StatePassingKda
from k3model.parallel.expert_dispatch import shard_experts
from k3model.parallel.fully_sharded import shard_parameters
from k3model.parallel.mesh import Mesh
from k3model.parallel.ulysses import GatheredKda, HeadShardedKda, HeadShardedMla
from k3model.text.kda_attention import KdaAttention
from k3model.text.mla_attention import MlaAttention
from k3model.text.moe import Experts

HEAD_SHARD_VARIABLE = "K3_KDA_HEAD_SHARD"


@dataclass(frozen=True, slots=True)
class SequenceShare:
    """Cuts a rank's run of consecutive tokens out of ``[B, T, ...]``."""

    place: int
    num_parts: int

    def __call__(self, x: Tensor) -> Tensor:
        """``[B, T, ...]`` to ``[B, T / num_parts, ...]``.

        Raises:
            ValueError: the parts would have different lengths.
        """
        if x.shape[1] % self.num_parts:
            raise ValueError(f"{x.shape[1]} tokens do not divide into {self.num_parts} parts; pad the sequence")
        return x.chunk(self.num_parts, dim=1)[self.place]


def parallelize(network: KimiK3ForConditionalGeneration, mesh: Mesh) -> None:
    """Change a network with the same whole weights on every rank into this rank's part of a layout, in place.

    Afterwards every rank of a row of the batch calls the network with the whole row, and gets the logits, the loss sum
    and the label count of its own run of tokens. See ``global_loss`` and ``sum_gradients`` for what follows.
    ``K3_KDA_HEAD_SHARD=0`` in the environment makes KDA layers under ``sp`` gather everything instead of their heads.

    Raises:
        ValueError: the environment's value is neither 0 nor 1, or an axis is asked for that has no form here.
        ValueError: heads or experts do not divide.
    """
    layout = mesh.layout
    # FSDP's reductions inside a KDA layer would wait for a rank that waits for the state's gradient.
    if layout.pp > 1 or (layout.cp > 1 and (layout.sp > 1 or layout.shards_parameters)):
        raise ValueError(f"{layout}: pipeline stages, and cp together with sp or fsdp, have no form in this version")
    shards_heads = _flag(HEAD_SHARD_VARIABLE)
    for module in network.modules():
        if isinstance(module, Experts) and layout.ep > 1:
            shard_experts(module, mesh.expert["ep"])
        elif isinstance(module, KdaAttention) and layout.sp > 1:
            _check_heads(module.b_proj.out_features, layout.sp)
            group = mesh.group("sp")
            module.parallel_forward = HeadShardedKda(group) if shards_heads else GatheredKda(group)
        elif isinstance(module, MlaAttention) and layout.sp > 1:
            _check_heads(module.config.num_heads, layout.sp)
            module.parallel_forward = HeadShardedMla(mesh.group("sp"))
        elif isinstance(module, KdaAttention) and layout.cp > 1:
            module.parallel_forward = StatePassingKda(mesh.group("cp"))
        elif isinstance(module, MlaAttention) and layout.cp > 1:
            module.parallel_forward = LatentGatheringMla(mesh.group("cp"))
    if layout.sequence_parts > 1:
        network.share_of_tokens = SequenceShare(mesh.place("cp") * layout.sp + mesh.place("sp"), layout.sequence_parts)
    if layout.shards_parameters:
        shard_parameters(network, mesh)


def _check_heads(num_heads: int, sp: int) -> None:
    if num_heads % sp:
        raise ValueError(f"{num_heads} heads do not divide into sp={sp}")


def _flag(variable: str) -> bool:
    value = os.environ.get(variable, "1")
    if value not in ("0", "1"):
        raise ValueError(f"{variable} is 0 or 1, got {value!r}")
    return value == "1"
