"""Experts compute with the numbers that packing would leave, and are trained as if they did not."""

from __future__ import annotations

import pytest
import torch

from k3convert.training.fake_quantization import FakeQuantizedExperts, on_grid
from k3kernels import K3Op

QUANTIZE = K3Op("mxfp4", "quantize", "eager", "cpu")
DEQUANTIZE = K3Op("mxfp4", "dequantize", "eager", "cpu")


def weights(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).mul(0.02).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_values_are_those_of_packing_and_unpacking(dtype: torch.dtype) -> None:
    weight = weights(dtype, 3, 8, 64)

    rounded = on_grid(weight, QUANTIZE, DEQUANTIZE)

    packed, scale = QUANTIZE(weight, rule="compressed-tensors")
    assert torch.equal(rounded, DEQUANTIZE(packed, scale, dtype=dtype))
    assert not torch.equal(rounded, weight)
    assert torch.equal(on_grid(rounded, QUANTIZE, DEQUANTIZE), rounded)


def test_the_gradient_goes_straight_through() -> None:
    weight = weights(torch.float32, 2, 4, 32).requires_grad_()
    factor = weights(torch.float32, 2, 4, 32)

    (on_grid(weight, QUANTIZE, DEQUANTIZE) * factor).sum().backward()

    assert weight.grad is not None
    assert torch.equal(weight.grad, factor)


def test_the_experts_read_rounded_weights_and_pass_everything_else_on() -> None:
    op = K3Op("moe_experts", "situ", "eager", "cpu")
    x = weights(torch.float32, 5, 32)
    ids, factors = torch.tensor([[0], [1], [1], [0], [1]]), torch.ones(5, 1)
    w1, w3, w2 = weights(torch.float32, 2, 64, 32), weights(torch.float32, 2, 64, 32), weights(torch.float32, 2, 32, 64)

    found = FakeQuantizedExperts(op)(x, ids, factors, w1, w3, w2, beta=4.0, linear_beta=25.0)

    rounded = (on_grid(weight, QUANTIZE, DEQUANTIZE) for weight in (w1, w3, w2))
    assert torch.equal(found, op(x, ids, factors, *rounded, beta=4.0, linear_beta=25.0))
