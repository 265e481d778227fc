"""The short causal depthwise convolution with SiLU: the specification (released K3 code, ``ShortConvolution``).

Shape suffixes: B = batch, T = tokens, C = channels, W = kernel width, N = documents.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import silu

from k3kernels.documents import document_bounds
from k3kernels.precision import inside_dtype


def short_conv(
    x: Tensor,
    weight: Tensor,
    initial_state: Tensor | None = None,
    *,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``y[t] = SiLU(sum_j weight[:, 0, j] * x[t - (W - 1) + j])``, every document on its own.

    Args:
        x: ``[B, T, C]``.
        weight: ``[C, 1, W]``; index ``W - 1`` multiplies the current token.
        initial_state: ``[N, C, W - 1]``, the inputs before each document, oldest first; None stands for zeros.
        output_final_state: Whether to return the inputs that a continuation needs.
        cu_seqlens: int ``[N + 1]`` document offsets of one packed row, or None: N = B.

    Returns:
        ``y`` ``[B, T, C]`` in x's dtype: products, sum and SiLU in the inside dtype, one rounding at the end; and the
        final state ``[N, C, W - 1]`` in x's dtype, or None. An empty document hands its state through.

    Raises:
        ValueError: the shapes do not belong together, or ``cu_seqlens`` does not cover the row.
    """
    batch, tokens, channels = x.shape
    width = weight.shape[-1]
    if tuple(weight.shape) != (channels, 1, width):
        raise ValueError(f"x {tuple(x.shape)} needs a weight ({channels}, 1, W), got {tuple(weight.shape)}")
    bounds = document_bounds(batch, tokens, cu_seqlens)
    history = starting_history(x, initial_state, (len(bounds) - 1, channels, width - 1)).transpose(1, 2)
    # Every document is laid out behind its history, so that a shift by one never crosses into its neighbour.
    flat = x.reshape(batch * tokens, channels)
    pieces = [torch.cat((history[n], flat[start:stop])) for n, (start, stop) in enumerate(pairwise(bounds))]
    inside = torch.promote_types(inside_dtype(x), weight.dtype)
    outputs = [_convolve(piece.to(inside), weight.to(inside)) for piece in pieces]
    y = silu(torch.cat(outputs)).to(x.dtype).reshape(batch, tokens, channels)
    return y, final_history(flat, history, bounds) if output_final_state else None


def starting_history(x: Tensor, initial_state: Tensor | None, shape: tuple[int, int, int]) -> Tensor:
    """The initial state in x's dtype, zeros if none is given.

    Raises:
        ValueError: the given one has another shape.
    """
    if initial_state is None:
        return x.new_zeros(shape)
    if tuple(initial_state.shape) != shape:
        raise ValueError(f"the initial state must be {shape}, got {tuple(initial_state.shape)}")
    return initial_state.to(x.dtype)


def final_history(flat: Tensor, history: Tensor, bounds: tuple[int, ...]) -> Tensor:
    """The last inputs of every document, those before it included.

    Args:
        flat: ``[B * T, C]``.
        history: ``[N, W - 1, C]``.
        bounds: The documents' offsets in ``flat``.

    Returns:
        ``[N, C, W - 1]``, oldest first.
    """
    kept = history.shape[1]
    tails = []
    for n, (start, stop) in enumerate(pairwise(bounds)):
        seen = torch.cat((history[n], flat[max(start, stop - kept) : stop]))
        tails.append(seen[len(seen) - kept :].T)
    return torch.stack(tails)


def _convolve(padded: Tensor, weight: Tensor) -> Tensor:
    """The weighted sum over the window: ``[W - 1 + T, C]`` -> ``[T, C]``, from the current token backwards."""
    width = weight.shape[-1]
    tokens = padded.shape[0] - (width - 1)
    out = padded[width - 1 :] * weight[:, 0, width - 1]
    for tap in range(width - 2, -1, -1):
        out = out + padded[tap : tap + tokens] * weight[:, 0, tap]
    return out
