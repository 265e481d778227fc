"""Kimi Delta Attention in chunks of 64 tokens: the specification of the training form.

The recurrence of ``kda/recurrent`` in the form of Kimi Linear (arXiv 2510.26692) and the Kimi K3 report, section
2.1.1, equations 3 and 4. With ``G`` the inclusive cumulative sum of g inside a chunk and S the state at its start::

    A[r, i] = beta_r <k_r, k_i exp(G_r - G_i)>   i < r         T = (I + A)^-1
    P[r, i] = <q_r, k_i exp(G_r - G_i)>          i <= r        U = T (beta v),  W = T (beta k exp(G))
    V' = U - W S        o = (q exp(G)) S + P V'        S_next = diag(exp(G_last)) S + (k exp(G_last - G))^T V'

The products with ``exp(G_r - G_i)`` are formed by halving: rows of the later half of a segment meet columns of the
earlier half through the border between them, ``exp(G_r - G_border) * exp(G_border - G_i)``, and then each half is
treated the same way. So no exponent is ever positive, for any decay and in the backward too, and what underflows in a
factor would underflow in the product. Every exponent is summed outwards from its border rather than taken as a
difference of two sums over the chunk, which may reach -320 and would lose 2e-5 in float32; the gradient of g is summed
likewise.

Shape suffixes: B = batch, T = tokens, H = heads, K = key channels, V = value channels, N = documents, M = chunks of
all documents, C = rows of a chunk (64).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from k3kernels.documents import document_bounds
from k3kernels.ops.kda.recurrent.eager import L2_NORM_EPS, check_shapes, starting_state
from k3kernels.pair import SavedState
from k3kernels.precision import inside_dtype

CHUNK = 64


def forward(
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
) -> tuple[tuple[Tensor, Tensor | None], SavedState]:
    """The gated delta rule with a decay per key channel.

    Args:
        q: ``[B, T, H, K]``, any strides; normalised inside: ``x / sqrt(sum(x ** 2) + 1e-6)``.
        k: ``[B, T, H, K]``, likewise.
        v: ``[B, T, H, V]``.
        g: ``[B, T, H, K]``, the natural logarithm of the decay, not above 0; no lower limit.
        beta: ``[B, T, H]``, after its sigmoid.
        initial_state: ``[N, H, K, V]``; None stands for zeros.
        scale: Factor of q; None takes ``K ** -0.5``.
        output_final_state: Whether to return the state after the last token.
        cu_seqlens: int ``[N + 1]`` document offsets of one packed row, or None: N = B.
        lower_bound: A promise that no entry of g lies below it, by which an impl may choose its kernels. The result
            does not depend on it; this impl has no use for it.

    Returns:
        ``o`` ``[B, T, H, V]`` in v's dtype, and the final state ``[N, H, K, V]`` in the inside dtype, or None.
        Normalised q and k are rounded once to their own dtype; everything after that is in the inside dtype.
        An empty document hands its state through. A document's result does not depend on its neighbours, up to the
        last bits of sums; repeated calls on the CPU are bitwise equal. Differentiable once; the backward recomputes
        the forward and treats the rounding of q and k as the identity.

    Raises:
        ValueError: shapes that do not belong together, or a ``cu_seqlens`` that does not cover the row.
    """
    check_shapes(q, k, v, g, beta)
    batch, tokens, heads, channels = q.shape
    layout = ChunkLayout.of(document_bounds(batch, tokens, cu_seqlens), q.device)
    state = starting_state(initial_state, (layout.num_documents, heads, channels, v.shape[-1]), q)
    scale = channels**-0.5 if scale is None else scale
    chunks = _Chunks.of(layout, q, k, v, g, beta, scale)
    scan = _scan(layout, chunks, state)
    saved = SavedState((q, k, v, g, beta, initial_state), {"layout": layout, "scale": scale})
    out = layout.scatter(scan.out, v)
    return (out, scan.final_state if output_final_state else None), saved


def backward(
    saved: SavedState, grad_out: Tensor | None, grad_final_state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v, g, beta and the initial state."""
    q, k, v, g, beta, initial_state = saved.tensors
    if q is None or k is None or v is None or g is None or beta is None:
        raise ValueError("only the initial state may be missing")
    layout: ChunkLayout = saved.metadata["layout"]
    scale: float = saved.metadata["scale"]
    state = starting_state(initial_state, (layout.num_documents, *q.shape[2:], v.shape[-1]), q)
    chunks = _Chunks.of(layout, q, k, v, g, beta, scale)
    scan = _scan(layout, chunks, state)
    grad_o = chunks.v.new_zeros(chunks.v.shape) if grad_out is None else layout.gather(grad_out, chunks.v.dtype)
    grad_state = torch.zeros_like(state) if grad_final_state is None else grad_final_state.to(state.dtype)

    reverse = _scan_backward(layout, chunks, grad_o, grad_state)
    grads = _chunk_gradients(chunks, scan, reverse, grad_o)
    grad_q = _l2_normalize_backward(layout.gather(q, chunks.q.dtype), grads.q * scale)
    grad_k = _l2_normalize_backward(layout.gather(k, chunks.k.dtype), grads.k)
    return (
        layout.scatter(grad_q, q),
        layout.scatter(grad_k, k),
        layout.scatter(grads.v, v),
        layout.scatter(grads.g, g),
        layout.scatter(grads.beta[..., None], beta[..., None])[..., 0],
        None if initial_state is None else reverse.initial_state.to(initial_state.dtype),
    )


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """Which token sits in which row of which chunk, and which chunks follow each other.

    Chunks are ordered by their number within their document, and documents by length, longest first. So the chunks
    that can be computed at the same time lie side by side, and belong to the first documents of the order.

    Attributes:
        row_tokens: int64 ``[M, C]``, the token of each row in the flattened batch; padding rows name the one past the
            last token.
        num_tokens: Tokens in the flattened batch.
        document_order: int64 ``[N]``, the documents, longest first.
        steps: Offsets of the chunks of each step: those numbered 0 of every document, then those numbered 1, ...
    """

    row_tokens: Tensor
    num_tokens: int
    document_order: Tensor
    steps: tuple[int, ...]

    @classmethod
    def of(cls, bounds: tuple[int, ...], device: torch.device) -> ChunkLayout:
        """Lay the documents between the bounds out in chunks."""
        documents = sorted(enumerate(pairwise(bounds)), key=lambda item: item[1][0] - item[1][1])
        spans: list[tuple[int, int]] = []
        sizes = []
        longest = max((stop - start for _, (start, stop) in documents), default=0)
        for offset in range(0, longest, CHUNK):
            active = [(start + offset, stop) for _, (start, stop) in documents if start + offset < stop]
            spans += active
            sizes.append(len(active))
        span = torch.tensor(spans, dtype=torch.int64, device=device).reshape(-1, 2)
        row_MC = span[:, :1] + torch.arange(CHUNK, device=device)
        return cls(
            row_tokens=torch.where(row_MC < span[:, 1:], row_MC, bounds[-1]),
            num_tokens=bounds[-1],
            document_order=torch.tensor([n for n, _ in documents], dtype=torch.int64, device=device),
            steps=tuple(accumulate(sizes, initial=0)),
        )

    @property
    def num_documents(self) -> int:
        """How many documents there are, empty ones included."""
        return self.document_order.numel()

    def gather(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Tokens to chunks: ``[B, T, H, D]`` -> ``[M, H, C, D]``, zeros in padding rows."""
        flat = x.reshape(self.num_tokens, *x.shape[2:])
        padded = torch.cat((flat, flat.new_zeros(1, *flat.shape[1:])))
        return padded[self.row_tokens].transpose(1, 2).to(dtype).contiguous()

    def scatter(self, chunks: Tensor, like: Tensor) -> Tensor:
        """Chunks to tokens: ``[M, H, C, D]`` -> the shape and dtype of ``like``; padding rows are dropped."""
        flat = chunks.new_empty(self.num_tokens + 1, *like.shape[2:], dtype=like.dtype)
        flat[self.row_tokens] = chunks.transpose(1, 2).to(like.dtype)
        return flat[: self.num_tokens].reshape(like.shape)

    def sort_documents(self, x: Tensor) -> Tensor:
        """Bring ``[N, ...]`` into the documents' order here."""
        return x[self.document_order]

    def restore_documents(self, x: Tensor) -> Tensor:
        """Bring ``[N, ...]`` back into the caller's order."""
        return torch.empty_like(x).index_copy_(0, self.document_order, x)


@dataclass(frozen=True, slots=True)
class _Chunks:
    """Everything about the chunks that does not depend on the state; all ``[M, H, C, ...]`` in the inside dtype."""

    q: Tensor  # normalised, rounded, times the scale
    k: Tensor  # normalised, rounded
    v: Tensor
    beta: Tensor
    from_start: Tensor  # exp(G)
    to_end: Tensor  # exp(G_last - G)
    g: Tensor
    key_products: Tensor  # A without its beta: strictly lower [C, C]
    scores: Tensor  # P: lower, with the diagonal [C, C]
    system: Tensor  # I + A
    u: Tensor
    w: Tensor

    @classmethod
    def of(cls, layout: ChunkLayout, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float) -> _Chunks:
        inside = inside_dtype(q)
        q_c = _l2_normalize(layout.gather(q, inside)).to(q.dtype).to(inside) * scale
        k_c = _l2_normalize(layout.gather(k, inside)).to(k.dtype).to(inside)
        v_c = layout.gather(v, inside)
        beta_c = layout.gather(beta[..., None], inside)
        g_c = layout.gather(g, inside)
        from_start, to_end = g_c.cumsum(-2).exp(), _sums_after(g_c).exp()
        scores, key_products = _decayed_products(q_c, k_c, g_c)
        scores.diagonal(dim1=-2, dim2=-1).copy_((q_c * k_c).sum(-1))
        system = beta_c * key_products + torch.eye(CHUNK, dtype=inside, device=q.device)
        right_side = torch.cat((beta_c * v_c, beta_c * k_c * from_start), -1)
        solved = torch.linalg.solve_triangular(system, right_side, upper=False, unitriangular=True)
        u, w = solved.split((v_c.shape[-1], k_c.shape[-1]), dim=-1)
        return cls(
            q=q_c,
            k=k_c,
            v=v_c,
            beta=beta_c,
            from_start=from_start,
            to_end=to_end,
            g=g_c,
            key_products=key_products,
            scores=scores,
            system=system,
            u=u,
            w=w,
        )

    @property
    def chunk_decay(self) -> Tensor:
        """``exp(G_last)`` as ``[M, H, K, 1]``: what the state keeps over a whole chunk."""
        return self.from_start[..., -1, :, None]


class _Scan(NamedTuple):
    out: Tensor  # [M, H, C, V]
    start_states: Tensor  # [M, H, K, V]
    new_values: Tensor  # V', [M, H, C, V]
    final_state: Tensor  # [N, H, K, V]


class _ReverseScan(NamedTuple):
    next_states: Tensor  # gradients of the state after each chunk, [M, H, K, V]
    new_values: Tensor  # gradients of V', [M, H, C, V]
    initial_state: Tensor  # [N, H, K, V]


class _ChunkGradients(NamedTuple):
    q: Tensor  # of the normalised, scaled q
    k: Tensor  # of the normalised k
    v: Tensor
    g: Tensor
    beta: Tensor  # [M, H, C]


def _scan(layout: ChunkLayout, chunks: _Chunks, initial_state: Tensor) -> _Scan:
    """Carry the states through the chunks, all documents at the same time."""
    state = layout.sort_documents(initial_state)
    start_states = state.new_empty(chunks.q.shape[0], *state.shape[1:])
    new_values, out = torch.empty_like(chunks.u), torch.empty_like(chunks.u)
    query, key = chunks.q * chunks.from_start, chunks.k * chunks.to_end
    for start, stop in pairwise(layout.steps):
        active, here = slice(stop - start), slice(start, stop)
        start_states[here] = state[active]
        new_values[here] = chunks.u[here] - chunks.w[here] @ state[active]
        out[here] = query[here] @ state[active] + chunks.scores[here] @ new_values[here]
        state[active] = chunks.chunk_decay[here] * state[active] + key[here].mT @ new_values[here]
    return _Scan(out, start_states, new_values, layout.restore_documents(state))


def _scan_backward(layout: ChunkLayout, chunks: _Chunks, grad_o: Tensor, grad_final_state: Tensor) -> _ReverseScan:
    """Carry the states' gradients back through the chunks."""
    grad_state = layout.sort_documents(grad_final_state)
    next_states = grad_state.new_empty(chunks.q.shape[0], *grad_state.shape[1:])
    new_values = chunks.scores.mT @ grad_o
    query, key = chunks.q * chunks.from_start, chunks.k * chunks.to_end
    for start, stop in reversed(list(pairwise(layout.steps))):
        active, here = slice(stop - start), slice(start, stop)
        next_states[here] = grad_state[active]
        new_values[here] += key[here] @ grad_state[active]
        grad_state[active] = (
            query[here].mT @ grad_o[here]
            + chunks.chunk_decay[here] * grad_state[active]
            - chunks.w[here].mT @ new_values[here]
        )
    return _ReverseScan(next_states, new_values, layout.restore_documents(grad_state))


def _chunk_gradients(chunks: _Chunks, scan: _Scan, reverse: _ReverseScan, grad_o: Tensor) -> _ChunkGradients:
    """From the gradients at the chunk borders to those of the inputs, all chunks at once."""
    grad_scores = (grad_o @ scan.new_values.mT).tril()
    grad_w = -reverse.new_values @ scan.start_states.mT
    solved = torch.linalg.solve_triangular(
        chunks.system.mT, torch.cat((reverse.new_values, grad_w), -1), upper=True, unitriangular=True
    )
    x_u, x_w = solved.split((chunks.v.shape[-1], chunks.k.shape[-1]), dim=-1)
    grad_system = -(x_u @ chunks.u.mT + x_w @ chunks.w.mT).tril(-1)

    pairs = _decayed_products_backward(chunks.q, chunks.k, chunks.g, grad_scores, chunks.beta * grad_system)
    diagonal = grad_scores.diagonal(dim1=-2, dim2=-1)[..., None]
    grad_q = chunks.from_start * (grad_o @ scan.start_states.mT)
    grad_k_start = chunks.beta * chunks.from_start * x_w
    grad_k_end = chunks.to_end * (scan.new_values @ reverse.next_states.mT)
    kept_state = (chunks.chunk_decay * scan.start_states * reverse.next_states).sum(-1)
    grad_g = (
        pairs.g
        + _sums_from(chunks.q * grad_q + chunks.k * grad_k_start)
        + _sums_before(chunks.k * grad_k_end)
        + kept_state[..., None, :]
    )
    return _ChunkGradients(
        q=grad_q + pairs.q + diagonal * chunks.k,
        k=grad_k_start + grad_k_end + pairs.k + diagonal * chunks.q,
        v=chunks.beta * x_u,
        g=grad_g,
        beta=(x_u * chunks.v).sum(-1)
        + (x_w * chunks.k * chunks.from_start).sum(-1)
        + (grad_system * chunks.key_products).sum(-1),
    )


class _Halves(NamedTuple):
    """The later and the earlier halves of all segments of one size; ``[..., segments, half, K]``."""

    late: Tensor
    early: Tensor

    @classmethod
    def of(cls, x: Tensor, half: int) -> _Halves:
        """Views of the halves of ``[..., C, K]``."""
        segments = x.view(*x.shape[:-2], CHUNK // (2 * half), 2, half, x.shape[-1])
        return cls(segments[..., 1, :, :], segments[..., 0, :, :])


def _halvings(g: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Every halving, with the decay from the border to the late rows and from the early rows to the border."""
    half = CHUNK // 2
    while half:
        halves = _Halves.of(g, half)
        yield half, halves.late.cumsum(-2).exp(), _sums_after(halves.early).exp()
        half //= 2


def _meeting_block(products: Tensor, half: int) -> Tensor:
    """View of ``[..., C, C]``: where late rows meet early columns, ``[..., segments, half, half]``."""
    segments = CHUNK // (2 * half)
    blocks = products.view(*products.shape[:-2], segments, 2, half, segments, 2, half)
    return blocks[..., 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def _decayed_products(q: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """``<x_r, k_i exp(G_r - G_i)>`` for x = q and x = k and ``i < r``; zero elsewhere: two ``[M, H, C, C]``."""
    of_q = q.new_zeros(*q.shape[:-1], CHUNK)
    of_k = torch.zeros_like(of_q)
    for half, to_late, to_border in _halvings(g):
        late_q, late_k = _Halves.of(q, half).late * to_late, _Halves.of(k, half).late * to_late
        block = torch.cat((late_q, late_k), -2) @ (_Halves.of(k, half).early * to_border).mT
        _meeting_block(of_q, half).copy_(block[..., :half, :])
        _meeting_block(of_k, half).copy_(block[..., half:, :])
    return of_q, of_k


class _PairGradients(NamedTuple):
    q: Tensor
    k: Tensor
    g: Tensor


def _decayed_products_backward(q: Tensor, k: Tensor, g: Tensor, grad_of_q: Tensor, grad_of_k: Tensor) -> _PairGradients:
    """Gradients of q, k and g through both products.

    A g in a late half decays the rows from its own on, one in an early half the rows before it.
    """
    grads = _PairGradients(torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(g))
    for half, to_late, to_border in _halvings(g):
        grad_block = torch.cat((_meeting_block(grad_of_q, half), _meeting_block(grad_of_k, half)), -2)
        late_q, late_k = _Halves.of(q, half).late * to_late, _Halves.of(k, half).late * to_late
        early_k = _Halves.of(k, half).early * to_border
        grad_late = grad_block @ early_k
        grad_late_q, grad_late_k = grad_late[..., :half, :], grad_late[..., half:, :]
        grad_early_k = grad_block.mT @ torch.cat((late_q, late_k), -2)
        _Halves.of(grads.q, half).late.add_(grad_late_q * to_late)
        _Halves.of(grads.k, half).late.add_(grad_late_k * to_late)
        _Halves.of(grads.k, half).early.add_(grad_early_k * to_border)
        _Halves.of(grads.g, half).late.add_(_sums_from(late_q * grad_late_q + late_k * grad_late_k))
        _Halves.of(grads.g, half).early.add_(_sums_before(early_k * grad_early_k))
    return grads


def _sums_from(x: Tensor) -> Tensor:
    """For every row, the sum of it and all rows after it: ``[..., R, K]``."""
    return x.flip(-2).cumsum(-2).flip(-2)


def _sums_after(x: Tensor) -> Tensor:
    """For every row, the sum of all rows after it."""
    return _sums_from(torch.cat((x[..., 1:, :], torch.zeros_like(x[..., :1, :])), -2))


def _sums_before(x: Tensor) -> Tensor:
    """For every row, the sum of all rows before it."""
    return torch.cat((torch.zeros_like(x[..., :1, :]), x[..., :-1, :]), -2).cumsum(-2)


def _l2_normalize(x: Tensor) -> Tensor:
    return x * _reciprocal_norm(x)


def _l2_normalize_backward(x: Tensor, grad_y: Tensor) -> Tensor:
    reciprocal = _reciprocal_norm(x)
    unit = x * reciprocal
    return reciprocal * (grad_y - unit * (unit * grad_y).sum(-1, keepdim=True))


def _reciprocal_norm(x: Tensor) -> Tensor:
    return torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_NORM_EPS)
