"""The raw pair contract: signatures, counts and types, and what reaches the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from k3kernels.pair import SavedState, differentiable_op

Op = Callable[..., Any]


def scaled_forward(x: Tensor, bias: Tensor | None = None, *, factor: float = 2.0) -> tuple[Tensor, SavedState]:
    """Scale, then shift."""
    y = factor * x if bias is None else factor * x + bias
    return y, SavedState((x, bias), {"factor": factor})


def scaled_backward(saved: SavedState, grad_y: Tensor) -> tuple[Tensor, Tensor | None]:
    _, bias = saved.tensors
    return saved.metadata["factor"] * grad_y, None if bias is None else grad_y


@pytest.fixture
def scaled() -> Op:
    return differentiable_op(scaled_forward, scaled_backward, name="scaled")


def test_row_2_the_generated_op_has_the_forwards_signature_and_docstring(scaled: Op) -> None:
    import inspect

    assert str(inspect.signature(scaled)) == str(inspect.signature(scaled_forward))
    assert scaled.__doc__ == "Scale, then shift."


def test_row_2_gradients_of_the_generated_op_match_autograd(scaled: Op) -> None:
    x, bias = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))

    assert torch.autograd.gradcheck(lambda x, bias: scaled(x, bias, factor=5.0), (x, bias))


def test_row_2_an_omitted_optional_tensor_is_filled_in(scaled: Op) -> None:
    x = torch.ones(2, requires_grad=True)

    scaled(x).sum().backward()

    assert x.grad is not None
    assert x.grad.tolist() == [2, 2]


def test_row_2_tensors_may_be_passed_by_name(scaled: Op) -> None:
    assert scaled(torch.ones(1), bias=torch.ones(1)).item() == 3


def test_row_2_a_positional_argument_that_is_no_tensor_is_refused(scaled: Op) -> None:
    with pytest.raises(TypeError, match="positional argument 1 must be a tensor, got float"):
        scaled(torch.ones(1), 2.0)


def test_row_2_an_attribute_cannot_be_positional(scaled: Op) -> None:
    with pytest.raises(TypeError, match="too many positional"):
        scaled(torch.ones(1), None, 2.0)


@pytest.mark.parametrize(
    ("grads", "message"),
    [
        ((torch.ones(1),), "must return 2 gradients, got 1"),
        ((torch.ones(1), None, None), "must return 2 gradients, got 3"),
        (torch.ones(1), "must return 2 gradients, got Tensor"),
        ((1.0, None), "must be tensors or None, got float"),
    ],
)
def test_row_2_a_backward_that_breaks_the_contract_is_refused(grads: Any, message: str) -> None:
    op = differentiable_op(scaled_forward, lambda saved, grad: grads, name="scaled")

    with pytest.raises(TypeError, match=message):
        op(torch.ones(1, requires_grad=True)).sum().backward()


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (torch.ones(1), r"must return \(output, SavedState\), got Tensor"),
        ((torch.ones(1), ()), r"must return \(output, SavedState\), got tuple"),
        ((1.0, SavedState(())), "outputs must be tensors or None, got float"),
    ],
)
def test_row_2_a_forward_that_breaks_the_contract_is_refused(returned: Any, message: str) -> None:
    def forward(x: Tensor) -> Any:
        return returned

    op = differentiable_op(forward, scaled_backward, name="broken")

    with pytest.raises(TypeError, match=message):
        op(torch.ones(1))


def test_row_2_positional_defaults_other_than_none_are_refused() -> None:
    def forward(x: Tensor, factor: float = 2.0) -> tuple[Tensor, SavedState]:
        return x, SavedState(())

    with pytest.raises(TypeError, match="factor must default to None"):
        differentiable_op(forward, scaled_backward, name="bad")


def test_row_2_open_attributes_are_refused() -> None:
    def forward(x: Tensor, **anything: Any) -> tuple[Tensor, SavedState]:
        return x, SavedState(())

    with pytest.raises(TypeError, match="anything is not allowed"):
        differentiable_op(forward, scaled_backward, name="bad")


def test_the_backward_learns_which_gradients_are_wanted() -> None:
    seen = []

    def backward(saved: SavedState, grad_y: Tensor) -> tuple[Tensor, None]:
        seen.append(saved.needs_grad)
        return grad_y, None

    op = differentiable_op(scaled_forward, backward, name="scaled")

    op(torch.ones(1, requires_grad=True), torch.ones(1)).sum().backward()

    assert seen == [(True, False)]


def test_an_unused_output_has_no_gradient() -> None:
    seen: list[tuple[Tensor | None, ...]] = []

    def forward(x: Tensor) -> tuple[tuple[Tensor, Tensor, None], SavedState]:
        return (2 * x, 3 * x, None), SavedState(())

    def backward(saved: SavedState, *grads: Tensor | None) -> tuple[Tensor | None]:
        seen.append(grads)
        return (grads[1],)

    first, second, third = differentiable_op(forward, backward, name="two")(torch.ones(1, requires_grad=True))
    second.sum().backward()

    assert first.requires_grad
    assert third is None
    assert [grad is None for grad in seen[0]] == [True, False, True]


def test_present_refuses_a_missing_tensor() -> None:
    with pytest.raises(ValueError, match="1 of 2 saved tensors are missing"):
        SavedState((torch.ones(1), None)).present()
