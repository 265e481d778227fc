"""The fused attention residual of flash-linear-attention; the contract is ``eager.py``'s, in float32."""

from __future__ import annotations

import torch
from torch import Tensor


def attn_res(prefix: Tensor, norm_weight: Tensor, proj_weight: Tensor, *bank: Tensor, eps: float) -> Tensor:
    """See ``eager.forward``.

    Raises:
        ValueError: a bank entry differs from the prefix in shape or dtype, or float64 input.
    """
    from fla.ops.attnres.fused import fused_attnres

    if odd := [n for n, block in enumerate(bank) if block.shape != prefix.shape or block.dtype != prefix.dtype]:
        raise ValueError(f"bank entries {odd} differ from the prefix: {tuple(prefix.shape)} {prefix.dtype}")
    if prefix.dtype == torch.float64:
        raise ValueError("flash-linear-attention computes in float32; float64 input needs attn_res/standard/eager")
    mixed: Tensor = fused_attnres(proj_weight.reshape(-1), (*bank, prefix), norm_weight, rms_eps=eps)
    return mixed
