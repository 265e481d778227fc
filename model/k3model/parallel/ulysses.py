"""Sequence parallelism by exchanging the sequence for heads, as DeepSpeed-Ulysses does (arXiv 2309.14509)."""

from __future__ import annotations

from abc import ABC, abstractmethod
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


class _ExchangingKda(ABC):
    """KDA whose recurrence runs on more tokens than the rank's own.

    The projections and the output gate stay with the rank's tokens. One exchange carries what the recurrence reads, a
    second brings the heads' outputs back.

    Args:
        group: the ranks of ``sp``.
        mix: what runs between the exchanges.
        phase: measures a phase.
    """

    def __init__(self, group: dist.ProcessGroup, mix: MixHeads, phase: Phase) -> None:
        self.group, self.mix, self.phase = group, mix, phase

    def __call__(self, attention: KdaAttention, x_BTD: Tensor, documents: Documents) -> Tensor:
        """``[B, T / n, hidden]`` to ``[B, T / n, hidden]``; ``documents`` are those of all tokens."""
        with self.phase(LAYER):
            with self.phase("project"):
                streams = attention.project(x_BTD)
            with self.phase("gather"):
                widths = [stream.shape[-1] for stream in streams]
                arrived = self.gather(torch.cat(streams, dim=-1))
                streams = KdaStreams(*torch.split(arrived, widths, dim=-1))
            o = self.mix(attention, streams, documents, self.heads_of(streams.q.shape[2]), self.phase)
            with self.phase("scatter"):
                o = self.scatter(o)
            with self.phase("output"):
                return attention.output(o, x_BTD)

    @abstractmethod
    def gather(self, x_BTHC: Tensor) -> Tensor:
        """All heads of the rank's own tokens to some heads of all tokens."""

    @abstractmethod
    def heads_of(self, num_heads: int) -> slice:
        """Which heads those are, given how many."""

    @abstractmethod
    def scatter(self, o_BTHV: Tensor) -> Tensor:
        """Some heads of all tokens to all heads of the rank's own tokens."""


class HeadShardedKda(_ExchangingKda):
    """KDA with all tokens of ``H / n`` heads on every rank: convolutions and decay are sliced by head."""

    def gather(self, x_BTHC: Tensor) -> Tensor:
        """``[B, T / n, H, C]`` to ``[B, T, H / n, C]``."""
        return sequence_to_heads(x_BTHC, self.group)

    def heads_of(self, num_heads: int) -> slice:
        """The rank's own run."""
        first = dist.get_rank(self.group) * num_heads
        return slice(first, first + num_heads)

    def scatter(self, o_BTHV: Tensor) -> Tensor:
        """``[B, T, H / n, V]`` to ``[B, T / n, H, V]``."""
        return heads_to_sequence(o_BTHV, self.group)


class GatheredKda(_ExchangingKda):
    """KDA with all heads of all tokens on every rank, of which the rank keeps its own tokens."""

    def gather(self, x_BTHC: Tensor) -> Tensor:
        """``[B, T / n, H, C]`` to ``[B, T, H, C]``."""
        return gather_sequence(x_BTHC, self.group)

    def heads_of(self, num_heads: int) -> slice:
        """All of them."""
        return slice(0, num_heads)

    def scatter(self, o_BTHV: Tensor) -> Tensor:
        """``[B, T, H, V]`` to ``[B, T / n, H, V]``; nothing is sent."""
        return o_BTHV.chunk(dist.get_world_size(self.group), dim=1)[dist.get_rank(self.group)]


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
