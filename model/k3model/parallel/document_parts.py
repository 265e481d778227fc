"""Which parts of a batch's documents lie on one rank, where the sequence is cut into contiguous parts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from k3model.text.documents import Documents


@dataclass(frozen=True)
class PartOfDocuments:
    """The documents among a rank's own tokens, and what they continue.

    Attributes:
        cu_seqlens: int64 ``[N + 1]``, their bounds in a packed row; None: every row is one document.
        padding: bool ``[B, T]``; None where nothing is padding.
        tokens_before: how many tokens of the first document here lie on the ranks before.
        open_from: first own token of the document that goes on behind this rank.
        first_ranks: for every rank, the one with the first token of the document that is open at its cut; the rank
            itself where none is.
    """

    cu_seqlens: Tensor | None
    padding: Tensor | None
    tokens_before: int
    open_from: int
    first_ranks: tuple[int, ...]

    def without_padding(self, x: Tensor) -> Tensor:
        """``[B, T, ...]`` with zeros at padding."""
        if self.padding is None:
            return x
        return x.masked_fill(self.padding.view(*self.padding.shape, *(1,) * (x.dim() - 2)), 0)

    def for_first_document(self, x: Tensor) -> Tensor:
        """``[B, ...]`` of the documents that begin the rows here, and zeros for the others: ``[N, ...]``."""
        num_others = 0 if self.cu_seqlens is None else len(self.cu_seqlens) - 2
        return pad(x, (*(0, 0) * (x.dim() - 1), 0, num_others))


class DocumentParts:
    """Cuts the documents of a batch for one of several ranks, once a batch.

    Args:
        place: of the rank, in the order of tokens.
        num_parts: the ranks.
    """

    def __init__(self, place: int, num_parts: int) -> None:
        self.place, self.num_parts = place, num_parts
        self._last: tuple[Documents, int, PartOfDocuments] | None = None

    def of(self, documents: Documents, tokens: int) -> PartOfDocuments:
        """The rank's part; all layers ask for that of the same batch one after another.

        Args:
            documents: of all tokens.
            tokens: own tokens of a row.

        Raises:
            ValueError: a row has padding between its tokens.
        """
        if self._last is not None and self._last[0] is documents and self._last[1] == tokens:
            return self._last[2]
        part = self._packed(documents.cu_seqlens, tokens) if _is_packed(documents) else self._rows(documents, tokens)
        self._last = documents, tokens, part
        return part

    def _packed(self, cu_seqlens: Tensor | None, tokens: int) -> PartOfDocuments:
        if cu_seqlens is None:
            raise ValueError("a packed row has the bounds of its documents")
        starts = cu_seqlens.tolist()[:-1]
        first_tokens = [max(start for start in starts if start <= rank * tokens) for rank in range(self.num_parts)]
        here = self.place * tokens
        bounds = torch.unique_consecutive((cu_seqlens - here).clamp(0, tokens))
        return PartOfDocuments(
            cu_seqlens=bounds,
            padding=None,
            tokens_before=here - first_tokens[self.place],
            open_from=int(bounds[-2]),
            first_ranks=tuple(first // tokens for first in first_tokens),
        )

    def _rows(self, documents: Documents, tokens: int) -> PartOfDocuments:
        padding = None
        if documents.document_ids is not None:
            is_real = documents.document_ids != 0
            num_runs = is_real[:, :1].long().sum(1) + (~is_real[:, :-1] & is_real[:, 1:]).sum(1)
            if rows := (num_runs > 1).nonzero().flatten().tolist():
                raise ValueError(
                    f"rows {rows[:3]} of the batch have padding between their tokens; under cp it lies before or behind"
                )
            padding = ~is_real[:, self.place * tokens : (self.place + 1) * tokens]
        return PartOfDocuments(
            cu_seqlens=None,
            padding=padding,
            tokens_before=self.place * tokens,
            open_from=0,
            first_ranks=(0,) * self.num_parts,
        )


def _is_packed(documents: Documents) -> bool:
    return documents.cu_seqlens is not None and documents.real is None
