"""Sequence parallelism by exchanging the sequence for heads, as DeepSpeed-Ulysses does (arXiv 2309.14509)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from k3model.parallel.exchange import gather_sequence, heads_to_sequence, sequence_to_heads
from k3model.parallel.timing import LAYER, Phase, untimed
from k3model.text.documents import Documents
from k3model.text.kda_attention import KdaAttention, KdaStreams
from k3model.text.mla_attention import MlaAttention


class MixHeads(Protocol):
    """Convolutions and recurrence of some heads along all tokens that the ranks of ``sp`` have together."""

    def __call__(
        self, attention: KdaAttention, streams: KdaStreams, documents: Documents, heads: slice, phase: Phase = untimed
    ) -> Tensor:
        """``[B, T, H, V]`` of these heads, zero at padding; ``documents`` are those of the whole batch."""


def mix_whole_rows(
    attention: KdaAttention, streams: KdaStreams, documents: Documents, heads: slice, phase: Phase = untimed
) -> Tensor:
    """Where ``T`` is the whole row: padding is taken out after the exchange, which needs as many tokens of every rank.

    It comes back as zeros.
    """
    batch, tokens = streams.q.shape[:2]
    with phase("conv"):
        packed = KdaStreams(*(documents.pack(stream) for stream in streams))
        inputs = attention.prepare(packed, documents.cu_seqlens, heads=heads)
    with phase("kernel"):
        o, _ = attention.recur(inputs, documents.cu_seqlens)
        return documents.unpack(o, batch, tokens)


class HeadShardedKda:
    """KDA with all tokens of ``H / n`` heads on every rank, so that the recurrence is exact.

    The projections and the output gate stay with the rank's tokens. One exchange carries what the recurrence reads;
    convolutions and decay are sliced by head; a second exchange carries the heads' outputs back.

    Args:
        group: the ranks of ``sp``.
        mix: what runs between the exchanges.
        phase: measures a phase.
    """

    def __init__(self, group: dist.ProcessGroup, mix: MixHeads = mix_whole_rows, phase: Phase = untimed) -> None:
        self.group, self.mix, self.phase = group, mix, phase

    def __call__(self, attention: KdaAttention, x_BTD: Tensor, documents: Documents) -> Tensor:
        """``[B, T / n, hidden]`` to ``[B, T / n, hidden]``; ``documents`` are those of all tokens."""
        with self.phase(LAYER):
            with self.phase("project"):
                streams = attention.project(x_BTD)
            with self.phase("gather"):
                mine = _split(sequence_to_heads(torch.cat(streams, dim=-1), self.group), streams)
            first = dist.get_rank(self.group) * mine.q.shape[2]
            o = self.mix(attention, mine, documents, slice(first, first + mine.q.shape[2]), self.phase)
            with self.phase("scatter"):
                o = heads_to_sequence(o, self.group)
            with self.phase("output"):
                return attention.output(o, x_BTD)


class GatheredKda:
    """KDA with everything on every rank: all heads of all tokens, of which the rank keeps its own tokens.

    Args:
        group: the ranks of ``sp``.
        mix: what runs on all tokens.
        phase: measures a phase.
    """

    def __init__(self, group: dist.ProcessGroup, mix: MixHeads = mix_whole_rows, phase: Phase = untimed) -> None:
        self.group, self.mix, self.phase = group, mix, phase

    def __call__(self, attention: KdaAttention, x_BTD: Tensor, documents: Documents) -> Tensor:
        """``[B, T / n, hidden]`` to ``[B, T / n, hidden]``; ``documents`` are those of all tokens."""
        with self.phase(LAYER):
            with self.phase("project"):
                streams = attention.project(x_BTD)
            with self.phase("gather"):
                everything = _split(gather_sequence(torch.cat(streams, dim=-1), self.group), streams)
            o = self.mix(attention, everything, documents, slice(0, streams.q.shape[2]), self.phase)
            with self.phase("scatter"):
                o = o.chunk(dist.get_world_size(self.group), dim=1)[dist.get_rank(self.group)]
            with self.phase("output"):
                return attention.output(o, x_BTD)


class HeadShardedMla:
    """MLA with the whole sequence of ``H / n`` heads on every rank.

    One exchange carries queries, keys and values of every head. The key channels that all heads share are gathered
    once, and not multiplied by the number of heads first.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(self, attention: MlaAttention, x_BTD: Tensor, documents: Documents) -> Tensor:
        """``[B, T / n, hidden]`` to ``[B, T / n, hidden]``; ``documents`` are those of all ``T`` tokens."""
        q = attention.queries(x_BTD)
        latent, shared = attention.compress(x_BTD)
        key_value = attention.expand(latent)
        exchanged = sequence_to_heads(torch.cat((q, key_value), dim=-1), self.group)
        q, key_value = torch.split(exchanged, [q.shape[-1], key_value.shape[-1]], dim=-1)
        o = attention.mix(q, key_value, gather_sequence(shared, self.group), documents)
        return attention.output(heads_to_sequence(o, self.group), x_BTD)


def _split(joined: Tensor, like: Sequence[Tensor]) -> KdaStreams:
    return KdaStreams(*torch.split(joined, [stream.shape[-1] for stream in like], dim=-1))
