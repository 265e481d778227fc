"""The fused recurrence of flash-linear-attention, for decoding; the contract is ``eager.py``'s, without a backward."""

from __future__ import annotations

import torch
from torch import Tensor

from k3kernels.documents import document_bounds
from k3kernels.ops.kda.recurrent.eager import check_shapes


def recurrent_kda(
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
    """See ``eager.recurrent_kda``.

    Raises:
        ValueError: eager's reasons, or float64 input.
        RuntimeError: an input wants a gradient; the kernel has none and would drop it silently.
    """
    from fla.ops.kda import fused_recurrent_kda

    check_shapes(q, k, v, g, beta)
    document_bounds(q.shape[0], q.shape[1], cu_seqlens)
    if q.dtype == torch.float64:
        raise ValueError("flash-linear-attention computes in float32; float64 input needs kda/recurrent/eager")
    inputs = (q, k, v, g, beta, initial_state)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        raise RuntimeError("kda/recurrent/fla has no backward; train with kda/chunk")
    out, final_state = fused_recurrent_kda(
        q=q.contiguous(),
        k=k.contiguous(),
        v=v.contiguous(),
        g=g.contiguous(),
        beta=beta.contiguous(),
        scale=scale,
        initial_state=None if initial_state is None else initial_state.float().contiguous(),
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.to(q.device, torch.int64),
    )
    return out.to(v.dtype), final_state if output_final_state else None
