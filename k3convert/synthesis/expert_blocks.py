"""MXFP4 blocks that hold every case a converter can get wrong and still leave a forward pass finite.

Codes are uniform, so -0 (code 8) is everywhere and most blocks reach magnitude 6. One block in eight is confined to
fewer codes, so that its largest magnitude is 0.5, 1, 1.5, 2, 3 or 4, or that it is all zeros of one or both signs.
Live blocks have scale bytes 0..124, seven in eight of them 117..123, where trained weights lie; the bytes above 124
appear on all-zero blocks alone, up to 254.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from k3convert.numerics.mxfp4_format import BLOCK_BYTES, BLOCK_SIZE, U8

U64 = NDArray[np.uint64]

LARGEST_LIVE_SCALE = 124
LARGEST_SCALE = 254
# Byte and how many of 899 live blocks have it; the other 125 of 1024 take one of 0..124 each.
_TRAINED_SCALES = {117: 80, 118: 180, 119: 300, 120: 220, 121: 90, 122: 24, 123: 5}

# The low 10 bits of a block's random number choose the scale byte, the high 6 bits the kind of block.
_SCALE_BITS = 10
# What each of the first kinds leaves of a byte of two codes; the other kinds leave all of it.
_ALL_ZERO_KINDS = (0x00, 0x88)
_CONFINED_KINDS = (
    0x99,  # 0, 0.5
    0xAA,  # 0, 1
    0xBB,  # 0, 0.5, 1, 1.5
    0xCC,  # 0, 2
    0xDD,  # 0, 0.5, 2, 3
    0xEE,  # 0, 1, 2, 4
)
_NUM_KINDS = 64


def expert_matrix(random: np.random.Generator, out_features: int, in_features: int) -> tuple[U8, U8]:
    """Draw one expert matrix.

    Returns:
        Packed codes, uint8 ``[out_features, in_features / 2]``, and scales, uint8 ``[out_features,
        in_features / 32]``.
    """
    num_blocks = out_features * in_features // BLOCK_SIZE
    drawn = random.integers(0, 1 << 64, (num_blocks, BLOCK_BYTES // 8), dtype=np.uint64)
    choice = random.integers(0, 1 << 16, num_blocks, dtype=np.uint16)
    drawn &= _masks()[choice >> _SCALE_BITS, None]
    scale = _scales()[choice]
    return drawn.view(np.uint8).reshape(out_features, -1), scale.reshape(out_features, -1)


@cache
def _masks() -> U64:
    """What each kind keeps of eight bytes of codes: uint64 ``[64]``."""
    kept = [*_ALL_ZERO_KINDS, *_CONFINED_KINDS]
    kept += [0xFF] * (_NUM_KINDS - len(kept))
    return np.array([byte * 0x0101_0101_0101_0101 for byte in kept], dtype=np.uint64)


@cache
def _scales() -> U8:
    """The scale byte for every 16-bit choice: uint8 ``[65536]``."""
    live = [byte for byte, count in _TRAINED_SCALES.items() for _ in range(count)]
    live += range(LARGEST_LIVE_SCALE + 1)
    any_byte = [index * (LARGEST_SCALE + 1) >> _SCALE_BITS for index in range(1 << _SCALE_BITS)]
    per_kind = [any_byte if kind < len(_ALL_ZERO_KINDS) else live for kind in range(_NUM_KINDS)]
    return np.array(per_kind, dtype=np.uint8).reshape(-1)
