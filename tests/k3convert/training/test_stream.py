"""The order of rows: equal on all ranks and layouts, different every pass, and entered anywhere."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from k3convert.errors import UsageError
from k3convert.training.data.document import Document
from k3convert.training.data.stream import NoRows, Position, Stream
from k3convert.training.data.synthetic import Walks


class Numbered:
    """Documents that consist of their own number."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def num_tokens(self, index: int) -> int:
        return self.lengths[index]

    def document(self, index: int) -> Document:
        ids = torch.full((self.lengths[index],), index)
        return Document(ids, ids)


def stream(lengths: list[int], *, micro_rows: int = 2, seed: int = 0, place: int = 0, parts: int = 1) -> Stream:
    return Stream(
        Numbered(lengths),
        row_length=4,
        global_rows=4,
        micro_rows=micro_rows,
        packing=True,
        pad_id=99,
        seed=seed,
        place=place,
        parts=parts,
    )


def ids(stream: Stream, num_steps: int = 1) -> list[int]:
    """All tokens in order."""
    return [int(token) for _ in range(num_steps) for batch in stream.step() for token in batch.input_ids.flatten()]


LENGTHS = [1 + number % 4 for number in range(30)]


def test_the_ranks_of_a_layout_hold_the_rows_of_one_rank_in_order() -> None:
    want = ids(stream(LENGTHS, micro_rows=4))

    parts = [ids(stream(LENGTHS, micro_rows=1, place=place, parts=2)) for place in range(2)]

    assert parts[0] + parts[1] == want


def test_a_stream_entered_at_a_position_goes_on_as_the_first_would() -> None:
    first, second = stream(LENGTHS), stream(LENGTHS)
    ids(first, 7)

    second.position = first.position

    assert first.position.epoch > 0
    assert ids(second, 5) == ids(first, 5)


def test_the_position_counts_rows_and_passes() -> None:
    watched = stream([4] * 6)

    positions = []
    for _ in range(4):
        watched.step()
        positions.append(watched.position)

    assert positions == [Position(0, 4), Position(1, 2), Position(2, 0), Position(2, 4)]


def test_every_pass_holds_every_document_once_in_its_own_order() -> None:
    passes = [ids(stream([4] * 8), 4)[:32:4], ids(stream([4] * 8), 4)[32::4]]

    assert [sorted(numbers) for numbers in passes] == [list(range(8))] * 2
    assert passes[0] != passes[1]


def test_another_seed_is_another_order() -> None:
    assert ids(stream(LENGTHS, seed=1)) != ids(stream(LENGTHS))


def test_documents_longer_than_a_row_are_counted() -> None:
    assert stream([2, 9, 3, 5]).num_left_out == 2


def test_documents_that_are_all_longer_than_a_row_are_refused() -> None:
    with pytest.raises(NoRows, match="the shortest has 5"):
        stream([9, 5])


def test_walks_follow_the_edges_of_one_graph() -> None:
    walks = Walks(torch.arange(100, 200), num_tokens=8, num_successors=2, length=64, seed=3)

    rows = [walks.document(index).input_ids.tolist() for index in range(40)]

    successors: dict[int, set[int]] = {}
    for row in rows:
        for token, following in pairwise(row):
            successors.setdefault(token, set()).add(following)
    assert len(successors) == 8
    assert all(len(found) == 2 for found in successors.values())
    assert all(100 <= token < 200 for token in successors)
    assert rows[0] != rows[1]
    assert walks.document(7).input_ids.tolist() == rows[7]


def test_a_graph_with_more_edges_than_nodes_is_refused() -> None:
    with pytest.raises(UsageError, match="num_successors 3"):
        Walks(torch.arange(10), num_tokens=2, num_successors=3, length=4, seed=0)
