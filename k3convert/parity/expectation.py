"""What must be equal bit by bit in a cell, and why."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from k3convert.parity.cells import Cell
from k3convert.parity.pinned_shapes import ProductShape
from k3convert.parity.records import Kind
from k3model.parallel.layout import Layout

FORWARD = frozenset({Kind.OUTPUT, Kind.LOGITS, Kind.TOKEN_LOSS, Kind.LOSS, Kind.ROUTED_EXPERTS, Kind.ROUTING_SCORES})
EVERYTHING = FORWARD | {Kind.OUTPUT_GRADIENT, Kind.PARAMETER_GRADIENT}


@dataclass(frozen=True, slots=True)
class Expectation:
    """Which tensors of a cell must have the baseline's bits.

    Attributes:
        bitwise: kinds of tensors.
        reason: why these, or why none.
    """

    bitwise: frozenset[Kind]
    reason: str


def expectation_of(cell: Cell, *, pins_shapes: bool, unpinned: Collection[ProductShape] = ()) -> Expectation:
    """What a cell must share with the eager baseline on one rank, bit by bit.

    Args:
        cell: how the network runs.
        pins_shapes: whether matrix products are padded, in both runs.
        unpinned: products for which padding does not help on this machine.
    """
    layout = cell.layout
    if cell.fused:
        names = ", ".join(f"{name}={impl}" for name, impl in sorted(cell.fused.items()))
        return Expectation(frozenset(), f"{names} may sum in another order")
    if layout.cp > 1:
        return Expectation(frozenset(), "cp cuts the recurrence at other places than its chunks of 64 tokens")
    if _keeps_rows_together(layout):
        return Expectation(EVERYTHING, "the same operations on the same rows in the same order")
    if not pins_shapes:
        return Expectation(frozenset(), "the number of rows of a matrix product depends on the layout, unpinned")
    if unpinned:
        first = min(unpinned)
        return Expectation(
            frozenset(),
            f"padding does not pin {len(unpinned)} matrix products on this machine, for example "
            f"[M, {first.inner}] @ [{first.inner}, {first.columns}] in {first.dtype}",
        )
    return Expectation(FORWARD, "each row is computed alike, in shape-pinned mode; gradients of weights sum over ranks")


def _keeps_rows_together(layout: Layout) -> bool:
    """Whether every matrix product sees the rows that it sees on one rank."""
    return layout.dp == layout.cp == layout.sp == layout.ep == 1
