"""Context parallelism: contiguous runs of a sequence, with KDA's state passed on and MLA's latent gathered.

Every rank of a group enters the same collectives at the same places of the graph, forward and backward, whatever its
number and wherever documents begin. FSDP puts collectives of its own between them: a rank that waited for its
neighbour there would wait for one that waits for it.

Shape suffixes: N = documents among a rank's own tokens, S = kept inputs of the convolutions; else as in the network.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from k3model.parallel.document_parts import DocumentParts, PartOfDocuments
from k3model.parallel.exchange import gather_sequence, heads_to_sequence, sequence_to_heads
from k3model.parallel.timing import Phase, untimed
from k3model.text.decay_gate import ALL
from k3model.text.documents import Documents
from k3model.text.kda_attention import KdaAttention, KdaInputs, KdaStreams
from k3model.text.mla_attention import MlaAttention


class StatePassingKda:
    """KDA on a rank's own tokens, from the inputs and the state that the ranks before it leave.

    A rank's tokens change the state ``S`` that they meet to ``M S + L``, an affine map a head. All ranks compute their
    maps at the same time, gather them, and chain those before them into their own first state; then all run the
    recurrence at the same time. Source: Kimi K3 report, section 5.1.2, equation 17.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.parts = DocumentParts(dist.get_rank(group), dist.get_world_size(group))

    def __call__(self, attention: KdaAttention, x_BTD: Tensor, documents: Documents) -> Tensor:
        """``[B, T / n, hidden]`` to ``[B, T / n, hidden]``; ``documents`` are those of all ``T`` tokens."""
        return attention.output(self.mix(attention, attention.project(x_BTD), documents, ALL), x_BTD)

    def mix(
        self, attention: KdaAttention, streams: KdaStreams, documents: Documents, heads: slice, phase: Phase = untimed
    ) -> Tensor:
        """Convolutions and recurrence of some heads or all: ``[B, T / n, H, V]``, zero at padding."""
        part = self.parts.of(documents, streams.q.shape[1])
        with phase("conv"):
            # Zeros before a row's tokens give zero keys, which leave the state at zero; nothing reads it behind them.
            streams = KdaStreams(*(part.without_padding(stream) for stream in streams))
            history = self._history(attention, streams, part)
            inputs = attention.prepare(streams, part.cu_seqlens, history, heads=heads)
        with phase("kernel"):
            left, transition = _state_map(attention, inputs, part.open_from)
            state = _state_before(left, transition, part.first_ranks, self.group)
            o, _ = attention.recur(inputs, part.cu_seqlens, part.for_first_document(state))
        return part.without_padding(o)

    def _history(self, attention: KdaAttention, streams: KdaStreams, part: PartOfDocuments) -> Tensor:
        """What the convolutions read before each document here: ``[N, 3 * H * K, S]``, zeros but for the first."""
        inputs_BTC = torch.cat([stream.flatten(-2) for stream in streams[:3]], dim=-1)
        num_kept = attention.q_conv1d.weight.shape[-1] - 1
        tail_BSC = inputs_BTC[:, -num_kept:] if num_kept else inputs_BTC[:, :0]
        # The last inputs of all ranks. Where parts are shorter than what is kept, these are all inputs.
        seen = pad(gather_sequence(tail_BSC, self.group), (0, 0, num_kept, 0))
        history_BSC = seen.narrow(1, dist.get_rank(self.group) * tail_BSC.shape[1], num_kept)
        is_before = torch.arange(num_kept, device=seen.device) < num_kept - part.tokens_before
        history_BSC = history_BSC.masked_fill(is_before[:, None], 0)
        return part.for_first_document(history_BSC.transpose(1, 2))


