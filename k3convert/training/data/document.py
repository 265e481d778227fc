"""A document: the tokens that see each other, and where such documents come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

IGNORE_INDEX = -100


@dataclass(frozen=True)
class Document:
    """Tokens that belong together.

    Attributes:
        input_ids: int64 ``[T]``; an image is a placeholder for every one of its tokens.
        labels: int64 ``[T]``, unshifted; ``IGNORE_INDEX`` is not counted.
        pixel_values: float32 ``[patches, 3, patch, patch]`` of its images, or None.
        grid_thws: int64 ``[images, 3]``; comes with ``pixel_values``.
    """

    input_ids: Tensor
    labels: Tensor
    pixel_values: Tensor | None = None
    grid_thws: Tensor | None = None


class Source(Protocol):
    """Documents by number, the same ones every time."""

    def __len__(self) -> int:
        """How many documents there are."""

    def num_tokens(self, index: int) -> int:
        """The length of a document, known without its images."""

    def document(self, index: int) -> Document:
        """One document."""
