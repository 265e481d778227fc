"""Token-level cross entropy from logits: the specification."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional

from k3kernels.precision import inside_dtype

IGNORE_INDEX = -100


class CrossEntropy(NamedTuple):
    """The losses of all tokens, and what is derived from them.

    Attributes:
        total: 0-d in the inside dtype, the sum of ``token_losses``. Gradients go back from here.
        token_losses: ``[...]`` in the inside dtype, ``-log softmax(logits)[label]``, 0 where not counted. No gradient:
            they are there to be summed over ranks in an order of the caller's choice.
        num_counted: int64 0-d, how many tokens are.
    """

    total: Tensor
    token_losses: Tensor
    num_counted: Tensor


def cross_entropy(logits: Tensor, labels: Tensor, *, ignore_index: int = IGNORE_INDEX) -> CrossEntropy:
    """``-log softmax(logits)[label]`` of every counted token, their sum and their number.

    The caller divides by one denominator for the whole batch, over all ranks and micro-batches. Nothing is shifted
    here.

    Args:
        logits: ``[..., V]``.
        labels: int64 ``[...]``, already shifted; ``ignore_index`` is not counted.
        ignore_index: The label that is not counted.

    Returns:
        Without a counted token the sum and the count are 0, and so is the gradient.

    Raises:
        ValueError: there is not one label for every row of logits.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(f"logits {tuple(logits.shape)} need labels {tuple(logits.shape[:-1])}: {tuple(labels.shape)}")
    flat = logits.reshape(-1, logits.shape[-1]).to(inside_dtype(logits))
    losses = functional.cross_entropy(flat, labels.reshape(-1), ignore_index=ignore_index, reduction="none")
    return CrossEntropy(losses.sum(), losses.detach().view(labels.shape), (labels != ignore_index).sum())
