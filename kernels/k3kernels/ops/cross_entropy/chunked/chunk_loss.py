"""Cross entropy from hidden states, chunk by chunk; the contract is ``eager.py``'s.

The gradient of a sum does not depend on what the caller does with the sum, up to a factor. So every chunk's gradients
are made in the forward, while its logits exist, and scaled in the backward. The full logits are never there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from k3kernels.ops.cross_entropy.chunked.eager import CHUNK_TOKENS, check_head
from k3kernels.ops.cross_entropy.standard.eager import IGNORE_INDEX, CrossEntropy
from k3kernels.precision import inside_dtype


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = IGNORE_INDEX,
    chunk_size: int = CHUNK_TOKENS,
) -> CrossEntropy:
    """See ``eager.linear_cross_entropy``. Differentiable once.

    Peak memory beyond the inputs: ``chunk_size x V`` logits twice in the inside dtype, and the gradients themselves;
    the head's is summed in the inside dtype.
    """
    check_head(hidden, weight, labels, chunk_size)
    flat = hidden.reshape(-1, hidden.shape[-1])
    apply: Any = _ChunkedSum.apply
    total, losses = apply(flat, weight, labels.reshape(-1), ignore_index, chunk_size, torch.is_grad_enabled())
    return CrossEntropy(total, losses.view(labels.shape), (labels != ignore_index).sum())


class _ChunkedSum(torch.autograd.Function):
    """The sum and its terms, with the sum's gradients of hidden and weight kept for the backward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, ignore_index: int, chunk_size: int, wants_grad: bool
    ) -> tuple[Tensor, Tensor]:
        wants_hidden, wants_weight = (wants_grad and wanted for wanted in ctx.needs_input_grad[:2])
        inside = inside_dtype(hidden)
        losses = hidden.new_zeros(len(hidden), dtype=inside)
        grad_hidden = torch.zeros_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=inside) if wants_weight else None
        for start in range(0, len(hidden), chunk_size):
            rows = slice(start, start + chunk_size)
            counted = labels[rows] != ignore_index
            label = labels[rows].where(counted, 0)[:, None]
            log_probability = torch.log_softmax((hidden[rows] @ weight.T).to(inside), -1)
            losses[rows] = -log_probability.gather(1, label)[:, 0].where(counted, 0)
            if grad_hidden is None and grad_weight is None:
                continue
            grad_logits = log_probability.exp_()
            grad_logits.scatter_add_(1, label, grad_logits.new_full(label.shape, -1.0))
            grad_logits = grad_logits.masked_fill_(~counted[:, None], 0).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = grad_logits @ weight
            if grad_weight is not None:
                grad_weight += grad_logits.T @ hidden[rows]
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype))
        ctx.mark_non_differentiable(losses)
        return losses.sum(), losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        scaled = (None if grad is None else _scaled(grad, grad_total) for grad in ctx.saved_tensors)
        return (*scaled, None, None, None, None)


def _scaled(grad: Tensor, factor: Tensor) -> Tensor:
    """``grad`` times a number in the inside dtype: rounded to bfloat16 it would shift every gradient the same way."""
    out = torch.empty_like(grad)
    for start in range(0, len(grad), CHUNK_TOKENS):
        rows = slice(start, start + CHUNK_TOKENS)
        out[rows] = grad[rows].to(factor.dtype) * factor
    return out
