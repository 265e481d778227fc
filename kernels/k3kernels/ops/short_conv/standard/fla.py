"""The fused causal convolution of flash-linear-attention; the contract is ``eager.py``'s, in float32.

Its states have one column more than ours, which the convolution never reads; ours are padded on the way in. The final
state is made here, so that its gradient is right for documents that are shorter than the kernel too.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from k3kernels.documents import document_bounds
from k3kernels.ops.short_conv.standard.eager import final_history, starting_history


def short_conv(
    x: Tensor,
    weight: Tensor,
    initial_state: Tensor | None = None,
    *,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """See ``eager.short_conv``.

    Raises:
        ValueError: eager's reasons, or float64 input.
    """
    from fla.modules.causal_conv1d import causal_conv1d

    batch, tokens, channels = x.shape
    width = weight.shape[-1]
    if tuple(weight.shape) != (channels, 1, width):
        raise ValueError(f"x {tuple(x.shape)} needs a weight ({channels}, 1, W), got {tuple(weight.shape)}")
    if x.dtype == torch.float64:
        raise ValueError("flash-linear-attention computes in float32; float64 input needs short_conv/standard/eager")
    bounds = document_bounds(batch, tokens, cu_seqlens)
    history = starting_history(x, initial_state, (len(bounds) - 1, channels, width - 1))
    y, _ = causal_conv1d(
        x=x,
        weight=weight[:, 0],
        initial_state=None if initial_state is None else pad(history, (1, 0)),
        activation="silu",
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.to(x.device, torch.int64),
    )
    if not output_final_state:
        return y, None
    return y, final_history(x.reshape(batch * tokens, channels), history.transpose(1, 2), bounds)
