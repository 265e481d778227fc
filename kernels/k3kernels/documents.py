"""Where the documents of a packed batch begin and end."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor


def document_bounds(batch: int, tokens: int, cu_seqlens: Tensor | None) -> tuple[int, ...]:
    """The bounds of every sequence in the flattened ``[batch * tokens]`` order.

    Args:
        batch: Rows of the batch.
        tokens: Tokens in a row.
        cu_seqlens: int ``[N + 1]``, cumulative document lengths of a packed row, or None: every row is one document.

    Returns:
        ``N + 1`` offsets, from 0 to ``batch * tokens``. Empty documents are allowed.

    Raises:
        ValueError: the batch has several rows, or the offsets are not integers that go from 0 to ``tokens`` without
            falling. Nothing is repaired: a tail that belongs to no document would be computed from nothing.
    """
    if cu_seqlens is None:
        return tuple(range(0, batch * tokens + 1, tokens)) if tokens else (0,) * (batch + 1)
    if batch != 1:
        raise ValueError(f"cu_seqlens describes one packed row; the batch has {batch}")
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2 or cu_seqlens.is_floating_point():
        raise ValueError(f"cu_seqlens must be integers [N + 1], got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}")
    bounds = tuple(int(bound) for bound in cu_seqlens.tolist())
    if bounds[0] != 0 or bounds[-1] != tokens:
        raise ValueError(f"cu_seqlens must go from 0 to {tokens}, got {bounds[0]} to {bounds[-1]}")
    if falls := [n for n, (start, stop) in enumerate(pairwise(bounds)) if stop < start]:
        raise ValueError(f"cu_seqlens must not fall; it does after entries {falls[:3]} of {len(bounds)}")
    return bounds
