"""Kimi Delta Attention by the Triton kernels of flash-linear-attention; the contract is ``eager.py``'s.

Differences within the contract: chunk products and normalised q, k are in the input's dtype, sums in float32; float64
is refused. With ``lower_bound`` in ``[-5, 0)`` the diagonal tiles run on tensor cores.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3kernels.documents import document_bounds
from k3kernels.ops.kda.recurrent.eager import check_shapes

SAFE_LOWER_BOUND = -5.0


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    *,
    scale: float | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """See ``eager.forward``.

    Raises:
        ValueError: eager's reasons, or float64 input.
    """
    from fla.ops.kda import chunk_kda as fla_chunk_kda

    check_shapes(q, k, v, g, beta)
    document_bounds(q.shape[0], q.shape[1], cu_seqlens)
    if q.dtype == torch.float64:
        raise ValueError("flash-linear-attention computes in float32; float64 input needs kda/chunk/eager")
    out, final_state = fla_chunk_kda(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        scale=scale,
        initial_state=None if initial_state is None else initial_state.float(),
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=True,
        safe_gate=lower_bound is not None and SAFE_LOWER_BOUND <= lower_bound < 0,
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.to(q.device, torch.int64),
    )
    return out.to(v.dtype), final_state if output_final_state else None
