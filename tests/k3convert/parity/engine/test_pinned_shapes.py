"""Shape-pinned matrix products."""

from __future__ import annotations

import pytest
import torch

from k3convert.parity import pinned_shapes
from k3convert.parity.pinned_shapes import PinnedShapes, ProductShape, find_unpinned


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 17])
def test_a_row_has_the_same_bits_alone_and_in_company(dtype: torch.dtype, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    left = torch.randn(64, 200, generator=generator).to(dtype)
    linear = torch.nn.Linear(200, 48, bias=False).to(dtype)

    with PinnedShapes():
        whole, part = linear(left), linear(left[:rows])

    assert torch.equal(whole[:rows], part)


def test_products_into_a_given_tensor_are_padded_too() -> None:
    left, right = torch.randn(5, 8), torch.randn(8, 3)
    out = torch.empty(5, 3)

    with PinnedShapes() as pinned:
        torch.mm(left, right, out=out)

    torch.testing.assert_close(out, left @ right)
    assert pinned.shapes == {ProductShape(8, 3, "float32", False)}


def test_gradients_go_through_padded_products() -> None:
    linear = torch.nn.Linear(8, 4)
    x = torch.randn(5, 8, requires_grad=True)

    with PinnedShapes():
        linear(x).square().sum().backward()
    pinned = x.grad

    x.grad = None
    linear(x).square().sum().backward()

    torch.testing.assert_close(pinned, x.grad)


def test_the_probe_names_a_product_whose_rows_depend_on_their_company(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [ProductShape(64, 32, "float32", True), ProductShape(96, 32, "float32", False)]
    right = pinned_shapes._rows_are_equal

    monkeypatch.setattr(
        pinned_shapes, "_rows_are_equal", lambda shape, device: shape.inner != 96 and right(shape, device)
    )

    assert find_unpinned(shapes, "cpu") == (shapes[1],)
