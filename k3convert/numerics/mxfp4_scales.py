"""Questions about scale bytes: which blocks have no finite bf16 form, which are NaN, whether a tensor looks right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from k3convert.numerics.mxfp4_format import (
    BLOCK_BYTES,
    FIRST_UNSAFE_SCALE,
    LARGEST_FINITE_CODE,
    NAN_SCALE,
    NUM_SCALES,
    U8,
    require_blocks,
)

PLAUSIBLE_MEDIANS = range(118, 125)
"""Where the median scale byte of a trained expert lies; rows of the release show 120..122."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Some blocks of one tensor, in order: three arrays of equal length."""

    rows: NDArray[np.int64]
    blocks: NDArray[np.int64]
    scale_bytes: U8

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """Row, block within the row, scale byte."""
        return zip(self.rows.tolist(), self.blocks.tolist(), self.scale_bytes.tolist(), strict=True)


def find_unrepresentable(packed: U8, scale: U8) -> Blocks:
    """Find the blocks that hold a value without a finite bf16 form.

    These are byte 253 with a code of magnitude 4 or 6, byte 254 with 2 or more, and byte 255 whatever its codes.

    Args:
        packed: uint8 ``[rows, columns / 2]``.
        scale: uint8 ``[rows, columns / 32]``.

    Returns:
        All of them, not the first.

    Raises:
        ValueError: dtypes, shapes or strides do not fit.
    """
    rows, blocks = require_blocks(packed, scale)
    suspect = np.flatnonzero(scale >= FIRST_UNSAFE_SCALE)
    byte_N = scale.reshape(-1)[suspect]
    packed_NP = packed.reshape(rows * blocks, BLOCK_BYTES)[suspect]
    largest_N = np.maximum(packed_NP & 0x7, packed_NP >> 4 & 0x7).max(axis=1)
    allowed_N = np.full(len(suspect), -1, dtype=np.int8)
    for byte, code in LARGEST_FINITE_CODE.items():
        allowed_N[byte_N == byte] = code
    return _blocks_at(suspect[largest_N > allowed_N], scale)


def find_nan_scales(scale: U8) -> Blocks:
    """Find the blocks whose scale byte is 255, which means NaN: uint8 ``[rows, columns / 32]`` in, all of them out."""
    return _blocks_at(np.flatnonzero(scale == NAN_SCALE), scale)


def scale_histogram(scale: U8) -> NDArray[np.int64]:
    """Count each scale byte: int64 ``[256]``. Histograms of a tensor's pieces add up to the tensor's."""
    return np.bincount(scale.reshape(-1), minlength=NUM_SCALES)


def median_scale(histogram: NDArray[np.int64]) -> int | None:
    """The lower median byte of a histogram, or None if it is empty.

    A median outside ``PLAUSIBLE_MEDIANS`` is worth a warning and no more: a writer that subtracts a constant twice
    makes legal files whose weights are all too small.
    """
    total = int(histogram.sum())
    if total == 0:
        return None
    return int(np.searchsorted(np.cumsum(histogram), (total + 1) // 2))


def _blocks_at(flat: NDArray[np.int64], scale: U8) -> Blocks:
    rows, blocks = np.divmod(flat, max(scale.shape[-1], 1))
    return Blocks(rows=rows, blocks=blocks, scale_bytes=scale.reshape(-1)[flat])
