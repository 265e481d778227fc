"""The output projection and the next-token loss."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from k3kernels import selected
from k3model.text.documents import Documents


class HeadOutput(NamedTuple):
    """What the head computes.

    Attributes:
        logits: ``[B, T, vocabulary]``, or None where nobody asked.
        loss_sum: float32, the sum over counted labels; None without labels.
        token_losses: float32 ``[B, T]``, its terms, 0 where not counted, without gradient; None without labels.
        num_labels: int64, how many labels were counted; None without labels.
    """

    logits: Tensor | None
    loss_sum: Tensor | None
    token_losses: Tensor | None
    num_labels: Tensor | None


class LanguageHead(nn.Linear):
    """Hidden states to logits, and to the loss without keeping all logits at once.

    The loss lives here because its op reads the weight: a sharding library gathers it around this forward.
    """

    def __init__(self, hidden_size: int, vocab_size: int, ignore_index: int) -> None:
        super().__init__(hidden_size, vocab_size, bias=False)
        self.ignore_index = ignore_index
        self.cross_entropy = selected("cross_entropy_implementation")

    def forward(  # type: ignore[override]  # more than a linear map
        self, hidden_BTD: Tensor, shifted_labels_BT: Tensor | None = None, *, with_logits: bool = True
    ) -> HeadOutput:
        """Project, and sum the cross entropy of ``shifted_labels_BT`` where they are given."""
        logits = nn.functional.linear(hidden_BTD, self.weight) if with_logits else None
        if shifted_labels_BT is None:
            return HeadOutput(logits, None, None, None)
        loss_sum, token_losses, num_labels = self.cross_entropy(
            hidden_BTD, self.weight, shifted_labels_BT, ignore_index=self.ignore_index
        )
        return HeadOutput(logits, loss_sum, token_losses, num_labels)


def shift_labels(labels_BT: Tensor, documents: Documents, ignore_index: int) -> Tensor:
    """The label that each position predicts: the next position's, of the same document.

    The first token of a document is nobody's prediction: neither the padding before it nor the document before it
    has anything to say about it. Padding predicts nothing.
    """
    shifted = torch.full_like(labels_BT, ignore_index)
    shifted[:, :-1] = labels_BT[:, 1:]
    if documents.document_ids is not None:
        is_real = documents.document_ids != 0
        predicts = is_real[:, :-1] & is_real[:, 1:]
        shifted[:, :-1].masked_fill_(~predicts, ignore_index)
    elif documents.cu_seqlens is not None:
        # An empty document at the front ends at 0: there is no position before it.
        ends = documents.cu_seqlens[1:-1]
        shifted[0, ends[ends > 0].long() - 1] = ignore_index
    return shifted
