"""Shape-pinned matrix products: every row count a multiple of 16, so that a row's bits do not depend on its company.

A library may choose another kernel for another number of rows, and with it another order of summation. With one thread
and padded rows it does not on the CPU builds that were tried; ``find_unpinned`` tries the one that runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ROW_MULTIPLE = 16
# Row counts that the probe compares with the same rows inside the largest of them.
PROBED_ROWS = (16, 32, 48, 112)
_ATEN = torch.ops.aten


@dataclass(frozen=True, slots=True, order=True)
class ProductShape:
    """A product ``[M, inner] @ [inner, columns]`` of any M, and whether its right side is a transposed matrix."""

    inner: int
    columns: int
    dtype: str
    transposed: bool


class PinnedShapes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Pads the rows of every matrix product inside it with zeros to a multiple of 16; the result has none of them.

    Attributes:
        shapes: the products that were seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: set[ProductShape] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        arguments = dict(kwargs or {})
        if func is _ATEN.mm.default:
            return self._padded(args[0], args[1], lambda a: func(a, args[1]))
        if func is _ATEN.mm.out:
            out: Tensor = arguments["out"]
            return out.copy_(self._padded(args[0], args[1], lambda a: _ATEN.mm.default(a, args[1])))
        if func is _ATEN.addmm.default and args[0].dim() == 1:
            return self._padded(args[1], args[2], lambda a: func(args[0], a, args[2], **arguments))
        return func(*args, **arguments)

    def _padded(self, left: Tensor, right: Tensor, multiply: Callable[[Tensor], Tensor]) -> Tensor:
        inner, columns = right.shape
        self.shapes.add(ProductShape(inner, columns, str(left.dtype).removeprefix("torch."), right.stride(0) == 1))
        missing = -left.shape[0] % ROW_MULTIPLE
        if not missing or not left.shape[0]:
            return multiply(left)
        padded = torch.cat((left, left.new_zeros(missing, inner)))
        return multiply(padded)[: left.shape[0]]


def find_unpinned(shapes: Iterable[ProductShape], device: str) -> tuple[ProductShape, ...]:
    """The products whose rows have other bits in another company on this machine, in spite of padded row counts."""
    return tuple(shape for shape in sorted(shapes) if not _rows_are_equal(shape, device))


def _rows_are_equal(shape: ProductShape, device: str) -> bool:
    generator = torch.Generator().manual_seed(shape.inner + shape.columns)
    dtype = getattr(torch, shape.dtype)
    left = torch.randn(PROBED_ROWS[-1], shape.inner, generator=generator).to(device, dtype)
    if shape.transposed:
        right = torch.randn(shape.columns, shape.inner, generator=generator).to(device, dtype).T
    else:
        right = torch.randn(shape.inner, shape.columns, generator=generator).to(device, dtype)
    whole = left @ right
    return all(
        torch.equal(left[start : start + rows] @ right, whole[start : start + rows])
        for rows in PROBED_ROWS[:-1]
        for start in (0, PROBED_ROWS[-1] - rows)
    )
