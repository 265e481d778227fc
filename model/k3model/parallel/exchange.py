"""Collectives that autograd can go back through. Every rank of a group calls them in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _AllToAll(torch.autograd.Function):
    """Rows to their receivers; the gradient goes the same way back."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), list(received), list(sent), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        grad = grads[0].contiguous()
        out = grad.new_empty(sum(ctx.sent), *grad.shape[1:])
        dist.all_to_all_single(out, grad, list(ctx.sent), list(ctx.received), group=ctx.group)
        return out, None, None, None


def all_to_all_rows(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Send rows to the ranks of a group, in rank order, and receive theirs.

    Args:
        rows: ``[sum(sent), ...]``.
        sent: how many rows go to each rank.
        received: how many rows come from each rank.
        group: the ranks.

    Returns:
        ``[sum(received), ...]``, by source rank. Data only moves; no row is needed for the collective to take place.
    """
    out: Tensor = _AllToAll.apply(rows, sent, received, group)  # type: ignore[no-untyped-call]
    return out


def sequence_to_heads(x_BTHK: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange sequence shards of all heads for the whole sequence of this rank's heads.

    Args:
        x_BTHK: ``[B, T / n, H, K]``; ranks hold consecutive tokens.
        group: the ``n`` ranks; ``n`` divides ``H``.

    Returns:
        ``[B, T, H / n, K]``: the rank's own run of heads.
    """
    parts = dist.get_world_size(group)
    batch, tokens, heads, width = x_BTHK.shape
    by_owner = x_BTHK.reshape(batch, tokens, parts, heads // parts, width).permute(2, 0, 1, 3, 4).contiguous()
    received = all_to_all_rows(by_owner, [1] * parts, [1] * parts, group)
    return received.permute(1, 0, 2, 3, 4).reshape(batch, parts * tokens, heads // parts, width)


def heads_to_sequence(x_BTHK: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The inverse of ``sequence_to_heads``: ``[B, T, H / n, K]`` to ``[B, T / n, H, K]``."""
    parts = dist.get_world_size(group)
    batch, tokens, heads, width = x_BTHK.shape
    by_owner = x_BTHK.reshape(batch, parts, tokens // parts, heads, width).transpose(0, 1).contiguous()
    received = all_to_all_rows(by_owner, [1] * parts, [1] * parts, group)
    return received.permute(1, 2, 0, 3, 4).reshape(batch, tokens // parts, parts * heads, width)


class _GatherSequence(torch.autograd.Function):
    """All shards on every rank; the gradient is summed over the ranks, in rank order, and cut."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        shards = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(shards, x.contiguous(), group=group)
        return torch.cat(shards, dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        parts = dist.get_world_size(ctx.group)
        mine = torch.stack(grads[0].chunk(parts, dim=1))
        received = torch.empty_like(mine)
        dist.all_to_all_single(received, mine, group=ctx.group)
        return received.sum(0), None


def gather_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``[B, T / n, ...]`` of every rank as ``[B, T, ...]``; the gradient is the sum of what all ranks send back."""
    out: Tensor = _GatherSequence.apply(x, group)  # type: ignore[no-untyped-call]
    return out
