"""The decay gate: two functions, both against their formulas."""

from __future__ import annotations

import math

import pytest
import torch

from k3kernels import K3Op


@pytest.fixture
def gate() -> K3Op:
    return K3Op("kda_gate", "standard", "eager")


def test_the_bounded_form_is_a_sigmoid_of_the_scaled_sum(gate: K3Op) -> None:
    z, a_log, bias = torch.tensor([[[0.3, -0.7]]]), torch.tensor([0.5]), torch.tensor([0.1, 0.2])

    got = gate(z, a_log, bias, lower_bound=-5.0)

    want = [-5 / (1 + math.exp(-math.exp(0.5) * (value + shift))) for value, shift in ((0.3, 0.1), (-0.7, 0.2))]
    torch.testing.assert_close(got.flatten(), torch.tensor(want))


def test_without_a_bound_it_is_a_softplus(gate: K3Op) -> None:
    z, a_log, bias = torch.tensor([[[0.3, -0.7]]]), torch.tensor([0.5]), torch.tensor([0.1, 0.2])

    got = gate(z, a_log, bias, lower_bound=None)

    want = [-math.exp(0.5) * math.log1p(math.exp(value + shift)) for value, shift in ((0.3, 0.1), (-0.7, 0.2))]
    torch.testing.assert_close(got.flatten(), torch.tensor(want))


def test_the_bounded_form_is_no_clamp_of_the_other(gate: K3Op) -> None:
    z, a_log, bias = torch.tensor([[[2.0]]]), torch.tensor([0.0]), torch.tensor([0.0])

    bounded, unbounded = (gate(z, a_log, bias, lower_bound=bound) for bound in (-5.0, None))

    assert abs(bounded.item() - max(unbounded.item(), -5.0)) > 1


def test_a_log_is_one_a_head_and_the_bias_one_a_channel(gate: K3Op) -> None:
    z = torch.zeros(1, 1, 2, 3)
    a_log, bias = torch.tensor([0.0, 1.0]), torch.arange(6.0)

    got = gate(z, a_log, bias, lower_bound=-5.0)

    want = -5 * torch.sigmoid(torch.stack((bias[:3], math.e * bias[3:])))
    torch.testing.assert_close(got[0, 0], want)


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_row_92_gates_are_float32_for_bfloat16_input(gate: K3Op, lower_bound: float | None) -> None:
    z = torch.randn(2, 3, 2, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    a_log, bias = torch.zeros(2), torch.full((8,), 1e-4)

    got = gate(z, a_log, bias, lower_bound=lower_bound)

    assert got.dtype == torch.float32
    assert torch.equal(got, gate(z.float(), a_log, bias, lower_bound=lower_bound))


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_gradients_match_autograd_of_the_formula(gate: K3Op, lower_bound: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 3, 2, 4), (2,), (8,))
    leaves = [torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_() for s in shapes]
    z, a_log, bias = leaves
    shifted = z + bias.view(2, 4)
    rate = a_log.exp()[:, None]
    formula = (
        -rate * torch.nn.functional.softplus(shifted)
        if lower_bound is None
        else lower_bound * torch.sigmoid(rate * shifted)
    )

    got = torch.autograd.grad(gate(*leaves, lower_bound=lower_bound).square().sum(), leaves)

    for grad, want in zip(got, torch.autograd.grad(formula.square().sum(), leaves), strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("value", [-200.0, 200.0])
@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_saturated_gates_have_finite_values_and_gradients(gate: K3Op, value: float, lower_bound: float | None) -> None:
    z = torch.full((1, 1, 1, 4), value, requires_grad=True)
    a_log, bias = torch.full((1,), 2.7, requires_grad=True), torch.zeros(4, requires_grad=True)

    got = gate(z, a_log, bias, lower_bound=lower_bound)
    grads = torch.autograd.grad(got.sum(), (z, a_log, bias))

    assert torch.isfinite(got).all()
    assert (got <= 0).all()
    assert all(torch.isfinite(grad).all() for grad in grads)


def test_a_nearly_saturated_gate_still_has_a_gradient(gate: K3Op) -> None:
    z = torch.full((1, 1, 1, 1), 20.0, requires_grad=True)

    (grad,) = torch.autograd.grad(gate(z, torch.zeros(1), torch.zeros(1), lower_bound=-5.0).sum(), z)

    assert grad.item() == pytest.approx(-5 * math.exp(-20), rel=1e-5)


def test_what_does_not_belong_together_is_refused(gate: K3Op) -> None:
    with pytest.raises(ValueError, match="needs A_log"):
        gate(torch.zeros(1, 1, 2, 3), torch.zeros(3), torch.zeros(6), lower_bound=-5.0)
    with pytest.raises(ValueError, match="needs A_log"):
        gate(torch.zeros(1, 1, 2, 3), torch.zeros(2), torch.zeros(3), lower_bound=-5.0)
    with pytest.raises(ValueError, match="must be negative, got 0"):
        gate(torch.zeros(1, 1, 2, 3), torch.zeros(2), torch.zeros(6), lower_bound=0.0)
