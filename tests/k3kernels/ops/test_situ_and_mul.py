"""SiTU-GLU over the whole range of its inputs."""

from __future__ import annotations

import math

import pytest
import torch

from k3kernels import K3Op

BETA, LINEAR_BETA = 4.0, 25.0


@pytest.fixture
def situ() -> K3Op:
    return K3Op("situ_and_mul", "standard", "eager")


def scalar(gate: float, up: float, linear_beta: float | None = LINEAR_BETA) -> float:
    opened = 1 / (1 + math.exp(-gate)) if gate > -700 else 0.0
    bounded = up if linear_beta is None else linear_beta * math.tanh(up / linear_beta)
    return BETA * math.tanh(gate / BETA) * opened * bounded


@pytest.mark.parametrize("linear_beta", [LINEAR_BETA, None])
def test_e16_it_is_the_formula_from_small_to_large_inputs(situ: K3Op, linear_beta: float | None) -> None:
    values = [sign * size for size in (0.0, 0.1, 1.0, 3.0, 10.0, 100.0, 1000.0) for sign in (1, -1)]
    pairs = [(gate, up) for gate in values for up in values]
    gate, up = (torch.tensor(column, dtype=torch.float64) for column in zip(*pairs, strict=True))

    got = situ(gate, up, beta=BETA, linear_beta=linear_beta)

    want = torch.tensor([scalar(*pair, linear_beta) for pair in pairs], dtype=torch.float64)
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-300)


def test_e16_it_is_not_a_silu(situ: K3Op) -> None:
    gate = torch.tensor([5.0])

    got = situ(gate, torch.ones(1), beta=BETA, linear_beta=LINEAR_BETA)

    assert (got / torch.nn.functional.silu(gate)).item() == pytest.approx(0.678, abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_infinite_inputs_are_bounded(situ: K3Op, dtype: torch.dtype) -> None:
    infinite = torch.tensor([math.inf, -math.inf, math.inf, -math.inf], dtype=dtype)
    up = torch.tensor([math.inf, math.inf, -math.inf, -math.inf], dtype=dtype)

    got = situ(infinite, up, beta=BETA, linear_beta=LINEAR_BETA)

    assert got.tolist() == [100.0, 0.0, -100.0, 0.0]


def test_gradients_of_infinite_inputs_are_zero(situ: K3Op) -> None:
    gate = torch.tensor([math.inf, -math.inf, 1e4, -1e4], requires_grad=True)
    up = torch.tensor([math.inf, 1.0, 1e4, -1e4], requires_grad=True)

    situ(gate, up, beta=BETA, linear_beta=LINEAR_BETA).sum().backward()

    assert gate.grad is not None
    assert up.grad is not None
    assert gate.grad.tolist() == [0, 0, 0, 0]
    assert torch.isfinite(up.grad).all()


def test_nan_stays_nan(situ: K3Op) -> None:
    got = situ(torch.tensor([math.nan, 1.0]), torch.tensor([1.0, math.nan]), beta=BETA, linear_beta=LINEAR_BETA)

    assert got.isnan().all()


def test_halves_of_one_fused_tensor_are_taken_as_they_are(situ: K3Op) -> None:
    fused = torch.randn(7, 24, generator=torch.Generator().manual_seed(0), requires_grad=True)
    gate, up = fused.chunk(2, -1)

    got = situ(gate, up, beta=BETA, linear_beta=LINEAR_BETA)
    got.sum().backward()

    copied = situ(gate.contiguous(), up.contiguous(), beta=BETA, linear_beta=LINEAR_BETA)
    # the tanh of a vector's tail may differ from that of its body in the last bit
    torch.testing.assert_close(got, copied, rtol=1e-6, atol=0)
    assert fused.grad is not None
    assert fused.grad.count_nonzero() == fused.numel()


def test_bfloat16_is_rounded_once(situ: K3Op) -> None:
    gate, up = (10 * torch.randn(2, 99, generator=torch.Generator().manual_seed(0))).bfloat16()

    got = situ(gate, up, beta=BETA, linear_beta=LINEAR_BETA)

    assert torch.equal(got, situ(gate.float(), up.float(), beta=BETA, linear_beta=LINEAR_BETA).bfloat16())


def test_rows_in_chunks_are_bitwise_those_of_one_call(situ: K3Op) -> None:
    gate, up = torch.randn(2, 33, 16, generator=torch.Generator().manual_seed(0))

    parts = [situ(gate[rows], up[rows], beta=BETA, linear_beta=LINEAR_BETA) for rows in (slice(0, 10), slice(10, None))]

    assert torch.equal(torch.cat(parts), situ(gate, up, beta=BETA, linear_beta=LINEAR_BETA))


def test_the_weight_multiplies_before_the_rounding() -> None:
    gate, up = (3 * torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))).bfloat16()
    row_weight = torch.rand(5, generator=torch.Generator().manual_seed(1))

    got = K3Op("situ_and_mul", "weighted", "eager")(gate, up, row_weight, beta=BETA, linear_beta=LINEAR_BETA)

    plain = K3Op("situ_and_mul", "standard", "eager")(gate.float(), up.float(), beta=BETA, linear_beta=LINEAR_BETA)
    assert torch.equal(got, (row_weight[:, None] * plain).bfloat16())


def test_the_weighted_variant_wants_one_weight_a_row() -> None:
    with pytest.raises(ValueError, match="one weight a row"):
        K3Op("situ_and_mul", "weighted", "eager")(
            torch.ones(2, 3), torch.ones(2, 3), torch.ones(3), beta=BETA, linear_beta=LINEAR_BETA
        )
