"""The axes that share one row of the batch: who has which tokens, and how attention layers run on a part of them."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from k3model.network import KimiK3ForConditionalGeneration
from k3model.parallel.context import LatentGatheringMla, StatePassingKda
from k3model.parallel.mesh import Mesh
from k3model.parallel.timing import KdaTiming, Phase, untimed, write_line
from k3model.parallel.ulysses import GatheredKda, HeadShardedKda, HeadShardedMla, mix_whole_rows
from k3model.text.kda_attention import KdaAttention
from k3model.text.mla_attention import MlaAttention

HEAD_SHARD_VARIABLE = "K3_KDA_HEAD_SHARD"
TIMING_VARIABLE = "K3_KDA_SP_TIMING"


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


def share_sequence(network: KimiK3ForConditionalGeneration, mesh: Mesh) -> None:
    """Have the network compute this rank's tokens of every row, in place. Without ``cp`` and ``sp`` nothing changes.

    That ``sp`` divides the heads is checked before. A row is cut into ``cp`` contiguous parts and each into ``sp``.
    Inside an attention layer the ranks of ``sp`` have the whole part of some heads each, and those of ``cp`` pass on
    what crosses a cut. ``K3_KDA_HEAD_SHARD=0`` in the environment makes KDA layers under ``sp`` gather everything
    instead of their heads; ``K3_KDA_SP_TIMING=1`` has them measured.

    Raises:
        ValueError: a value in the environment is neither 0 nor 1.
    """
    layout = mesh.layout
    shards_heads, is_timed = _flag(HEAD_SHARD_VARIABLE, "1"), _flag(TIMING_VARIABLE, "0")
    if layout.sequence_parts == 1:
        return
    # One for all layers: it cuts the documents of a batch once.
    passing = StatePassingKda(mesh.group("cp")) if layout.cp > 1 else None
    for name, module in network.named_modules():
        if isinstance(module, KdaAttention):
            if layout.sp == 1:
                module.parallel_forward = passing
                continue
            form = HeadShardedKda if shards_heads else GatheredKda
            phase = _timing(name, mesh) if is_timed else untimed
            mix = mix_whole_rows if passing is None else passing.mix
            module.parallel_forward = form(mesh.group("sp"), mix, phase)
        elif isinstance(module, MlaAttention):
            module.parallel_forward = (
                HeadShardedMla(mesh.group("sp"))
                if layout.cp == 1
                else LatentGatheringMla(mesh.group("cp"), mesh.group("sp") if layout.sp > 1 else None)
            )
    network.share_of_tokens = SequenceShare(mesh.place("cp") * layout.sp + mesh.place("sp"), layout.sequence_parts)
    if is_timed and layout.sp > 1 and dist.get_rank() == 0:
        write_line(f"{TIMING_VARIABLE}=1: KDA layers wait for the device around every phase; a line of JSON a layer")


def _timing(name: str, mesh: Mesh) -> Phase:
    rank = dist.get_rank()
    return KdaTiming(name, rank, mesh.dense.device_type, write_line if rank == 0 else None)


def _flag(variable: str, default: str) -> bool:
    value = os.environ.get(variable, default)
    if value not in ("0", "1"):
        raise ValueError(f"{variable} is 0 or 1, got {value!r}")
    return value == "1"
