"""Rows: every document is somewhere once, nothing sees its neighbour, nothing of the padding is counted."""

from __future__ import annotations

import random

import torch

from k3convert.training.data.document import Document
from k3convert.training.data.rows import assemble, plan_rows

PAD = 9


def document(*ids: int) -> Document:
    tokens = torch.tensor(ids)
    return Document(tokens, tokens.clone())


def test_every_document_is_in_one_row_or_left_out_and_no_row_is_too_long() -> None:
    chance = random.Random(5)
    lengths = [chance.randint(1, 40) for _ in range(300)]
    order = chance.sample(range(300), 300)

    plan = plan_rows(lengths, order, 32, packing=True)

    placed = [index for row in plan.rows for index in row]
    assert sorted([*placed, *plan.left_out]) == list(range(300))
    assert [index for index in order if lengths[index] <= 32] == placed
    assert all(sum(lengths[index] for index in row) <= 32 for row in plan.rows)
    assert all(lengths[index] > 32 for index in plan.left_out)


def test_a_row_is_closed_only_where_the_next_document_does_not_fit() -> None:
    plan = plan_rows([3, 5, 4, 4, 8, 1], range(6), 8, packing=True)

    assert plan.rows == ((0, 1), (2, 3), (4,), (5,))


def test_without_packing_every_document_has_its_row() -> None:
    assert plan_rows([1, 2, 9], range(3), 8, packing=False).rows == ((0,), (1,))


def test_full_rows_stay_rows() -> None:
    batch = assemble([[document(1, 2, 3)], [document(4, 5, 6)]], 3, PAD)

    assert batch.input_ids.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert batch.cu_seqlens is None


def test_padding_is_a_document_of_its_own_and_not_counted() -> None:
    batch = assemble([[document(1, 2), document(3)], [document(4, 5)]], 4, PAD)

    assert batch.input_ids.tolist() == [[1, 2, 3, PAD, 4, 5, PAD, PAD]]
    assert batch.labels is not None
    assert batch.labels.tolist() == [[1, 2, 3, -100, 4, 5, -100, -100]]
    assert batch.cu_seqlens is not None
    assert batch.cu_seqlens.tolist() == [0, 2, 3, 4, 6, 8]


def test_images_come_in_the_order_of_their_documents() -> None:
    def pictured(token: int) -> Document:
        ids = torch.tensor([token, 7])
        return Document(ids, ids, torch.full((4, 3, 14, 14), float(token)), torch.tensor([[1, 2, 2]]))

    batch = assemble([[pictured(1)], [document(5, 6), pictured(2)]], 4, PAD)

    assert batch.pixel_values is not None
    assert batch.grid_thws is not None
    assert batch.pixel_values[:, 0, 0, 0].tolist() == [1.0] * 4 + [2.0] * 4
    assert len(batch.grid_thws) == 2
