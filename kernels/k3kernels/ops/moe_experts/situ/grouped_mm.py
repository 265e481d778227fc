"""All experts in one ``torch._grouped_mm`` a matrix; the contract is ``eager.py``'s.

What the operator asks for, and what follows here: strides that are multiples of 16 bytes (checked, with a reason);
plain contiguous operands (a gradient that was expanded has stride 0 and is refused, so gradients are made contiguous);
and offsets that cover every row, because rows past the last offset are left uninitialised (they always do here). What
the weight gradient of an expert without rows is, torch does not say; it is set to zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3kernels.ops.moe_experts.situ.eager import (
    ExpertRows,
    check_experts,
    combine_slots,
    combine_slots_backward,
    sum_slots,
)
from k3kernels.ops.situ_and_mul.standard import eager as situ_and_mul
from k3kernels.pair import SavedState

STRIDE_BYTES = 16


def forward(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    *,
    beta: float,
    linear_beta: float | None,
) -> tuple[Tensor, SavedState]:
    """See ``eager.forward``.

    Raises:
        ValueError: besides eager's reasons, float64, a width whose rows are not a multiple of 16 bytes, or weights that
            are not contiguous.
    """
    rows = ExpertRows.of(topk_ids, w1.shape[0])
    check_experts(x, topk_ids, topk_weights, w1, w3, w2)
    _check_operands(w1, w3, w2)
    offsets = _offsets(rows)
    x_RD = rows.gather(x)
    gate_RI = _grouped_mm(x_RD, w1.mT, offsets)
    up_RI = _grouped_mm(x_RD, w3.mT, offsets)
    activated, _ = situ_and_mul.forward(gate_RI, up_RI, beta=beta, linear_beta=linear_beta)
    y_NSD = rows.to_slots(_grouped_mm(activated, w2.mT, offsets))
    saved = SavedState(
        (x, topk_weights, w1, w3, w2, gate_RI, up_RI, y_NSD, rows.order, rows.counts),
        {"beta": beta, "linear_beta": linear_beta},
    )
    return combine_slots(y_NSD, topk_weights), saved


def backward(saved: SavedState, grad_y: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of x, topk_weights, w1, w3 and w2; the ids have none."""
    x, topk_weights, w1, w3, w2, gate_RI, up_RI, y_NSD, order, counts = saved.present()
    rows = ExpertRows(order, counts, topk_weights.shape[1])
    offsets = _offsets(rows)
    _, _, _, wants_w1, wants_w3, wants_w2 = saved.needs_grad

    grad_y_NSD, grad_topk_weights = combine_slots_backward(grad_y, y_NSD, topk_weights)
    grad_y_RD, x_RD = rows.from_slots(grad_y_NSD), rows.gather(x)
    activated, situ_saved = situ_and_mul.forward(
        gate_RI, up_RI, beta=saved.metadata["beta"], linear_beta=saved.metadata["linear_beta"]
    )
    grad_w2 = _weight_gradient(grad_y_RD, activated, rows, offsets) if wants_w2 else None
    grad_gate, grad_up = situ_and_mul.backward(situ_saved, _grouped_mm(grad_y_RD, w2, offsets))
    grad_x_RD = _grouped_mm(grad_gate, w1, offsets) + _grouped_mm(grad_up, w3, offsets)
    grad_w1 = _weight_gradient(grad_gate, x_RD, rows, offsets) if wants_w1 else None
    grad_w3 = _weight_gradient(grad_up, x_RD, rows, offsets) if wants_w3 else None
    return sum_slots(rows.to_slots(grad_x_RD)), None, grad_topk_weights, grad_w1, grad_w3, grad_w2


def _offsets(rows: ExpertRows) -> Tensor:
    """int32 ``[E]``: where each expert's rows end."""
    return rows.counts.cumsum(0).to(torch.int32)


def _grouped_mm(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    """``[R, A] x [E, A, B] -> [R, B]``, or none of it where there are no rows."""
    if len(left) == 0:
        return left.new_empty(0, right.shape[-1])
    return torch._grouped_mm(left, right, offs=offsets)


def _weight_gradient(grad_out_RO: Tensor, inputs_RI: Tensor, rows: ExpertRows, offsets: Tensor) -> Tensor:
    """``grad_out^T inputs`` of each expert's rows: ``[E, O, I]``."""
    shape = (len(rows.counts), grad_out_RO.shape[1], inputs_RI.shape[1])
    if len(inputs_RI) == 0:
        return inputs_RI.new_zeros(shape)
    grad = torch._grouped_mm(grad_out_RO.T, inputs_RI, offs=offsets)
    grad[rows.counts == 0] = 0
    return grad


def _check_operands(*weights: Tensor) -> None:
    problems = [f"{weights[0].dtype} is not supported"] if weights[0].dtype == torch.float64 else []
    for name, weight in zip(("w1", "w3", "w2"), weights, strict=True):
        if not weight.is_contiguous():
            problems.append(f"{name} is not contiguous")
        if (row_bytes := weight.shape[-1] * weight.element_size()) % STRIDE_BYTES:
            problems.append(f"a row of {name} has {row_bytes} bytes, not a multiple of {STRIDE_BYTES}")
    if problems:
        raise ValueError(f"torch._grouped_mm cannot take these weights: {'; '.join(problems)}")
