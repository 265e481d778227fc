"""The routed experts of K3's latent MoE: the specification (released K3 code, ``KimiSparseMoeBlock``).

Shape suffixes: N = tokens, S = slots of a token (top-k), E = experts, D = latent width, I = intermediate width,
R = N * S expert rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from k3kernels.ops.situ_and_mul.standard import eager as situ_and_mul
from k3kernels.pair import SavedState
from k3kernels.precision import inside_dtype


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
    """``y[n] = cast(sum_s float(w2_e SiTU(w1_e x[n], w3_e x[n])) * weight[n, s])`` with ``e = ids[n, s]``.

    The router's weight multiplies after the down projection, on outputs that were rounded to x's dtype.

    Args:
        x: ``[N, D]``, latent tokens.
        topk_ids: int64 ``[N, S]``, each in ``0 .. E - 1``.
        topk_weights: ``[N, S]``, float32.
        w1: ``[E, I, D]``, the gate projections, in x's dtype.
        w3: ``[E, I, D]``, the up projections.
        w2: ``[E, D, I]``, the down projections.
        beta: Bound of the gate branch of SiTU.
        linear_beta: Bound of its up branch, or None.

    Returns:
        ``[N, D]`` in x's dtype. The three products and the activation are each rounded to x's dtype; the sum over slots
        is in the inside dtype and in slot order, whatever the experts. Differentiable once. Gradients of the weights
        are written expert by expert into one stack a matrix; an expert without tokens has a gradient of zeros.

    Raises:
        ValueError: an id that names no expert, or shapes or dtypes that do not belong together.
    """
    rows = ExpertRows.of(topk_ids, w1.shape[0])
    check_experts(x, topk_ids, topk_weights, w1, w3, w2)
    x_RD = rows.gather(x)
    gate_RI, up_RI = x_RD.new_empty(len(x_RD), w1.shape[1]), x_RD.new_empty(len(x_RD), w1.shape[1])
    y_RD = torch.empty_like(x_RD)
    for e, span in rows.spans():
        torch.mm(x_RD[span], w1[e].T, out=gate_RI[span])
        torch.mm(x_RD[span], w3[e].T, out=up_RI[span])
        activated, _ = situ_and_mul.forward(gate_RI[span], up_RI[span], beta=beta, linear_beta=linear_beta)
        torch.mm(activated, w2[e].T, out=y_RD[span])
    y_NSD = rows.to_slots(y_RD)
    saved = SavedState(
        (x, topk_weights, w1, w3, w2, gate_RI, up_RI, y_NSD, rows.order, rows.counts),
        {"beta": beta, "linear_beta": linear_beta},
    )
    return combine_slots(y_NSD, topk_weights), saved


def backward(saved: SavedState, grad_y: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of x, topk_weights, w1, w3 and w2; the ids have none."""
    x, topk_weights, w1, w3, w2, gate_RI, up_RI, y_NSD, order, counts = saved.present()
    beta, linear_beta = saved.metadata["beta"], saved.metadata["linear_beta"]
    rows = ExpertRows(order, counts, topk_weights.shape[1])
    _, _, _, wants_w1, wants_w3, wants_w2 = saved.needs_grad
    grad_w1 = torch.zeros_like(w1) if wants_w1 else None
    grad_w3 = torch.zeros_like(w3) if wants_w3 else None
    grad_w2 = torch.zeros_like(w2) if wants_w2 else None

    grad_y_NSD, grad_topk_weights = combine_slots_backward(grad_y, y_NSD, topk_weights)
    grad_y_RD, x_RD = rows.from_slots(grad_y_NSD), rows.gather(x)
    grad_x_RD = torch.empty_like(x_RD)
    for e, span in rows.spans():
        gate, up = gate_RI[span], up_RI[span]
        activated, situ_saved = situ_and_mul.forward(gate, up, beta=beta, linear_beta=linear_beta)
        grad_gate, grad_up = situ_and_mul.backward(situ_saved, grad_y_RD[span] @ w2[e])
        grad_x_RD[span] = grad_gate @ w1[e] + grad_up @ w3[e]
        if grad_w1 is not None:
            torch.mm(grad_gate.T, x_RD[span], out=grad_w1[e])
        if grad_w3 is not None:
            torch.mm(grad_up.T, x_RD[span], out=grad_w3[e])
        if grad_w2 is not None:
            torch.mm(grad_y_RD[span].T, activated, out=grad_w2[e])
    grad_x = sum_slots(rows.to_slots(grad_x_RD))
    return grad_x, None, grad_topk_weights, grad_w1, grad_w3, grad_w2