class LatentGatheringMla:
    """MLA with the queries of a rank's own tokens and the keys and values of all.

    What is gathered is the compressed latent and the shared key channels, which are narrower than keys and values.
    Every rank expands them itself: all heads, or under ``sp`` its own, for which queries are exchanged.

    Args:
        group: the ranks of ``cp``.
        heads_group: the ranks of ``sp``, which split each part once more; None where there is one.
    """

    def __init__(self, group: dist.ProcessGroup, heads_group: dist.ProcessGroup | None = None) -> None:
        self.group, self.heads_group = group, heads_group

    def __call__(self, attention: MlaAttention, x_BTD: Tensor, documents: Documents) -> Tensor:
        """``[B, own T, hidden]`` to ``[B, own T, hidden]``; ``documents`` are those of all tokens."""
        q = attention.queries(x_BTD)
        latent, shared = attention.compress(x_BTD)
        gathered = torch.cat((latent, shared), dim=-1)
        if self.heads_group is not None:
            q = sequence_to_heads(q, self.heads_group)
            gathered = gather_sequence(gathered, self.heads_group)
        gathered = gather_sequence(gathered, self.group)
        latent, shared = torch.split(gathered, [latent.shape[-1], shared.shape[-1]], dim=-1)
        if self.heads_group is None:
            key_value = attention.expand(latent)
        else:
            first = dist.get_rank(self.heads_group) * q.shape[2]
            key_value = attention.expand_heads(latent, slice(first, first + q.shape[2]))
        o = attention.mix(q, key_value, shared, documents, query_start=dist.get_rank(self.group) * q.shape[1])
        if self.heads_group is not None:
            o = heads_to_sequence(o, self.heads_group)
        return attention.output(o, x_BTD)


def _state_map(attention: KdaAttention, inputs: KdaInputs, open_from: int) -> tuple[Tensor, Tensor]:
    """What the tokens from one on do to the state that they meet: ``left + transition @ state``.

    One run of the recurrence computes both: with values beside zeros, from zeros beside the identity.

    Returns:
        ``left`` ``[B, H, K, V]`` and ``transition`` ``[B, H, K, K]``, float32 at least.
    """
    inputs = KdaInputs(*(x[:, open_from:] for x in inputs))
    batch, _, heads, channels = inputs.k.shape
    width = inputs.v.shape[-1]
    identity = torch.eye(
        channels, dtype=torch.promote_types(inputs.v.dtype, torch.float32), device=inputs.v.device
    ).expand(batch, heads, -1, -1)
    widened = inputs._replace(v=pad(inputs.v, (0, channels)))
    _, last = attention.recur(widened, None, pad(identity, (width, 0)), output_final_state=True)
    if last is None:
        raise ValueError("the KDA implementation returned no final state")
    left, transition = torch.split(last, [width, channels], dim=-1)
    return left, transition


class _StateBefore(torch.autograd.Function):
    """The state that a rank's first document has before its first token here: one gathering each way.

    With ``S_r`` the state before rank r, ``S_{r+1} = M_r S_r + L_r`` as long as the document goes on, from zeros on the
    rank where it begins. Backward, the gradient ``D_r`` of every ``S_r`` is gathered; the state after rank r has the
    gradient ``A_r = D_{r+1} + M_{r+1}^T A_{r+1}``, which is that of ``L_r``, and ``A_r S_r^T`` is that of ``M_r``.
    """

    @staticmethod
    def forward(
        ctx: Any, left: Tensor, transition: Tensor, first_ranks: tuple[int, ...], group: dist.ProcessGroup
    ) -> Tensor:
        place = dist.get_rank(group)
        maps = _gathered(torch.cat((left, transition), dim=-1), group)
        lefts, transitions = torch.split(maps, [left.shape[-1], transition.shape[-1]], dim=-1)
        state = torch.zeros_like(left)
        for rank in range(first_ranks[place], place):
            state = transitions[rank] @ state + lefts[rank]
        ctx.group, ctx.first_ranks = group, first_ranks
        ctx.save_for_backward(transitions.contiguous(), state)
        return state

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        place, first_ranks = dist.get_rank(ctx.group), ctx.first_ranks
        transitions, state = ctx.saved_tensors
        received = _gathered(grads[0], ctx.group)
        grad_left = torch.zeros_like(state)
        behind = [rank for rank in range(place + 1, len(first_ranks)) if first_ranks[rank] <= place]
        for rank in reversed(behind):
            grad_left = received[rank] + transitions[rank].mT @ grad_left
        # What goes on behind this rank may have begun on it: then no state went into its map.
        goes_through = bool(behind) and first_ranks[place + 1] < place
        grad_transition = grad_left @ state.mT if goes_through else transitions.new_zeros(transitions.shape[1:])
        return grad_left, grad_transition, None, None


def _state_before(left: Tensor, transition: Tensor, first_ranks: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
    out: Tensor = _StateBefore.apply(left, transition, first_ranks, group)  # type: ignore[no-untyped-call]
    return out


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Every rank's tensor, stacked in rank order."""
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.stack(parts)
