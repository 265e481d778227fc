"""SiTU-GLU: the specification (released K3 code, ``SituAndMul``)."""

from __future__ import annotations

import torch
from torch import Tensor

from k3kernels.pair import SavedState
from k3kernels.precision import inside_dtype


def forward(gate: Tensor, up: Tensor, *, beta: float, linear_beta: float | None) -> tuple[Tensor, SavedState]:
    """``beta * tanh(gate / beta) * sigmoid(gate) * linear_beta * tanh(up / linear_beta)``.

    Args:
        gate: ``[..., I]``; the sigmoid takes it as it is, not the bounded one.
        up: ``[..., I]``.
        beta: Bound of the gate branch; K3 has 4.
        linear_beta: Bound of the up branch; K3 has 25. None leaves ``up`` untouched.

    Returns:
        ``[..., I]`` in the gate's dtype, below ``beta * linear_beta`` in magnitude; computed in the inside dtype with
        one rounding at the end. NaN in either input stays NaN. Differentiable once.
    """
    activated, bounded = situ(gate, beta), bounded_linear(up, linear_beta)
    return (activated * bounded).to(gate.dtype), SavedState((gate, up), {"beta": beta, "linear_beta": linear_beta})


def backward(saved: SavedState, grad_y: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up."""
    gate, up = saved.present()
    beta, linear_beta = saved.metadata["beta"], saved.metadata["linear_beta"]
    grad_y = grad_y.to(inside_dtype(gate))
    grad_gate = grad_y * bounded_linear(up, linear_beta) * situ_slope(gate, beta)
    grad_up = grad_y * situ(gate, beta) * bounded_linear_slope(up, linear_beta)
    return grad_gate.to(gate.dtype), grad_up.to(up.dtype)


def situ(gate: Tensor, beta: float) -> Tensor:
    """``beta * tanh(gate / beta) * sigmoid(gate)`` in the inside dtype."""
    gate = gate.to(inside_dtype(gate))
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate)


def situ_slope(gate: Tensor, beta: float) -> Tensor:
    """The derivative of ``situ``."""
    gate = gate.to(inside_dtype(gate))
    bounded, opened = torch.tanh(gate / beta), torch.sigmoid(gate)
    return (1 - bounded.square()) * opened + beta * bounded * opened * torch.sigmoid(-gate)


def bounded_linear(up: Tensor, linear_beta: float | None) -> Tensor:
    """``linear_beta * tanh(up / linear_beta)`` in the inside dtype, or ``up`` itself."""
    up = up.to(inside_dtype(up))
    return up if linear_beta is None else linear_beta * torch.tanh(up / linear_beta)


def bounded_linear_slope(up: Tensor, linear_beta: float | None) -> Tensor:
    """The derivative of ``bounded_linear``."""
    up = up.to(inside_dtype(up))
    return torch.ones_like(up) if linear_beta is None else 1 - torch.tanh(up / linear_beta).square()
