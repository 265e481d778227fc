"""Token-level cross entropy from logits: the specification."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from k3kernels.precision import inside_dtype

IGNORE_INDEX = -100


def cross_entropy(logits: Tensor, labels: Tensor, *, ignore_index: int = IGNORE_INDEX) -> tuple[Tensor, Tensor]:
    """The sum of ``-log softmax(logits)[label]`` over the counted tokens, and their number.

    The caller divides by one denominator for the whole batch, over all ranks and micro-batches. Nothing is shifted
    here.

    Args:
        logits: ``[..., V]``.
        labels: int64 ``[...]``, already shifted; ``ignore_index`` is not counted.
        ignore_index: The label that is not counted.

    Returns:
        The sum, 0-d in the inside dtype, and the count, int64 0-d. Without a counted token both are 0, and so is the
        gradient.

    Raises:
        ValueError: there is not one label for every row of logits.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(f"logits {tuple(logits.shape)} need labels {tuple(logits.shape[:-1])}: {tuple(labels.shape)}")
    flat = logits.reshape(-1, logits.shape[-1]).to(inside_dtype(logits))
    total = functional.cross_entropy(flat, labels.reshape(-1), ignore_index=ignore_index, reduction="sum")
    return total, (labels != ignore_index).sum()
