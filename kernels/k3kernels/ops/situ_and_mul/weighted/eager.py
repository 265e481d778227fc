"""SiTU-GLU with a weight per row: the specification.

For networks that apply the router's weight before the down projection. K3 applies it after, on rounded outputs.
"""

from __future__ import annotations

from torch import Tensor

from k3kernels.ops.situ_and_mul.standard.eager import bounded_linear, bounded_linear_slope, situ, situ_slope
from k3kernels.pair import SavedState
from k3kernels.precision import inside_dtype


def forward(
    gate: Tensor, up: Tensor, row_weight: Tensor, *, beta: float, linear_beta: float | None
) -> tuple[Tensor, SavedState]:
    """``row_weight * situ(gate) * bounded_linear(up)``, see the standard variant.

    Args:
        gate: ``[..., I]``.
        up: ``[..., I]``.
        row_weight: ``[...]``, float32.
        beta: Bound of the gate branch.
        linear_beta: Bound of the up branch, or None.

    Returns:
        ``[..., I]`` in the gate's dtype; the weight multiplies before the one rounding. Differentiable once.

    Raises:
        ValueError: there is not one weight a row.
    """
    if row_weight.shape != gate.shape[:-1]:
        raise ValueError(f"gate {tuple(gate.shape)} needs one weight a row, got {tuple(row_weight.shape)}")
    product = situ(gate, beta) * bounded_linear(up, linear_beta)
    saved = SavedState((gate, up, row_weight), {"beta": beta, "linear_beta": linear_beta})
    return (row_weight.to(product.dtype)[..., None] * product).to(gate.dtype), saved


def backward(saved: SavedState, grad_y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of gate, up and row_weight."""
    gate, up, row_weight = saved.present()
    beta, linear_beta = saved.metadata["beta"], saved.metadata["linear_beta"]
    inside = inside_dtype(gate)
    grad_y, activated, bounded = grad_y.to(inside), situ(gate, beta), bounded_linear(up, linear_beta)
    grad_product = grad_y * row_weight.to(inside)[..., None]
    return (
        (grad_product * bounded * situ_slope(gate, beta)).to(gate.dtype),
        (grad_product * activated * bounded_linear_slope(up, linear_beta)).to(up.dtype),
        (grad_y * activated * bounded).sum(-1).to(row_weight.dtype),
    )
