"""The fused gate of flash-linear-attention; the contract is ``eager.py``'s, in float32."""

from __future__ import annotations

import torch
from torch import Tensor


def kda_gate(z: Tensor, A_log: Tensor, dt_bias: Tensor, *, lower_bound: float | None) -> Tensor:
    """See ``eager.forward``.

    Raises:
        ValueError: shapes that do not belong together, a bound that is not negative, or float64 input.
    """
    from fla.ops.kda.gate import fused_kda_gate

    heads, channels = z.shape[-2:]
    if tuple(A_log.shape) != (heads,) or dt_bias.numel() != heads * channels:
        raise ValueError(f"z {tuple(z.shape)}, A_log {tuple(A_log.shape)}, dt_bias {tuple(dt_bias.shape)} do not match")
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(f"lower_bound must be negative, got {lower_bound}")
    if torch.float64 in (z.dtype, A_log.dtype, dt_bias.dtype):
        raise ValueError("flash-linear-attention computes in float32; float64 input needs kda_gate/standard/eager")
    gate: Tensor = fused_kda_gate(z, A_log, dt_bias, lower_bound=lower_bound, output_dtype=torch.float32)
    return gate
