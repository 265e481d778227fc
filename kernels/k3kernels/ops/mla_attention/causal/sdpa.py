"""The MLA layers through ``torch.nn.functional.scaled_dot_product_attention``; the contract is ``eager.py``'s.

Scores stay in the kernel's accumulator instead of being rounded, so that results differ from eager within the rounding
of q's dtype. Values are padded to the width of the keys, which the fast kernels require; the added columns are cut off.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from k3kernels.documents import document_bounds
from k3kernels.ops.mla_attention.causal.eager import check_shapes, visibility


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
    """See ``eager.mla_attention``. Packed documents run one after another, without a score mask."""
    check_shapes(q, k, v, query_start)
    is_square = query_start == 0 and q.shape[1] == k.shape[1]
    if is_square and document_ids is None:
        bounds = (0, q.shape[1]) if cu_seqlens is None else document_bounds(q.shape[0], q.shape[1], cu_seqlens)
        spans = [slice(start, stop) for start, stop in pairwise(bounds) if start < stop]
        outputs = [_attend(q[:, span], k[:, span], v[:, span], scale, None) for span in spans]
        return torch.cat(outputs, 1) if outputs else v.new_zeros(v.shape)
    visible, is_padding = visibility(q, k, cu_seqlens, document_ids, query_start)
    out = _attend(q, k, v, scale, visible[:, None])
    return out if is_padding is None else out.masked_fill(is_padding[:, :, None, None], 0)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Tensor | None) -> Tensor:
    """Attention of ``[B, T, H, D]``; a missing mask means causal."""
    padded_v = pad(v, (0, k.shape[-1] - v.shape[-1]))
    out = scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        padded_v.transpose(1, 2),
        attn_mask=visible,
        is_causal=visible is None,
        scale=scale,
    )
    return out.transpose(1, 2)[..., : v.shape[-1]]
