"""What quantising did, in figures that are journaled with each item and add up over runs, parts and ranks."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class QuantizationFigures:
    """Matrices quantised to MXFP4, blocks that changed, and the largest error with the matrix it is in."""

    num_matrices: int
    num_matrices_changed: int
    num_blocks: int
    num_blocks_changed: int
    num_scales_moved: int
    num_blocks_saturated: int
    max_abs_error: float
    max_relative_error: float
    max_abs_error_in: str

    def merged(self, other: QuantizationFigures | None) -> QuantizationFigures:
        """Both together."""
        if other is None:
            return self
        worst = self if self.max_abs_error >= other.max_abs_error else other
        return QuantizationFigures(
            self.num_matrices + other.num_matrices,
            self.num_matrices_changed + other.num_matrices_changed,
            self.num_blocks + other.num_blocks,
            self.num_blocks_changed + other.num_blocks_changed,
            self.num_scales_moved + other.num_scales_moved,
            self.num_blocks_saturated + other.num_blocks_saturated,
            worst.max_abs_error,
            max(self.max_relative_error, other.max_relative_error),
            worst.max_abs_error_in,
        )

    def journaled(self) -> list[Any]:
        """The figures as a JSON list; ``QuantizationFigures(*journaled)`` gives them back."""
        return list(astuple(self))

    def document(self) -> dict[str, Any]:
        """The figures for a report."""
        return {
            "matrices": self.num_matrices,
            "matrices_changed": self.num_matrices_changed,
            "blocks": self.num_blocks,
            "blocks_changed": self.num_blocks_changed,
            "scales_moved": self.num_scales_moved,
            "blocks_saturated": self.num_blocks_saturated,
            "max_abs_error": self.max_abs_error,
            "max_relative_error": self.max_relative_error,
            "max_abs_error_in": self.max_abs_error_in if self.max_abs_error else None,
        }
