"""The order in which rows come: the same on every rank and in every run, and it can be entered anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from k3convert.errors import BadInput
from k3convert.training.data.document import Source
from k3convert.training.data.rows import RowPlan, assemble, plan_rows
from k3model.parallel.step import Batch


class NoRows(BadInput):
    """Every document is longer than a row."""

    code = "no-rows"


@dataclass(frozen=True, slots=True)
class Position:
    """Where a run stands: the pass over the data and the next row of it."""

    epoch: int = 0
    row: int = 0


class Stream:
    """Micro-batches for one ``dp`` rank, step by step.

    A step takes the next ``global_rows`` rows of the pass, on into the next pass where they run out. Rank ``place`` of
    ``parts`` gets a consecutive run of them, so that all ranks together hold the same rows under every layout.

    Args:
        source: the documents.
        row_length: tokens of a row.
        global_rows, micro_rows: of a step, and of what goes through the network at once.
        packing: several documents a row.
        pad_id: the token behind a row's documents.
        seed: of every pass's order.
        place, parts: this rank's along ``dp``.

    Raises:
        NoRows: every document is longer than a row.
    """

    def __init__(
        self,
        source: Source,
        *,
        row_length: int,
        global_rows: int,
        micro_rows: int,
        packing: bool,
        pad_id: int,
        seed: int,
        place: int = 0,
        parts: int = 1,
    ) -> None:
        self._source, self._row_length, self._pad_id = source, row_length, pad_id
        self._packing, self._seed = packing, seed
        self._global_rows, self._micro_rows = global_rows, micro_rows
        self._place, self._parts = place, parts
        self._lengths = [source.num_tokens(index) for index in range(len(source))]
        self.position = Position()
        self._planned: tuple[int, RowPlan] = (0, self._plan(0))
        self.num_left_out = len(self._planned[1].left_out)
        if not self._planned[1].rows:
            shortest = min(self._lengths)
            raise NoRows(
                f"all {len(source)} documents exceed a row of {row_length} tokens; the shortest has {shortest}",
                hint=f"--set batch.sequence_length={shortest} or more",
            )

    def step(self) -> list[Batch]:
        """This rank's micro-batches of the next step, which moves the position on."""
        rows = [self._next_row() for _ in range(self._global_rows)]
        share = self._global_rows // self._parts
        mine = rows[self._place * share : (self._place + 1) * share]
        return [self._batch(mine[first : first + self._micro_rows]) for first in range(0, share, self._micro_rows)]

    def _batch(self, rows: Sequence[Sequence[int]]) -> Batch:
        documents = [[self._source.document(index) for index in row] for row in rows]
        return assemble(documents, self._row_length, self._pad_id)

    def _next_row(self) -> tuple[int, ...]:
        epoch, row = self.position.epoch, self.position.row
        if self._planned[0] != epoch:
            self._planned = (epoch, self._plan(epoch))
        rows = self._planned[1].rows
        self.position = Position(epoch, row + 1) if row + 1 < len(rows) else Position(epoch + 1, 0)
        return rows[row]

    def _plan(self, epoch: int) -> RowPlan:
        generator = torch.Generator().manual_seed((self._seed << 20) + epoch)
        order = torch.randperm(len(self._lengths), generator=generator).tolist()
        return plan_rows(self._lengths, order, self._row_length, packing=self._packing)
