"""Which cells a run goes through: one factor at a time, every pair of factors, or all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import combinations, product

from k3convert.parity.cells import Cell, parse_cell


class Matrix(StrEnum):
    """How many cells."""

    SMOKE = "smoke"
    PAIRWISE = "pairwise"
    FULL = "full"


# One factor at a time from the plain cell, and the combinations that share code. Impls follow from the device.
SMOKE_CELLS = (
    "dtype=fp32",
    "dtype=fp32,data=packed",
    "dtype=fp32,data=image",
    "dtype=fp32,ac=on",
    "sp=2,dtype=fp32",
    "sp=2,dtype=fp32,data=packed",
    "sp=2,dtype=fp32,head_shard=0",
    "ep=2,dtype=fp32",
    "ep=4,dtype=fp32",
    "fsdp=2,dtype=fp32",
    "pp=2,dtype=fp32",
    "cp=2,dtype=fp32,data=packed",
    "cp=2,dtype=fp32,data=padded",
    "fsdp=1,cp=2,dtype=fp32",
    "sp=2,ep=2,dtype=fp32,data=image",
    "dtype=bf16",
    "dtype=bf16,data=packed,ac=on",
    "sp=2,dtype=bf16",
    "ep=2,dtype=bf16",
    "fsdp=2,dtype=bf16",
    "pp=2,dtype=bf16",
    "cp=2,dtype=bf16",
    "fsdp=2,sp=2,ep=2,dtype=bf16,data=packed,ac=on",
)

# Implementations beside eager, by the part of a cell that chooses them; those of another device are not run.
IMPL_PARTS = (
    "impl.moe=grouped_mm",
    "impl.attn=sdpa",
    "impl.cross_entropy=chunk_loss",
    "impl.kda=fla",
    "impl.kda_gate=fla",
    "impl.short_conv=fla",
    "impl.gated_rms_norm=fla",
    "impl.attn_res=fla",
)
ALL_FUSED = "impl.moe=grouped_mm,impl.attn=sdpa,impl.kda=fla,impl.short_conv=fla,impl.cross_entropy=chunk_loss"

FACTORS: Mapping[str, Sequence[str]] = {
    "layout": (
        "", "sp=2", "sp=2,head_shard=0", "ep=2", "ep=4", "fsdp=2", "pp=2", "cp=2", "sp=2,ep=2", "fsdp=2,ep=2",
        "cp=2,ep=2", "cp=2,sp=2", "fsdp=2,cp=2", "pp=2,ep=2", "fsdp=2,sp=2,ep=2", "fsdp=4,ep=2",
    ),
    "impl": ("", *IMPL_PARTS),
    "dtype": ("dtype=fp32", "dtype=bf16"),
    "data": ("data=dense", "data=packed", "data=padded", "data=image"),
    "ac": ("ac=off", "ac=on"),
}  # fmt: skip


def matrix_cells(matrix: Matrix) -> tuple[Cell, ...]:
    """The cells of a matrix, without repetition, in a fixed order."""
    match matrix:
        case Matrix.SMOKE:
            texts: Iterator[str] = iter((*SMOKE_CELLS, *_with_impls()))
        case Matrix.PAIRWISE:
            texts = (",".join(filter(None, row)) for row in covering_rows(list(FACTORS.values())))
        case Matrix.FULL:
            texts = (",".join(filter(None, row)) for row in product(*FACTORS.values()))
    return _distinct(texts)


def _with_impls() -> Iterator[str]:
    for dtype in ("fp32", "bf16"):
        yield from (f"{part},dtype={dtype}" for part in IMPL_PARTS)
    yield f"{ALL_FUSED},dtype=bf16,data=packed"


def _distinct(texts: Iterator[str]) -> tuple[Cell, ...]:
    cells: dict[str, Cell] = {}
    for text in texts:
        cell = parse_cell(text)
        cells.setdefault(str(cell), cell)
    return tuple(cells.values())


def covering_rows(factors: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Rows in which every pair of values of two factors occurs, chosen greedily; the same every time.

    Args:
        factors: the values of each factor.
    """
    missing = {
        ((i, a), (j, b))
        for (i, first), (j, second) in combinations(enumerate(factors), 2)
        for a, b in product(range(len(first)), range(len(second)))
    }
    rows: list[tuple[str, ...]] = []
    while missing:
        chosen = _best_row(factors, missing)
        missing -= set(combinations(enumerate(chosen), 2))
        rows.append(tuple(values[index] for values, index in zip(factors, chosen, strict=True)))
    return rows


def _best_row(
    factors: Sequence[Sequence[str]], missing: set[tuple[tuple[int, int], tuple[int, int]]]
) -> tuple[int, ...]:
    """Start from the first missing pair, then give each factor the value that covers most."""
    (i, a), (j, b) = min(missing)
    row: dict[int, int] = {i: a, j: b}
    for factor, values in enumerate(factors):
        if factor in row:
            continue
        gains = [
            sum(tuple(sorted(((factor, value), other))) in missing for other in row.items())
            for value in range(len(values))
        ]
        row[factor] = gains.index(max(gains))
    return tuple(row[factor] for factor in range(len(factors)))
