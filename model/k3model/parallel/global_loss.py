"""The loss of a batch that several ranks share: one sum of tokens over one count."""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from k3model.network import K3Output


class GlobalLoss(NamedTuple):
    """A rank's part of the loss, and the whole.

    Attributes:
        share: 0-d, the sum over this rank's labels divided by the number of all labels; go backward from here. Its
            gradients are summed over the ranks, not averaged.
        total: 0-d, the mean over all counted labels; zero where none is counted. No gradient.
        num_labels: int64 0-d, how many labels all ranks counted.
    """

    share: Tensor
    total: Tensor
    num_labels: Tensor


def global_loss(output: K3Output, group: dist.ProcessGroup, *, num_labels: Tensor | None = None) -> GlobalLoss:
    """Divide a rank's sum by the number of labels on all ranks. A collective, also for a rank without labels.

    Args:
        output: of this rank's share of the batch, with labels.
        group: the ranks that share the batch.
        num_labels: the count to divide by, where the batch goes through in several pieces; None counts this piece.

    Raises:
        ValueError: the output was made without labels.
    """
    if output.loss_sum is None or output.num_labels is None:
        raise ValueError("the loss of a batch needs labels")
    if num_labels is None:
        num_labels = output.num_labels.clone()
        dist.all_reduce(num_labels, group=group)
    share = output.loss_sum / num_labels.clamp(min=1)
    total = share.detach().clone()
    dist.all_reduce(total, group=group)
    return GlobalLoss(share, total, num_labels)