class ExpertRows(NamedTuple):
    """The rows that experts compute, sorted by expert, and within an expert by token."""

    order: Tensor  # int64 [R]: the flat (token, slot) of each row
    counts: Tensor  # int64 [E]: rows of each expert
    num_slots: int

    @classmethod
    def of(cls, topk_ids: Tensor, num_experts: int) -> ExpertRows:
        """Sort the slots of ``[N, S]`` ids by expert.

        Raises:
            ValueError: an id names no expert.
        """
        flat = topk_ids.reshape(-1)
        is_wrong = (flat < 0) | (flat >= num_experts)
        if bool(is_wrong.any()):
            wrong = flat[is_wrong]
            raise ValueError(f"{len(wrong)} ids name no expert of 0..{num_experts - 1}, e.g. {wrong[:3].tolist()}")
        counts = torch.bincount(flat, minlength=num_experts)
        return cls(torch.argsort(flat, stable=True), counts, topk_ids.shape[1])

    def spans(self) -> Iterator[tuple[int, slice]]:
        """Every expert that has rows, with its rows."""
        bounds = accumulate(self.counts.tolist(), initial=0)
        for e, (start, stop) in enumerate(pairwise(bounds)):
            if start < stop:
                yield e, slice(start, stop)

    def gather(self, x: Tensor) -> Tensor:
        """Tokens to rows: ``[N, D]`` -> ``[R, D]``."""
        return x[self.order // self.num_slots]

    def from_slots(self, slots: Tensor) -> Tensor:
        """Slots to rows: ``[N, S, D]`` -> ``[R, D]``."""
        return slots.flatten(0, 1)[self.order]

    def to_slots(self, rows: Tensor) -> Tensor:
        """Rows to slots: ``[R, D]`` -> ``[N, S, D]``. Every slot is written once, so the order cannot matter."""
        flat = torch.empty_like(rows)
        flat[self.order] = rows
        return flat.reshape(len(rows) // self.num_slots, self.num_slots, rows.shape[-1])


def check_experts(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor) -> None:
    """Refuse tensors that do not belong together.

    Raises:
        ValueError: with every mismatch.
    """
    experts, intermediate, latent = w1.shape
    problems = []
    if tuple(w3.shape) != tuple(w1.shape) or tuple(w2.shape) != (experts, latent, intermediate):
        problems.append(f"w1 {tuple(w1.shape)} needs w3 alike and w2 ({experts}, {latent}, {intermediate})")
    if x.dim() != 2 or x.shape[1] != latent:
        problems.append(f"x must be [N, {latent}], got {tuple(x.shape)}")
    if topk_ids.shape != topk_weights.shape or topk_ids.dim() != 2 or len(topk_ids) != len(x):
        problems.append(f"{len(x)} tokens with ids {tuple(topk_ids.shape)} and weights {tuple(topk_weights.shape)}")
    if len(dtypes := {t.dtype for t in (x, w1, w3, w2)}) > 1:
        problems.append(f"x and the weights have one dtype, got {', '.join(sorted(map(str, dtypes)))}")
    if problems:
        raise ValueError("; ".join(problems))


def combine_slots(y_NSD: Tensor, topk_weights: Tensor) -> Tensor:
    """The weighted sum over slots: in the inside dtype, in slot order, one cast at the end."""
    weights = topk_weights.to(inside_dtype(y_NSD))
    total = torch.zeros_like(y_NSD[:, 0], dtype=weights.dtype)
    for slot in range(y_NSD.shape[1]):
        total += y_NSD[:, slot].to(weights.dtype) * weights[:, slot, None]
    return total.to(y_NSD.dtype)


def combine_slots_backward(grad_y: Tensor, y_NSD: Tensor, topk_weights: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the slots ``[N, S, D]``, rounded to their dtype, and of the weights ``[N, S]``."""
    weights = topk_weights.to(inside_dtype(y_NSD))
    grad_total = grad_y.to(weights.dtype)
    grad_slots = torch.empty_like(y_NSD)
    grad_weights = torch.empty_like(weights)
    for slot in range(y_NSD.shape[1]):
        grad_slots[:, slot] = grad_total * weights[:, slot, None]
        grad_weights[:, slot] = (grad_total * y_NSD[:, slot].to(weights.dtype)).sum(-1)
    return grad_slots, grad_weights.to(topk_weights.dtype)


def sum_slots(slots: Tensor) -> Tensor:
    """The plain sum over slots in the inside dtype and in slot order, cast back: ``[N, S, D]`` -> ``[N, D]``."""
    total = torch.zeros_like(slots[:, 0], dtype=inside_dtype(slots))
    for slot in range(slots.shape[1]):
        total += slots[:, slot]
    return total.to(slots.dtype)
