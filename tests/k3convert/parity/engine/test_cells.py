"""Cells as text, and the matrices of them."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from k3convert.parity.cells import Cell, CellSyntax, DataKind, Precision, parse_cell
from k3convert.parity.expectation import EVERYTHING, FORWARD, expectation_of
from k3convert.parity.matrix import FACTORS, Matrix, covering_rows, matrix_cells
from k3convert.parity.pinned_shapes import ProductShape
from k3model.parallel.layout import Layout


def test_a_cell_has_every_part_that_its_text_names() -> None:
    cell = parse_cell("sp=2,ep=2,impl.kda=fla,dtype=bf16,data=packed,ac=on,head_shard=0")

    assert cell.layout == Layout(sp=2, ep=2)
    assert cell.fused == {"chunk_kda": "fla"}
    assert (cell.dtype, cell.data, cell.recomputes, cell.shards_heads) == (Precision.BF16, DataKind.PACKED, True, False)


@pytest.mark.parametrize("matrix", list(Matrix))
def test_the_text_of_a_cell_reads_back_as_the_cell(matrix: Matrix) -> None:
    cells = matrix_cells(matrix)

    assert all(parse_cell(str(cell)) == cell for cell in cells)
    assert len({str(cell) for cell in cells}) == len(cells)


def test_all_parts_that_cannot_be_read_are_named() -> None:
    with pytest.raises(CellSyntax) as refused:
        parse_cell("sp=two,impl.nothing=fla,dtype=fp8,colour=red")

    assert len(refused.value.offenders) == 4


def test_the_smoke_matrix_has_every_degree_and_both_dtypes() -> None:
    cells = matrix_cells(Matrix.SMOKE)

    assert {cell.layout.sp for cell in cells} >= {1, 2}
    assert {cell.layout.ep for cell in cells} >= {1, 2, 4}
    assert {cell.layout.dp for cell in cells if cell.layout.shards_parameters} >= {2}
    assert {cell.layout.pp for cell in cells} >= {1, 2}
    assert {cell.layout.cp for cell in cells} >= {1, 2}
    assert {cell.data for cell in cells} >= {DataKind.DENSE, DataKind.PACKED, DataKind.IMAGE}
    assert {cell.dtype for cell in cells} == {Precision.FP32, Precision.BF16}
    assert {cell.recomputes for cell in cells} == {True, False}


def test_covering_rows_hold_every_pair_of_values() -> None:
    factors = list(FACTORS.values())

    rows = covering_rows(factors)

    for (i, first), (j, second) in combinations(enumerate(factors), 2):
        assert {(row[i], row[j]) for row in rows} == set(product(first, second))


def test_eager_rows_are_bitwise_forward_under_sp_ep_and_fsdp() -> None:
    for text in ("sp=2", "ep=4", "fsdp=2", "sp=2,ep=2"):
        assert expectation_of(parse_cell(text), pins_shapes=True).bitwise == FORWARD


def test_pipelines_and_recomputation_are_bitwise_backward_too() -> None:
    for text in ("pp=2", "ac=on", ""):
        assert expectation_of(parse_cell(text), pins_shapes=False).bitwise == EVERYTHING


@pytest.mark.parametrize("text", ["cp=2", "impl.attn=sdpa", "cp=2,sp=2"])
def test_other_orders_of_summation_are_not_expected_to_be_bitwise(text: str) -> None:
    expectation = expectation_of(parse_cell(text), pins_shapes=True)

    assert expectation.bitwise == frozenset()
    assert expectation.reason


def test_a_product_that_padding_does_not_pin_takes_the_expectation_away_and_is_named() -> None:
    unpinned = [ProductShape(1536, 64, "bfloat16", True)]

    expectation = expectation_of(Cell(layout=Layout(sp=2)), pins_shapes=True, unpinned=unpinned)

    assert expectation.bitwise == frozenset()
    assert "1536" in expectation.reason
