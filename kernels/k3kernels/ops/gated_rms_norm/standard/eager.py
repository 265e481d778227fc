"""Gated RMS normalisation: the specification (Kimi K3 report, section 2.1.1; FLA's fused norm gate, sigmoid)."""

from __future__ import annotations

import torch
from torch import Tensor

from k3kernels.pair import SavedState
from k3kernels.precision import inside_dtype


def forward(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, SavedState]:
    """``cast(x * rsqrt(mean(x ** 2) + eps) * weight * sigmoid(gate))``.

    Args:
        x: ``[..., D]``, one row a head.
        gate: ``[..., D]``, the output gate before its sigmoid.
        weight: ``[D]``, shared by all heads.
        eps: Added to the mean of the squares.

    Returns:
        ``[..., D]`` in x's dtype; everything before the cast is in the inside dtype. Differentiable once.

    Raises:
        ValueError: x and gate differ in shape.
    """
    if x.shape != gate.shape:
        raise ValueError(f"x {tuple(x.shape)} and gate {tuple(gate.shape)} must have one shape")
    inside = inside_dtype(x)
    rstd = torch.rsqrt(x.to(inside).square().mean(-1, keepdim=True) + eps)
    y = x.to(inside) * rstd * weight.to(inside) * torch.sigmoid(gate.to(inside))
    return y.to(x.dtype), SavedState((x, gate, weight, rstd))


def backward(saved: SavedState, grad_y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, gate and weight; the weight's sum over rows is in the inside dtype."""
    x, gate, weight, rstd = saved.present()
    inside = rstd.dtype
    normalized = x.to(inside) * rstd
    opened = torch.sigmoid(gate.to(inside))
    grad_y = grad_y.to(inside)
    grad_weighted = grad_y * opened
    grad_normalized = grad_weighted * weight.to(inside)
    projected = (grad_normalized * normalized).mean(-1, keepdim=True)
    grad_x = rstd * (grad_normalized - normalized * projected)
    grad_gate = grad_y * normalized * weight.to(inside) * opened * (1 - opened)
    grad_weight = (grad_weighted * normalized).reshape(-1, x.shape[-1]).sum(0)
    return grad_x.to(x.dtype), grad_gate.to(gate.dtype), grad_weight.to(weight.dtype)
