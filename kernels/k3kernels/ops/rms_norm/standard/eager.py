"""RMS normalisation of the text model: the specification (released K3 code, ``KimiRMSNorm``)."""

from __future__ import annotations

import torch
from torch import Tensor

from k3kernels.pair import SavedState
from k3kernels.precision import inside_dtype


def forward(x: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, SavedState]:
    """``weight * cast(x * rsqrt(mean(x ** 2) + eps))``: the cast to x's dtype comes before the weight multiply.

    Args:
        x: ``[..., D]``.
        weight: ``[D]``. In another dtype than x, the product is formed in the wider of the two.
        eps: Added to the mean of the squares.

    Returns:
        ``[..., D]`` in x's dtype. Statistics and normalisation are in the inside dtype. Differentiable once; the
        backward treats the two casts as the identity.
    """
    rstd = _rstd(x, eps)
    normalized = (x.to(rstd.dtype) * rstd).to(x.dtype)
    return (weight * normalized).to(x.dtype), SavedState((x, weight, rstd))


def backward(saved: SavedState, grad_y: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight; the weight's sum over rows is in the inside dtype."""
    x, weight, rstd = saved.present()
    inside = rstd.dtype
    unrounded = x.to(inside) * rstd
    grad_normalized = grad_y.to(inside) * weight.to(inside)
    projected = (grad_normalized * unrounded).mean(-1, keepdim=True)
    grad_x = rstd * (grad_normalized - unrounded * projected)
    # the product's other factor is the rounded value, as in the forward
    grad_weight = (grad_y.to(inside) * unrounded.to(x.dtype).to(inside)).reshape(-1, x.shape[-1]).sum(0)
    return grad_x.to(x.dtype), grad_weight.to(weight.dtype)


def _rstd(x: Tensor, eps: float) -> Tensor:
    """``rsqrt(mean(x ** 2) + eps)`` over the last dim, kept, in the inside dtype."""
    return torch.rsqrt(x.to(inside_dtype(x)).square().mean(-1, keepdim=True) + eps)
