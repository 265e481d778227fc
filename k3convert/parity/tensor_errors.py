"""Errors of one tensor against another, summed over slices of whole rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Errors:
    """A run's tensor beside the golden one, over the elements that are finite in all runs.

    Attributes:
        rms: root of the mean squared error.
        max_abs: largest absolute error.
        max_rel: largest of ``|error| / max(|golden|, rms of golden)``: small values are judged by the tensor's scale.
        mean: of the signed error.
        mean_outward: of the error along the golden value's own sign; rounding towards zero makes it negative.
        mean_spread: standard error of ``mean``, where errors of one row or one column may share a cause; see
            ``standard_error``.
        outward_spread: standard error of ``mean_outward``, likewise.
        cosine: of the angle between the two; 1 where both are zero.
        norm_ratio: this norm over the golden one; 1 where both are zero.
    """

    rms: float
    max_abs: float
    max_rel: float
    mean: float
    mean_outward: float
    mean_spread: float
    outward_spread: float
    cosine: float
    norm_ratio: float


@dataclass(frozen=True, slots=True)
class SliceSums:
    """Sums over a slice.

    Attributes:
        num: elements that are finite in all runs.
        figures: in the order in which ``ErrorSums`` keeps them.
        columns: ``[2, columns]`` float64: the errors' sums by column, signed and outward.
    """

    num: int
    figures: tuple[float, ...]
    columns: Tensor


class ErrorSums:
    """Running sums of one run's errors; a row has ``columns`` elements.

    Attributes:
        num: elements that were judged.
        golden_squares: sum of the golden values' squares.
    """

    def __init__(self, columns: int) -> None:
        self.num = 0
        self.golden_squares = 0.0
        self._width = columns
        self._columns: Tensor | None = None
        self._maxima = [0.0, 0.0]
        self._sums = [0.0] * 5

    def add(self, part: SliceSums) -> None:
        """Add a slice."""
        squares, max_abs, max_rel, product, own_squares, golden_squares, *row_squares = part.figures
        self.num += part.num
        self.golden_squares += golden_squares
        self._maxima = [max(self._maxima[0], max_abs), max(self._maxima[1], max_rel)]
        for place, figure in enumerate((squares, product, own_squares, *row_squares)):
            self._sums[place] += figure
        self._columns = part.columns if self._columns is None else self._columns + part.columns

    def errors(self) -> Errors:
        """The sums as figures of the whole tensor."""
        squares, product, own_squares, signed_rows, outward_rows = self._sums
        columns = torch.zeros(2, 1, dtype=torch.float64) if self._columns is None else self._columns.cpu()
        num = max(1, self.num)
        total, outward = columns.sum(dim=1).tolist()
        signed_columns, outward_columns = columns.square().sum(dim=1).tolist()
        norms = math.sqrt(own_squares) * math.sqrt(self.golden_squares)
        both_zero = own_squares == self.golden_squares == 0
        ratio = math.inf if self.golden_squares == 0 else math.sqrt(own_squares / self.golden_squares)
        return Errors(
            rms=math.sqrt(squares / num),
            max_abs=self._maxima[0],
            max_rel=self._maxima[1],
            mean=total / num,
            mean_outward=outward / num,
            mean_spread=standard_error(num, self._width, total, squares, signed_rows, signed_columns),
            outward_spread=standard_error(num, self._width, outward, squares, outward_rows, outward_columns),
            cosine=product / norms if norms else float(both_zero),
            norm_ratio=1.0 if both_zero else ratio,
        )


def standard_error(
    num: int, columns: int, total: float, squares: float, row_squares: float, column_squares: float
) -> float:
    """The standard error of a mean over a matrix whose rows and columns share causes.

    The variance of the sum is that between rows plus that between columns less that of the elements, which both of the
    former hold; it is no less than that of the elements.

    Args:
        num: elements.
        columns: elements of a row.
        total: sum of all elements.
        squares: sum of their squares.
        row_squares: sum of the squares of the rows' sums.
        column_squares: sum of the squares of the columns' sums.

    Source: Cameron, Gelbach and Miller, "Robust inference with multiway clustering" (2011), section 2.
    """
    if not math.isfinite(squares):
        return math.inf
    rows = max(1.0, num / max(1, columns))
    elements = max(0.0, squares - total**2 / num)
    between_rows = max(0.0, row_squares - total**2 / rows)
    between_columns = max(0.0, column_squares - total**2 / max(1, columns))
    return math.sqrt(max(elements, between_rows + between_columns - elements)) / num


def sums_of(runs: Sequence[Tensor], golden: Tensor, scale: float, columns: int) -> list[SliceSums]:
    """Sums of the errors of each run over the elements that are finite in all of them and in the golden run.

    Args:
        runs: float64 ``[values]``, whole rows.
        golden: float64 ``[values]``.
        scale: rms of the whole golden tensor.
        columns: elements of a row.
    """
    found = _sums_of_finite(runs, golden, scale, columns)
    # squares are finite where every element is; looking at each of them takes as long as all the sums
    if all(math.isfinite(figure) for part in found for figure in part.figures):
        return found
    finite = golden.isfinite()
    for value in runs:
        finite &= value.isfinite()
    num = int(finite.count_nonzero())
    masked = [value.where(finite, 0.0) for value in runs]
    found = _sums_of_finite(masked, golden.where(finite, 0.0), scale, columns)
    return [SliceSums(num, part.figures, part.columns) for part in found]


def _sums_of_finite(runs: Sequence[Tensor], golden: Tensor, scale: float, columns: int) -> list[SliceSums]:
    size = golden.abs().clamp_(min=scale or 1.0)
    sign, golden_squares = golden.sign(), golden.dot(golden)
    out = []
    for value in runs:
        error = value - golden
        squares, away = error.dot(error), error.abs()
        signed, outward = error.view(-1, columns), (error * sign).view(-1, columns)
        signed_rows, outward_rows = signed.sum(dim=1), outward.sum(dim=1)
        figures = (
            squares, away.max(), away.div_(size).max(), value.dot(golden), value.dot(value), golden_squares,
            signed_rows.dot(signed_rows), outward_rows.dot(outward_rows),
        )  # fmt: skip
        by_column = torch.stack((signed.sum(dim=0), outward.sum(dim=0)))
        out.append(SliceSums(golden.numel(), tuple(torch.stack(figures).tolist()), by_column))
    return out
