"""The norms: where each of them rounds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from k3kernels import K3Op

EPS = 1e-5


def make(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, gate = (torch.randn(5, 3, 64, generator=generator).to(dtype) for _ in range(2))
    return x, gate, (1 + 0.2 * torch.randn(64, generator=generator)).to(dtype)


def test_the_text_norm_rounds_before_the_weight() -> None:
    x, _, weight = make()

    got = K3Op("rms_norm", "standard", "eager")(x, weight, eps=EPS)

    normalized = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)
    assert torch.equal(got, weight * normalized.bfloat16())
    assert not torch.equal(got, (weight.float() * normalized).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_vision_norm_is_torchs(dtype: torch.dtype) -> None:
    x, _, weight = make(dtype)
    eps = torch.finfo(torch.float32).eps

    got = K3Op("rms_norm", "torch", "eager")(x, weight, eps=eps)

    tolerance = 4 * torch.finfo(dtype).eps  # torch's kernel sums in another order
    want = torch.nn.functional.rms_norm(x, (64,), weight, eps)
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_the_vision_norm_rounds_after_the_weight() -> None:
    x, _, weight = make()

    got = K3Op("rms_norm", "torch", "eager")(x, weight, eps=EPS)

    normalized = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)
    assert torch.equal(got, (weight.float() * normalized).bfloat16())


def test_torch_without_an_eps_takes_float32s_for_bfloat16() -> None:
    x = make()[0] * 1e-3
    weight = torch.ones(64, dtype=torch.bfloat16)

    want = torch.nn.functional.rms_norm(x, (64,), weight, None)

    got = K3Op("rms_norm", "torch", "eager")(x, weight, eps=torch.finfo(torch.float32).eps)
    # a bfloat16 eps of 7.8e-3 would make these values 100 times smaller; two roundings may differ by one ulp
    torch.testing.assert_close(got, want, rtol=2**-7, atol=0)


@pytest.mark.parametrize("variant", ["standard", "torch"])
def test_the_eps_joins_the_mean_of_squares(variant: str) -> None:
    x, weight = torch.full((1, 4), 1e-3, dtype=torch.float64), torch.ones(4, dtype=torch.float64)

    got = K3Op("rms_norm", variant, "eager")(x, weight, eps=1e-6)

    torch.testing.assert_close(got, x / (2e-6) ** 0.5)


def test_the_gated_norm_rounds_once() -> None:
    x, gate, weight = make()

    got = K3Op("gated_rms_norm", "standard", "eager")(x, gate, weight.float(), eps=EPS)

    normalized = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)
    assert torch.equal(got, (normalized * weight.float() * torch.sigmoid(gate.float())).bfloat16())


def test_the_gated_norm_refuses_another_gate() -> None:
    x, gate, weight = make()

    with pytest.raises(ValueError, match="one shape"):
        K3Op("gated_rms_norm", "standard", "eager")(x, gate[:1], weight, eps=EPS)


@pytest.mark.parametrize(("op", "variant"), [("rms_norm", "standard"), ("rms_norm", "torch")])
def test_gradients_match_autograd_in_float64(op: str, variant: str) -> None:
    x, _, weight = (t.requires_grad_() for t in make(torch.float64))
    formula = weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)

    got = torch.autograd.grad(K3Op(op, variant, "eager")(x, weight, eps=EPS).pow(3).sum(), (x, weight))

    for grad, want in zip(got, torch.autograd.grad(formula.pow(3).sum(), (x, weight)), strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-11, atol=1e-11)
