"""Attention residuals: against the formula written over a stack of sources."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from k3kernels import K3Op

EPS, WIDTH = 1e-5, 24


@pytest.fixture
def attn_res() -> K3Op:
    return K3Op("attn_res", "standard", "eager")


def make(blocks: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """prefix, norm_weight, proj_weight and the bank; sources of different sizes, so that the norm matters."""
    generator = torch.Generator().manual_seed(blocks)
    sources = [10.0**-n * torch.randn(2, 5, WIDTH, generator=generator) for n in range(blocks + 1)]
    weight, proj = 1 + 0.2 * torch.randn(WIDTH, generator=generator), torch.randn(1, WIDTH, generator=generator)
    return [t.to(dtype) for t in (sources[-1], weight, proj, *sources[:-1])]


def formula(prefix: Tensor, norm_weight: Tensor, proj_weight: Tensor, *bank: Tensor) -> Tensor:
    values = torch.stack((*bank, prefix))
    keys = norm_weight * values * torch.rsqrt(values.square().mean(-1, keepdim=True) + EPS)
    return ((keys @ proj_weight.T).softmax(0) * values).sum(0)


@pytest.mark.parametrize("blocks", [0, 1, 3, 8])
def test_it_and_all_its_gradients_match_the_formula(attn_res: K3Op, blocks: int) -> None:
    leaves = [t.requires_grad_() for t in make(blocks)]

    got = attn_res(*leaves, eps=EPS)
    grads = torch.autograd.grad(got.pow(3).sum(), leaves)

    want = formula(*leaves)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    for grad, wanted in zip(grads, torch.autograd.grad(want.pow(3).sum(), leaves), strict=True):
        torch.testing.assert_close(grad, wanted, rtol=1e-10, atol=1e-12)


def test_an_empty_bank_returns_the_prefix(attn_res: K3Op) -> None:
    prefix, norm_weight, proj_weight = make(0)

    assert torch.equal(attn_res(prefix, norm_weight, proj_weight, eps=EPS), prefix)


def test_values_are_mixed_raw_and_only_keys_are_normalised(attn_res: K3Op) -> None:
    prefix, _, proj_weight, block = make(1)
    no_query = torch.zeros(WIDTH, dtype=torch.float64)

    got = attn_res(prefix, no_query, proj_weight, 1000 * block, eps=EPS)

    torch.testing.assert_close(got, (prefix + 1000 * block) / 2, rtol=1e-14, atol=0)


def test_nothing_is_rounded_before_the_last_cast(attn_res: K3Op) -> None:
    inputs = make(3, torch.bfloat16)

    got = attn_res(*inputs, eps=EPS)

    wide = attn_res(*(t.double() for t in inputs), eps=EPS)
    assert torch.equal(got, attn_res(*(t.float() for t in inputs), eps=EPS).bfloat16())
    # one rounding of 2 ** -9 relative to the value, and no more
    torch.testing.assert_close(got.double(), wide, rtol=2**-8, atol=1e-7)


def test_entries_that_differ_from_the_prefix_are_refused(attn_res: K3Op) -> None:
    prefix, norm_weight, proj_weight, block = make(1)

    with pytest.raises(ValueError, match=r"bank entries \[1, 2\] differ"):
        attn_res(prefix, norm_weight, proj_weight, block, block[:1], block.float(), eps=EPS)
