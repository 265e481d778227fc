"""Context parallelism: contiguous runs of a sequence, with KDA's state handed on and MLA's latent gathered."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from k3model.parallel.exchange import gather_sequence
from k3model.text.documents import Documents
from k3model.text.kda_attention import KdaAttention, ShortConvolution
from k3model.text.mla_attention import MlaAttention


class _Receive(torch.autograd.Function):
    """What the rank before hands on; zeros on the first rank. The gradient is handed back to it."""

    @staticmethod
    def forward(
        ctx: Any, needed_by: Tensor, shape: tuple[int, ...], dtype: torch.dtype, group: dist.ProcessGroup
    ) -> Tensor:
        # ``needed_by`` wants a gradient where the network does, and so this does.
        ctx.group, ctx.place = group, dist.get_rank(group)
        out = needed_by.new_zeros(shape, dtype=dtype)
        if ctx.place > 0:
            dist.recv(out, group=group, group_src=ctx.place - 1)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None]:
        if ctx.place > 0:
            dist.send(grads[0].contiguous(), group=ctx.group, group_dst=ctx.place - 1)
        return None, None, None, None


class _HandOn(torch.autograd.Function):
    """Send to the rank after; the result passes through, so that going back waits for what that rank hands back."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, handed_on: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.next = group, dist.get_rank(group) + 1
        ctx.shape, ctx.dtype = handed_on.shape, handed_on.dtype
        if ctx.next < dist.get_world_size(group):
            dist.send(handed_on.contiguous(), group=group, group_dst=ctx.next)
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        if ctx.next >= dist.get_world_size(ctx.group):
            return grads[0], None, None
        grad = grads[0].new_empty(ctx.shape, dtype=ctx.dtype)
        dist.recv(grad, group=ctx.group, group_src=ctx.next)
        return grads[0], grad, None


class StatePassingKda:
    """KDA on a rank's own tokens, after the ranks before it and from the state that they leave.

    The convolutions' last inputs and the recurrence's state are handed from rank to rank. A document that begins here
    begins from zeros; what arrives is dropped, and its gradient is zero. Ranks work one after another in this layer.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(self, attention: KdaAttention, x_BTD: Tensor, documents: Documents) -> Tensor:
        """``[B, T / n, hidden]`` to ``[B, T / n, hidden]``; ``documents`` are those of all ``T`` tokens.

        Raises:
            ValueError: the batch is padded; context parallelism takes whole rows or packed documents.
        """
        if documents.real is not None:
            raise ValueError("a padded batch cannot be cut into contiguous parts; pack its documents into one row")
        batch, tokens = x_BTD.shape[:2]
        bounds, continues = self._local_documents(documents, tokens)
        num_documents = batch if bounds is None else len(bounds) - 1
        streams = attention.project(x_BTD)

        inputs = torch.cat([stream.flatten(-2) for stream in (streams.q, streams.k, streams.v)], dim=-1)
        kept = attention.q_conv1d.weight.shape[-1] - 1
        history = _receive(inputs, (batch, inputs.shape[-1], kept), inputs.dtype, self.group)
        history = history if continues else _dropped(history)
        inputs = _hand_on(inputs, _tail(inputs, history, bounds, kept), self.group)
        histories = _of_first_document(history, num_documents)
        q, k, v = (
            torch.unflatten(convolution(part, bounds, own), -1, (-1, attention.head_dim))
            for convolution, part, own in zip(
                _convolutions(attention), inputs.chunk(3, dim=-1), histories.chunk(3, dim=1), strict=True
            )
        )
        heads, width = v.shape[2:]
        state_dtype = torch.promote_types(v.dtype, torch.float32)
        state = _receive(v, (batch, heads, q.shape[-1], width), state_dtype, self.group)
        states = _of_first_document(state if continues else _dropped(state), num_documents)
        o, last = attention.recur(q, k, v, streams, bounds, states, output_final_state=True)
        if last is None:
            raise ValueError("the KDA implementation returned no final state")
        o = _hand_on(o, last if bounds is None else last[-1:], self.group)
        return attention.output(o, x_BTD)

    def _local_documents(self, documents: Documents, tokens: int) -> tuple[Tensor | None, bool]:
        """Bounds of the documents among this rank's tokens, and whether the first began on a rank before."""
        place = dist.get_rank(self.group)
        if documents.cu_seqlens is None:
            return None, place > 0
        start = place * tokens
        inside = (documents.cu_seqlens - start).clamp(0, tokens)
        bounds = torch.unique_consecutive(inside)
        return bounds, not bool((documents.cu_seqlens == start).any())


class LatentGatheringMla:
    """MLA with the queries of a rank's own tokens and the keys and values of all.

    What is gathered is the compressed latent and the shared key channels; every rank expands them itself.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(self, attention: MlaAttention, x_BTD: Tensor, documents: Documents) -> Tensor:
        """``[B, T / n, hidden]`` to ``[B, T / n, hidden]``; ``documents`` are those of all ``T`` tokens."""
        latent, shared = attention.compress(x_BTD)
        gathered = gather_sequence(torch.cat((latent, shared), dim=-1), self.group)
        latent, shared = torch.split(gathered, [latent.shape[-1], shared.shape[-1]], dim=-1)
        query_start = dist.get_rank(self.group) * x_BTD.shape[1]
        key_value = attention.expand(latent)
        o = attention.mix(attention.queries(x_BTD), key_value, shared, documents, query_start=query_start)
        return attention.output(o, x_BTD)


def _convolutions(attention: KdaAttention) -> tuple[ShortConvolution, ShortConvolution, ShortConvolution]:
    return attention.q_conv1d, attention.k_conv1d, attention.v_conv1d


def _receive(needed_by: Tensor, shape: tuple[int, ...], dtype: torch.dtype, group: dist.ProcessGroup) -> Tensor:
    out: Tensor = _Receive.apply(needed_by, shape, dtype, group)  # type: ignore[no-untyped-call]
    return out


def _hand_on(result: Tensor, handed_on: Tensor, group: dist.ProcessGroup) -> Tensor:
    out: Tensor = _HandOn.apply(result, handed_on, group)  # type: ignore[no-untyped-call]
    return out


def _tail(inputs_BTC: Tensor, history_BCW: Tensor, bounds: Tensor | None, kept: int) -> Tensor:
    """The last inputs of the last document here: ``[B, C, kept]``, zeros before its beginning."""
    seen = torch.cat((history_BCW.transpose(1, 2), inputs_BTC), dim=1)
    tail = seen[:, seen.shape[1] - kept :]
    if bounds is not None and len(bounds) > 2:
        length = int(bounds[-1] - bounds[-2])
        is_before = torch.arange(kept, device=tail.device) < kept - length
        tail = tail.masked_fill(is_before[:, None], 0)
    return tail.transpose(1, 2)


def _dropped(received: Tensor) -> Tensor:
    """Zeros that still hand a gradient, of zeros, back: the rank before waits for one."""
    return received.masked_fill(torch.ones_like(received, dtype=torch.bool), 0)


def _of_first_document(received: Tensor, num_documents: int) -> Tensor:
    """What arrived for the first document here, zeros for the others: ``[num_documents, ...]``."""
    rest = num_documents - received.shape[0]
    return torch.cat((received, received.new_zeros(rest, *received.shape[1:]))) if rest else received
