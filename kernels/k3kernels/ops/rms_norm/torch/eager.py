"""RMS normalisation of the vision tower: the specification (``torch.nn.RMSNorm``).

The released tower builds ``torch.nn.RMSNorm`` without an eps; torch then takes that of the inside dtype, 1.19e-7, also
for bfloat16 input.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3kernels.pair import SavedState
from k3kernels.precision import inside_dtype


def forward(x: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, SavedState]:
    """``cast(weight * x * rsqrt(mean(x ** 2) + eps))``: one rounding, after the weight multiply.

    Args:
        x: ``[..., D]``.
        weight: ``[D]``.
        eps: Added to the mean of the squares.

    Returns:
        ``[..., D]`` in x's dtype; everything before the cast is in the inside dtype. Differentiable once.
    """
    inside = inside_dtype(x)
    rstd = torch.rsqrt(x.to(inside).square().mean(-1, keepdim=True) + eps)
    y = x.to(inside) * rstd * weight.to(inside)
    return y.to(x.dtype), SavedState((x, weight, rstd))


def backward(saved: SavedState, grad_y: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight; the weight's sum over rows is in the inside dtype."""
    x, weight, rstd = saved.present()
    normalized = x.to(rstd.dtype) * rstd
    grad_y = grad_y.to(rstd.dtype)
    grad_normalized = grad_y * weight.to(rstd.dtype)
    projected = (grad_normalized * normalized).mean(-1, keepdim=True)
    grad_x = rstd * (grad_normalized - normalized * projected)
    grad_weight = (grad_y * normalized).reshape(-1, x.shape[-1]).sum(0)
    return grad_x.to(x.dtype), grad_weight.to(weight.dtype)
