"""Token-level cross entropy from hidden states and the head's weight: the specification."""

from __future__ import annotations

from torch import Tensor

from k3kernels.ops.cross_entropy.standard.eager import IGNORE_INDEX, CrossEntropy, cross_entropy

CHUNK_TOKENS = 1024


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = IGNORE_INDEX,
    chunk_size: int = CHUNK_TOKENS,
) -> CrossEntropy:
    """``cross_entropy(hidden @ weight.T, labels)``, see the standard variant.

    Args:
        hidden: ``[..., D]``, after the final norm.
        weight: ``[V, D]``, the head, in hidden's dtype.
        labels: int64 ``[...]``, already shifted.
        ignore_index: The label that is not counted.
        chunk_size: Tokens whose logits exist at the same time. No result depends on it beyond the order of sums; this
            implementation makes all of them at once.

    Returns:
        The sum, the losses and the count. Logits are rounded to hidden's dtype before the log-softmax in the inside
        dtype.

    Raises:
        ValueError: shapes that do not belong together, or a chunk size below 1.
    """
    check_head(hidden, weight, labels, chunk_size)
    return cross_entropy(hidden @ weight.T, labels, ignore_index=ignore_index)


def check_head(hidden: Tensor, weight: Tensor, labels: Tensor, chunk_size: int) -> None:
    """Refuse inputs that do not belong together.

    Raises:
        ValueError: shapes that do not belong together, or a chunk size below 1.
    """
    if hidden.shape[:-1] != labels.shape or weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, head {tuple(weight.shape)} and labels {tuple(labels.shape)} do not match"
        )
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
