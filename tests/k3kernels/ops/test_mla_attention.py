"""Causal attention within documents, by every implementation that runs here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from k3kernels import K3Op

HEADS, KEY, VALUE, SCALE = 3, 12, 8, 12**-0.5


@pytest.fixture(params=["eager", "sdpa"])
def attention(request: pytest.FixtureRequest) -> K3Op:
    return K3Op("mla_attention", "causal", request.param)


def make(tokens: int, *, batch: int = 1, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    draw: Callable[[int], Tensor] = lambda width: torch.randn(  # noqa: E731
        batch, tokens, HEADS, width, dtype=torch.float64, generator=generator
    ).to(dtype)
    return draw(KEY), draw(KEY), draw(VALUE)


def one_query(q: Tensor, k: Tensor, v: Tensor, keys: slice) -> Tensor:
    """Attention of one query ``[H, Dk]`` over a slice of keys ``[S, H, D]``."""
    weights = torch.einsum("hd,shd->hs", q, k[keys]).mul(SCALE).softmax(-1)
    return torch.einsum("hs,shd->hd", weights, v[keys])


def assert_rows(out: Tensor, want: list[Tensor]) -> None:
    torch.testing.assert_close(out, torch.stack(want), rtol=1e-13, atol=1e-13)


def test_a_query_sees_the_keys_up_to_its_own(attention: K3Op) -> None:
    q, k, v = make(9)

    got = attention(q, k, v, scale=SCALE)

    assert_rows(got[0], [one_query(q[0, t], k[0], v[0], slice(t + 1)) for t in range(9)])


def test_packed_documents_do_not_see_each_other(attention: K3Op) -> None:
    q, k, v = make(9)

    got = attention(q, k, v, scale=SCALE, cu_seqlens=torch.tensor([0, 4, 4, 9]))

    starts = [0] * 4 + [4] * 5
    assert_rows(got[0], [one_query(q[0, t], k[0], v[0], slice(starts[t], t + 1)) for t in range(9)])


def test_document_ids_say_the_same_as_offsets(attention: K3Op) -> None:
    q, k, v = make(9)
    ids = torch.tensor([[7, 7, 7, 7, 2, 2, 2, 2, 2]])

    got = attention(q, k, v, scale=SCALE, document_ids=ids)

    want = attention(q, k, v, scale=SCALE, cu_seqlens=torch.tensor([0, 4, 9]))
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("as_bool", [True, False])
def test_padding_is_not_seen_and_its_rows_are_zero(attention: K3Op, as_bool: bool) -> None:
    q, k, v = make(9, batch=2)
    mask = torch.tensor([[1] * 6 + [0] * 3, [0] * 2 + [1] * 7])

    got = attention(q, k, v, scale=SCALE, document_ids=mask.bool() if as_bool else mask)

    assert_rows(got[0, :6], [one_query(q[0, t], k[0], v[0], slice(t + 1)) for t in range(6)])
    assert_rows(got[1, 2:], [one_query(q[1, t], k[1], v[1], slice(2, t + 1)) for t in range(2, 9)])
    assert got[0, 6:].eq(0).all()
    assert got[1, :2].eq(0).all()


def test_padding_leaves_gradients_finite(attention: K3Op) -> None:
    leaves = [t.requires_grad_() for t in make(9)]
    ids = torch.zeros(1, 9, dtype=torch.int64)
    ids[0, 3:6] = 1

    attention(*leaves, scale=SCALE, document_ids=ids).square().sum().backward()

    for leaf in leaves:
        assert leaf.grad is not None
        assert torch.isfinite(leaf.grad).all()
        assert leaf.grad[0, :3].eq(0).all()


def test_later_queries_sit_behind_earlier_keys(attention: K3Op) -> None:
    q, k, v = make(9)
    ids = torch.tensor([[1, 1, 1, 1, 2, 2, 2, 2, 2]])

    got = attention(q[:, 3:6], k, v, scale=SCALE, query_start=3)
    packed = attention(q[:, 3:6], k, v, scale=SCALE, query_start=3, document_ids=ids)

    torch.testing.assert_close(got, attention(q, k, v, scale=SCALE)[:, 3:6], rtol=1e-13, atol=1e-13)
    whole = attention(q, k, v, scale=SCALE, document_ids=ids)
    torch.testing.assert_close(packed, whole[:, 3:6], rtol=1e-13, atol=1e-13)


def test_gradients_of_sdpa_are_eagers() -> None:
    results = []
    for impl in ("eager", "sdpa"):
        leaves = [t.requires_grad_() for t in make(9)]
        out = K3Op("mla_attention", "causal", impl)(*leaves, scale=SCALE, cu_seqlens=torch.tensor([0, 4, 9]))
        results.append(torch.autograd.grad(out.pow(3).sum(), leaves))

    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_eager_rounds_products_and_weights_to_the_activation_dtype() -> None:
    q, k, v = make(9, dtype=torch.bfloat16)

    got = K3Op("mla_attention", "causal", "eager")(q, k, v, scale=SCALE)

    scores = torch.einsum("bthd,bshd->bhts", q, k) * SCALE
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, -torch.inf).float().softmax(-1).bfloat16()
    assert torch.equal(got, torch.einsum("bhts,bshd->bthd", weights, v))


def test_row_without_tokens_is_allowed(attention: K3Op) -> None:
    q, k, v = make(0)

    assert attention(q, k, v, scale=SCALE).shape == (1, 0, HEADS, VALUE)


def test_what_does_not_belong_together_is_refused(attention: K3Op) -> None:
    q, k, v = make(9)
    ids = torch.ones(1, 9, dtype=torch.int64)

    with pytest.raises(ValueError, match="given twice"):
        attention(q, k, v, scale=SCALE, cu_seqlens=torch.tensor([0, 9]), document_ids=ids)
    with pytest.raises(ValueError, match="must be"):
        attention(q, k, v, scale=SCALE, document_ids=ids[:, :8])
    with pytest.raises(ValueError, match="lie outside 9 keys"):
        attention(q, k, v, scale=SCALE, query_start=1)
    with pytest.raises(ValueError, match="do not belong together"):
        attention(q, k[:, :, :2], v, scale=SCALE)
    with pytest.raises(ValueError, match="from 0 to 9"):
        attention(q, k, v, scale=SCALE, cu_seqlens=torch.tensor([0, 8]))
