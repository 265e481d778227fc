"""Where documents and padding are in a batch, worked out once a forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from k3kernels.documents import document_bounds


@dataclass(frozen=True)
class Documents:
    """How the tokens of a batch belong together.

    A dense batch has none of the tensors; a packed row has ``cu_seqlens``; a padded batch has all three.

    Attributes:
        cu_seqlens: int64 ``[N + 1]``, bounds of the documents in the row that ``pack`` makes.
        real: int64 ``[R]``, flat places of the tokens that are no padding.
        document_ids: int64 ``[B, T]``, 0 for padding, 1 for the rest: one document a row.
    """

    cu_seqlens: Tensor | None = None
    real: Tensor | None = None
    document_ids: Tensor | None = None

    def pack(self, x: Tensor) -> Tensor:
        """``[B, T, D]`` without its padding, as one row ``[1, R, D]``; anything else as it is."""
        return x if self.real is None else x.flatten(0, 1).index_select(0, self.real)[None]

    def unpack(self, packed: Tensor, batch: int, tokens: int) -> Tensor:
        """The inverse of ``pack``; padding is zero."""
        if self.real is None:
            return packed
        out = packed.new_zeros(batch * tokens, *packed.shape[2:])
        return torch.unflatten(out.index_copy(0, self.real, packed[0]), 0, (batch, tokens))

    def attention_arguments(self) -> dict[str, Tensor | None]:
        """The arguments that tell the attention op of unpacked tokens what may see what."""
        if self.document_ids is not None:
            return {"document_ids": self.document_ids}
        return {"cu_seqlens": self.cu_seqlens}


def find_documents(tokens_BT: Tensor, attention_mask: Tensor | None, cu_seqlens: Tensor | None) -> Documents:
    """Read what the caller said about the batch.

    Args:
        tokens_BT: ``[B, T]`` or ``[B, T, D]``; only the shape is read.
        attention_mask: int or bool ``[B, T]``, 0 for padding on either side; each row is one document.
        cu_seqlens: int ``[N + 1]``, bounds of the documents packed into a single row.

    Raises:
        ValueError: both are given, a shape does not fit, or ``cu_seqlens`` does not cover the row in order.
    """
    batch, tokens = tokens_BT.shape[:2]
    if attention_mask is not None and cu_seqlens is not None:
        raise ValueError("attention_mask and cu_seqlens both say what belongs together; give one of them")
    if cu_seqlens is not None:
        # Before anything indexes with them: a negative bound would count from the end of the row.
        document_bounds(batch, tokens, cu_seqlens)
        return Documents(cu_seqlens=cu_seqlens)
    if attention_mask is None:
        return Documents()
    if tuple(attention_mask.shape) != (batch, tokens):
        raise ValueError(f"attention_mask must be {(batch, tokens)}, got {tuple(attention_mask.shape)}")
    is_real = attention_mask != 0
    if bool(is_real.all()):
        return Documents()
    lengths = is_real.sum(dim=1)
    cu_seqlens = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
    return Documents(cu_seqlens, is_real.flatten().nonzero().flatten(), is_real.long())
