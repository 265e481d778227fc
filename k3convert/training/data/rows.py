"""Which documents share a row, and rows as what the network reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from k3convert.training.data.document import IGNORE_INDEX, Document
from k3model.parallel.step import Batch


@dataclass(frozen=True, slots=True)
class RowPlan:
    """The rows of one pass over the data.

    Attributes:
        rows: the documents of every row.
        left_out: documents that are longer than a row.
    """

    rows: tuple[tuple[int, ...], ...]
    left_out: tuple[int, ...]


def plan_rows(lengths: Sequence[int], order: Sequence[int], row_length: int, *, packing: bool) -> RowPlan:
    """Fill rows with documents in the order given; a document goes into the next row where it does not fit.

    Args:
        lengths: tokens of every document, by number.
        order: the documents' numbers.
        row_length: tokens of a row.
        packing: several documents a row; otherwise one.
    """
    rows: list[tuple[int, ...]] = []
    row: list[int] = []
    left = row_length
    left_out: list[int] = []
    for index in order:
        length = lengths[index]
        if length > row_length:
            left_out.append(index)
            continue
        if row and (length > left or not packing):
            rows.append(tuple(row))
            row, left = [], row_length
        row.append(index)
        left -= length
    if row:
        rows.append(tuple(row))
    return RowPlan(tuple(rows), tuple(left_out))


def assemble(rows: Sequence[Sequence[Document]], row_length: int, pad_id: int) -> Batch:
    """Rows as one micro-batch.

    Full rows of one document each stay rows, ``[B, T]``. Anything else is laid side by side as one packed row
    ``[1, B * T]`` with ``cu_seqlens``; the padding behind a row is a document of its own, of which nothing is counted.
    """
    grids = [document.grid_thws for row in rows for document in row if document.grid_thws is not None]
    pixels = [document.pixel_values for row in rows for document in row if document.pixel_values is not None]
    pixel_values = torch.cat(pixels) if pixels else None
    grid_thws = torch.cat(grids) if grids else None
    if pixel_values is None and all(len(row) == 1 and len(row[0].input_ids) == row_length for row in rows):
        input_ids = torch.stack([row[0].input_ids for row in rows])
        return Batch(input_ids, torch.stack([row[0].labels for row in rows]))
    ids: list[Tensor] = []
    labels: list[Tensor] = []
    for row in rows:
        for document in row:
            ids.append(document.input_ids)
            labels.append(document.labels)
        padding = row_length - sum(len(document.input_ids) for document in row)
        if padding:
            ids.append(torch.full((padding,), pad_id))
            labels.append(torch.full((padding,), IGNORE_INDEX))
    bounds = torch.tensor([0, *(len(part) for part in ids)]).cumsum(0)
    return Batch(
        torch.cat(ids)[None],
        torch.cat(labels)[None],
        cu_seqlens=bounds,
        pixel_values=pixel_values,
        grid_thws=grid_thws,
    )
