"""What ranks record, put together again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from k3convert.parity.records import Entry, Kind, RankRecords, ReplicasDiffer, Run

WHOLE = torch.arange(24, dtype=torch.float32).view(4, 6)


def entry(name: str = "layer", shape: tuple[int, ...] = (4, 6)) -> Entry:
    return Entry(Kind.OUTPUT, name, 0, "Linear", None, "", "float32", shape)


def run_of(folder: Path, *ranks: list[tuple[Tensor, tuple[int, ...], bool]]) -> Run:
    for rank, parts in enumerate(ranks):
        records = RankRecords()
        for value, start, is_partial in parts:
            records.add(entry(), value, start, is_partial=is_partial)
        records.save(folder, rank)
    return Run(folder)


def test_parts_of_ranks_make_the_tensor(tmp_path: Path) -> None:
    run = run_of(
        tmp_path,
        [(WHOLE[:2, :3], (0, 0), False), (WHOLE[2:, :3], (2, 0), False)],
        [(WHOLE[:2, 3:], (0, 3), False), (WHOLE[2:, 3:], (2, 3), False)],
    )

    assert torch.equal(run.tensor(Kind.OUTPUT, "layer"), WHOLE)


def test_copies_must_have_the_same_bits(tmp_path: Path) -> None:
    other = WHOLE.clone()
    other[1, 2] = torch.nextafter(other[1, 2], torch.tensor(0.0))

    run = run_of(tmp_path, [(WHOLE, (0, 0), False)], [(other, (0, 0), False)])

    with pytest.raises(ReplicasDiffer, match="1 elements of rank1's copy differ"):
        run.tensor(Kind.OUTPUT, "layer")


def test_terms_are_summed(tmp_path: Path) -> None:
    run = run_of(tmp_path, [(WHOLE, (0, 0), True)], [(2 * WHOLE, (0, 0), True)])

    assert torch.equal(run.tensor(Kind.OUTPUT, "layer"), 3 * WHOLE)


def test_a_hole_is_an_error(tmp_path: Path) -> None:
    run = run_of(tmp_path, [(WHOLE[:2], (0, 0), False)])

    with pytest.raises(ValueError, match="1 parts hold 12 of 24"):
        run.tensor(Kind.OUTPUT, "layer")


def test_parts_that_overlap_are_an_error(tmp_path: Path) -> None:
    run = run_of(tmp_path, [(WHOLE[:2], (0, 0), False), (WHOLE[1:3], (1, 0), False)])

    with pytest.raises(ValueError, match="2 parts"):
        run.tensor(Kind.OUTPUT, "layer")


def test_a_rank_with_nothing_of_a_tensor_does_not_matter(tmp_path: Path) -> None:
    run = run_of(tmp_path, [(WHOLE, (0, 0), False)], [(WHOLE[:0], (4, 0), False)])

    assert torch.equal(run.tensor(Kind.OUTPUT, "layer"), WHOLE)


def test_records_of_two_passes_differ_where_their_bits_do() -> None:
    first, second = RankRecords(), RankRecords()
    for records, value in ((first, WHOLE), (second, -WHOLE)):
        records.add(entry("same"), WHOLE)
        records.add(entry("other"), value)

    assert first.differing(second) == {"other (output)"}
