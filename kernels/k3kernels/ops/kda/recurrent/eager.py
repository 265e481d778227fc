"""Kimi Delta Attention, one token after another: the definition (Kimi K3 report, section 2.1.1, equations 1 and 2).

Shape suffixes: B = batch, T = tokens, H = heads, K = key channels, V = value channels of a head, N = documents.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from k3kernels.documents import document_bounds
from k3kernels.precision import inside_dtype

L2_NORM_EPS = 1e-6


def recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    *,
    scale: float | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule with a decay per key channel, on a state S of shape ``[K, V]`` a head.

    With q and k normalised to length 1, for every token: ``S = diag(exp(g)) S``; ``S = S + beta k (v - S^T k)^T``;
    ``o = S^T (scale q)``. Every document begins from its own initial state.

    Args:
        q: ``[B, T, H, K]``, not normalised: ``x / sqrt(sum(x ** 2) + 1e-6)`` happens inside.
        k: ``[B, T, H, K]``, likewise.
        v: ``[B, T, H, V]``.
        g: ``[B, T, H, K]``, the natural logarithm of the decay, not above 0.
        beta: ``[B, T, H]``, after its sigmoid.
        initial_state: ``[N, H, K, V]``; None stands for zeros.
        scale: Factor of q; None takes ``K ** -0.5``.
        output_final_state: Whether to return the state after the last token.
        cu_seqlens: int ``[N + 1]`` document offsets of one packed row, or None: N = B.
        lower_bound: A promise that no entry of g lies below it, by which an impl may choose its kernels. The result
            does not depend on it; this impl has no use for it.

    Returns:
        ``o`` ``[B, T, H, V]`` in v's dtype, and the final state ``[N, H, K, V]`` in the inside dtype, or None.
        Normalised q and k, the state and all products are in the inside dtype, without any rounding between. An empty
        document hands its state through.

    Raises:
        ValueError: shapes that do not belong together, or a ``cu_seqlens`` that does not cover the row.
    """
    check_shapes(q, k, v, g, beta)
    batch, tokens, heads, channels = q.shape
    inside = inside_dtype(q)
    bounds = document_bounds(batch, tokens, cu_seqlens)
    state = starting_state(initial_state, (len(bounds) - 1, heads, channels, v.shape[-1]), q)
    scale = channels**-0.5 if scale is None else scale
    streams = (
        l2_normalize(q.to(inside)) * scale,
        l2_normalize(k.to(inside)),
        v.to(inside),
        g.to(inside),
        beta.to(inside),
    )
    if cu_seqlens is None:
        out, state = _scan(streams, state)
    else:
        outputs, states = [], []
        for n, (start, stop) in enumerate(pairwise(bounds)):
            document_out, document_state = _scan(tuple(x[:, start:stop] for x in streams), state[n : n + 1])
            outputs.append(document_out)
            states.append(document_state)
        out, state = torch.cat(outputs, 1), torch.cat(states)
    return out.to(v.dtype), state if output_final_state else None


def check_shapes(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> None:
    """Refuse inputs of KDA that do not belong together.

    Raises:
        ValueError: with every mismatch.
    """
    batch_tokens_heads = tuple(q.shape[:3])
    wanted = {
        "k": (k, tuple(q.shape)),
        "v": (v, (*batch_tokens_heads, v.shape[-1])),
        "g": (g, tuple(q.shape)),
        "beta": (beta, batch_tokens_heads),
    }
    if q.dim() != 4:
        raise ValueError(f"q must be [B, T, H, K], got {tuple(q.shape)}")
    wrong = [f"{name} {tuple(x.shape)} instead of {shape}" for name, (x, shape) in wanted.items() if x.shape != shape]
    if wrong:
        raise ValueError(f"q is {tuple(q.shape)}, but: {', '.join(wrong)}")


def starting_state(initial_state: Tensor | None, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """The initial state in the inside dtype, zeros if none is given.

    Raises:
        ValueError: the given one has another shape.
    """
    if initial_state is None:
        return like.new_zeros(shape, dtype=inside_dtype(like))
    if tuple(initial_state.shape) != shape:
        raise ValueError(f"the initial state must be {shape}, got {tuple(initial_state.shape)}")
    return initial_state.to(inside_dtype(like))


def l2_normalize(x: Tensor) -> Tensor:
    """``x / sqrt(sum(x ** 2) + 1e-6)`` over the last dim: the eps joins the sum, not the mean."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_NORM_EPS)


def _scan(streams: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor]:
    """Run q, k, v, g, beta of equal length from a state: outputs ``[B, T, H, V]`` and last states ``[B, H, K, V]``."""
    q, k, v, g, beta = streams
    outputs = []
    for t in range(q.shape[1]):
        state = g[:, t].exp()[..., None] * state
        correction = v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + torch.einsum("bh,bhk,bhv->bhkv", beta[:, t], k[:, t], correction)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return (torch.stack(outputs, 1) if outputs else v.new_zeros(v.shape)), state
