"""The log decay of Kimi Delta Attention: the specification.

Bounded form (Kimi K3 report, section 2.1.1): ``g = L * sigmoid(exp(A_log) * (z + dt_bias))`` with ``L < 0``, which is
another function than the unbounded ``g = -exp(A_log) * softplus(z + dt_bias)`` of Kimi-Linear, not a clamp of it.

Shape suffixes: B = batch, T = tokens, H = heads, K = key channels of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from k3kernels.pair import SavedState
from k3kernels.precision import inside_dtype


def forward(z: Tensor, A_log: Tensor, dt_bias: Tensor, *, lower_bound: float | None) -> tuple[Tensor, SavedState]:
    """The natural-log decay of every key channel.

    Args:
        z: ``[B, T, H, K]`` (any leading dims), the pre-activation without the bias.
        A_log: ``[H]``, one a head.
        dt_bias: ``[H * K]``, one a channel.
        lower_bound: The negative bound ``L`` of the sigmoid form, or None for the softplus form.

    Returns:
        ``[B, T, H, K]`` in the inside dtype of the widest input (float32, or float64), never rounded: in
        ``[L, 0]`` (the sigmoid reaches its ends in floating point), or ``<= 0``. Differentiable once.

    Raises:
        ValueError: the shapes do not belong together, or the bound is not negative.
    """
    heads, channels = z.shape[-2:]
    if tuple(A_log.shape) != (heads,) or dt_bias.numel() != heads * channels:
        raise ValueError(
            f"z {tuple(z.shape)} needs A_log ({heads},) and dt_bias ({heads * channels},); "
            f"got {tuple(A_log.shape)} and {tuple(dt_bias.shape)}"
        )
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(f"lower_bound must be negative, got {lower_bound}")
    saved = SavedState((z, A_log, dt_bias), {"lower_bound": lower_bound})
    rate_H1, shifted_BTHK = _rate_and_shifted(z, A_log, dt_bias)
    if lower_bound is None:
        return -rate_H1 * softplus(shifted_BTHK), saved
    return lower_bound * torch.sigmoid(rate_H1 * shifted_BTHK), saved


def backward(saved: SavedState, grad_g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of z, A_log and dt_bias; the sums over tokens are in the inside dtype."""
    z, A_log, dt_bias = saved.present()
    lower_bound = saved.metadata["lower_bound"]
    rate_H1, shifted_BTHK = _rate_and_shifted(z, A_log, dt_bias)
    if lower_bound is None:
        grad_shifted = -grad_g * rate_H1 * torch.sigmoid(shifted_BTHK)
        grad_A_log = -grad_g * rate_H1 * softplus(shifted_BTHK)
    else:
        gate = torch.sigmoid(rate_H1 * shifted_BTHK)
        # sigmoid(-x) is computed as such: 1 - sigmoid(x) is 0 for x > 17 in float32
        grad_shifted = grad_g * lower_bound * gate * torch.exp(logsigmoid(-rate_H1 * shifted_BTHK)) * rate_H1
        grad_A_log = grad_shifted * shifted_BTHK
    heads, channels = z.shape[-2:]
    return (
        grad_shifted.to(z.dtype),
        grad_A_log.reshape(-1, heads, channels).sum((0, 2)).to(A_log.dtype),
        grad_shifted.reshape(-1, heads, channels).sum(0).reshape(dt_bias.shape).to(dt_bias.dtype),
    )


def _rate_and_shifted(z: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """``exp(A_log)`` as ``[H, 1]`` and ``z + dt_bias`` as ``[B, T, H, K]``, in the inside dtype."""
    inside = torch.promote_types(inside_dtype(z), torch.promote_types(A_log.dtype, dt_bias.dtype))
    return A_log.to(inside).exp()[:, None], z.to(inside) + dt_bias.to(inside).reshape(z.shape[-2:])
