"""Softmax attention of the MLA layers: the specification (released K3 code, ``KimiMLAAttention``, eager path).

Shape suffixes: B = batch, T = queries, S = keys, H = heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3kernels.documents import document_bounds
from k3kernels.precision import inside_dtype

PADDING = 0


def mla_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    cu_seqlens: Tensor | None = None,
    document_ids: Tensor | None = None,
    query_start: int = 0,
) -> Tensor:
    """Causal attention within documents, with values narrower than keys.

    A query sees the keys of its own document at its own position and before.

    Args:
        q: ``[B, T, H, Dk]``, no positions encoded.
        k: ``[B, S, H, Dk]``.
        v: ``[B, S, H, Dv]``.
        scale: Factor of the scores; K3 has ``192 ** -0.5``.
        cu_seqlens: int ``[N + 1]`` document offsets of one packed row of keys.
        document_ids: integers or bool ``[B, S]``, the document of every key, 0 for padding; a padding mask will do.
        query_start: Key position of the first query; ``query_start + T <= S``.

    Returns:
        ``[B, T, H, Dv]`` in v's dtype. The products with q and with the scale are rounded to q's dtype, as in the
        released code's eager path; the softmax is in the inside dtype and its weights are rounded to q's dtype before
        they meet v. Rows of padding queries are zero.

    Raises:
        ValueError: both kinds of document bounds, or shapes that do not belong together.
    """
    check_shapes(q, k, v, query_start)
    visible, is_padding = visibility(q, k, cu_seqlens, document_ids, query_start)
    scores = torch.einsum("bthd,bshd->bhts", q, k) * scale
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    weights = torch.softmax(scores, -1, dtype=inside_dtype(q)).to(q.dtype)
    out = torch.einsum("bhts,bshd->bthd", weights, v)
    return out if is_padding is None else out.masked_fill(is_padding[:, :, None, None], 0)


def check_shapes(q: Tensor, k: Tensor, v: Tensor, query_start: int) -> None:
    """Refuse tensors that do not belong together.

    Raises:
        ValueError: the batches, heads or widths differ, or a query lies outside the keys.
    """
    if q.shape[0] != k.shape[0] or q.shape[2:] != k.shape[2:] or v.shape[:3] != k.shape[:3]:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not belong together")
    if query_start < 0 or query_start + q.shape[1] > k.shape[1]:
        raise ValueError(f"queries {query_start} to {query_start + q.shape[1]} lie outside {k.shape[1]} keys")


def visibility(
    q: Tensor, k: Tensor, cu_seqlens: Tensor | None, document_ids: Tensor | None, query_start: int
) -> tuple[Tensor, Tensor | None]:
    """Which keys each query sees, and which queries are padding.

    Returns:
        bool ``[B or 1, T, S]``, in which a padding query sees itself, so that no row is empty; and bool ``[B, T]``, or
        None when nothing is padding.

    Raises:
        ValueError: see ``mla_attention``.
    """
    batch, num_queries, num_keys = q.shape[0], q.shape[1], k.shape[1]
    if cu_seqlens is not None and document_ids is not None:
        raise ValueError("documents are given twice: by cu_seqlens and by document_ids")
    position = torch.arange(num_keys, device=q.device)
    here = slice(query_start, query_start + num_queries)
    is_before = position <= position[here, None]
    if cu_seqlens is not None:
        lengths = torch.tensor(document_bounds(batch, num_keys, cu_seqlens), device=q.device).diff()
        document_ids = torch.arange(1, len(lengths) + 1, device=q.device).repeat_interleave(lengths)[None]
        return is_before & (document_ids[:, here, None] == document_ids[:, None]), None
    if document_ids is None:
        return is_before[None], None
    if tuple(document_ids.shape) != (batch, num_keys):
        raise ValueError(f"document_ids must be ({batch}, {num_keys}), got {tuple(document_ids.shape)}")
    same = document_ids[:, here, None] == document_ids[:, None]
    is_padding = document_ids[:, here] == PADDING
    is_itself = position == position[here, None]
    return torch.where(is_padding[..., None], is_itself, is_before & same), is_padding
