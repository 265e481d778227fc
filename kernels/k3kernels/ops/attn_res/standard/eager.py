"""Attention residuals: the specification (Kimi K3 report, section 2.2, equations 8 to 10).

The sources are the finished blocks and the running prefix. A source's key is its RMS-normalised value; the query is a
learned vector, which only ever appears as the product ``norm_weight * proj_weight``; the values are mixed raw.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3kernels.pair import SavedState
from k3kernels.precision import inside_dtype


def forward(
    prefix: Tensor, norm_weight: Tensor, proj_weight: Tensor, *bank: Tensor, eps: float
) -> tuple[Tensor, SavedState]:
    """``sum_i softmax_i(<V_i * rsqrt(mean(V_i ** 2) + eps), norm_weight * proj_weight>) * V_i``.

    Args:
        prefix: ``[..., D]``, the running sum of the current block: the last source.
        norm_weight: ``[D]``, the gain of the score norm.
        proj_weight: ``[1, D]``, the query.
        bank: The finished blocks, oldest first, each of the prefix's shape and dtype. May be empty.
        eps: Added to the mean of the squares.

    Returns:
        ``[..., D]`` in the prefix's dtype. Scores, softmax and mix are in the inside dtype without any rounding before
        the last cast: a value is normalised first, then multiplied by the product of the two weights, then summed; the
        mix runs over the bank in order and then the prefix. Differentiable once.

    Raises:
        ValueError: a bank entry differs from the prefix in shape or dtype.
    """
    if odd := [n for n, block in enumerate(bank) if block.shape != prefix.shape or block.dtype != prefix.dtype]:
        raise ValueError(f"bank entries {odd} differ from the prefix: {tuple(prefix.shape)} {prefix.dtype}")
    sources = (*bank, prefix)
    inside = inside_dtype(prefix)
    query = norm_weight.to(inside) * proj_weight.to(inside).reshape(-1)
    weight = torch.stack([_score(source.to(inside) * _rstd(source, eps), query) for source in sources]).softmax(0)
    mixed = weight[0] * sources[0].to(inside)
    for share, source in zip(weight[1:], sources[1:], strict=True):
        mixed = mixed + share * source.to(inside)
    saved = SavedState((weight, norm_weight, proj_weight, *sources), {"eps": eps})
    return mixed.to(prefix.dtype), saved


def backward(saved: SavedState, grad_y: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of prefix, norm_weight, proj_weight and every bank entry, in closed form.

    With ``r_i`` the reciprocal norm, ``a_i = <V_i, query>``, ``p_i`` the weight and ``ds_i`` the score's gradient:
    ``dV_i = p_i * g + ds_i * r_i * query - ds_i * a_i * r_i ** 3 / D * V_i``.
    """
    weight, norm_weight, proj_weight, *sources = saved.present()
    inside, eps = weight.dtype, saved.metadata["eps"]
    gain, direction = norm_weight.to(inside), proj_weight.to(inside).reshape(-1)
    query = gain * direction
    grad_y = grad_y.to(inside)
    grad_weight = torch.stack([_score(source, grad_y) for source in sources])
    grad_score = weight * (grad_weight - (weight * grad_weight).sum(0))
    grad_query = torch.zeros_like(query)
    grad_sources = []
    for share, grad_s, source in zip(weight, grad_score, sources, strict=True):
        value = source.to(inside)
        rstd, projection = _rstd(source, eps), _score(source, query)
        pull = grad_s * projection * rstd**3 / value.shape[-1]
        grad_sources.append((share * grad_y + grad_s * rstd * query - pull * value).to(source.dtype))
        grad_query += (grad_s * rstd * value).reshape(-1, value.shape[-1]).sum(0)
    return (
        grad_sources[-1],
        (grad_query * direction).to(norm_weight.dtype),
        (grad_query * gain).reshape(proj_weight.shape).to(proj_weight.dtype),
        *grad_sources[:-1],
    )


def _rstd(source: Tensor, eps: float) -> Tensor:
    """``rsqrt(mean(V ** 2) + eps)``: ``[..., D]`` -> ``[..., 1]`` in the inside dtype."""
    return torch.rsqrt(source.to(inside_dtype(source)).square().mean(-1, keepdim=True) + eps)


def _score(source: Tensor, against: Tensor) -> Tensor:
    """The dot product over the last dim, multiplied and summed in the inside dtype: ``[..., 1]``."""
    return (source.to(against.dtype) * against).sum(-1, keepdim=True)
