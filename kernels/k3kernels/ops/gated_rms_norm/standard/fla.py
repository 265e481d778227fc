"""The fused gated norm of flash-linear-attention; the contract is ``eager.py``'s, in float32."""

from __future__ import annotations

import torch
from torch import Tensor


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """See ``eager.forward``.

    Raises:
        ValueError: x and gate differ in shape, or float64 input.
    """
    from fla.modules.norm.fused_norm_gate import rms_norm_gated

    if x.shape != gate.shape:
        raise ValueError(f"x {tuple(x.shape)} and gate {tuple(gate.shape)} must have one shape")
    if x.dtype == torch.float64:
        raise ValueError(
            "flash-linear-attention computes in float32; float64 input needs gated_rms_norm/standard/eager"
        )
    y: Tensor = rms_norm_gated(x, gate, weight, None, activation="sigmoid", eps=eps)
    return y
