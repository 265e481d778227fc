"""The MXFP4 format in numbers: block, element codes, scale bytes, and the exact tables that the codec reads.

A block is 32 consecutive columns of one row. Each column is an E2M1 code of 4 bits (sign bit, then an index into
``MAGNITUDES``); byte ``j`` of a row holds column ``2j`` in its low nibble and column ``2j + 1`` in its high nibble.
The block shares one E8M0 scale byte ``s``, which stands for ``2 ** (s - 127)``; 255 means that the block is NaN.
Source: OCP Microscaling Formats v1.0, sections 5.3 and 6.3; compressed-tensors "mxfp4-pack-quantized" for the layout.

Every table is built from integers, so that flush-to-zero, which other libraries may switch on for a thread, cannot
change it. Bit patterns are float32 ones; a bf16 pattern is the upper half of a float32 pattern.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
U32 = NDArray[np.uint32]
F32 = NDArray[np.float32]

BLOCK_SIZE = 32
BLOCK_BYTES = BLOCK_SIZE // 2
SCALE_BIAS = 127
NAN_SCALE = 255
NUM_SCALES = 256
FIRST_UNSAFE_SCALE = 253
"""The lowest scale byte under which some code has no finite bf16 or float32 value."""

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SIGN_CODE = 8
"""The code's sign bit: code 8 is -0."""

LARGEST_FINITE_CODE = {253: 5, 254: 3}
"""Scale byte -> the largest magnitude code that is still finite: 3 under 253 (4 overflows), 1.5 under 254."""

FLOAT32_INFINITY = 0x7F80_0000
FLOAT32_NAN = 0x7FC0_0000

# The points between two magnitudes, in quarters, and whether the tie itself belongs to the upper one (ties go to
# the even code: 0.25 -> 0, 0.75 -> 1, 1.25 -> 1, 1.75 -> 2, 2.5 -> 2, 3.5 -> 4, 5 -> 4).
_MIDPOINTS_IN_QUARTERS = ((1, False), (3, True), (5, False), (7, True), (10, False), (14, True), (20, False))


def float32_bits(significand: int, exponent: int) -> int:
    """The float32 pattern of ``significand * 2 ** exponent``, which must be exact; infinity where it overflows.

    Raises:
        ValueError: the number needs more bits than float32 has.
    """
    if significand == 0:
        return 0
    top = significand.bit_length() - 1 + exponent
    if top > 127:
        return FLOAT32_INFINITY
    unit = max(top, -126) - 23
    shift = exponent - unit
    if shift < 0 and significand & ((1 << -shift) - 1):
        raise ValueError(f"{significand} * 2**{exponent} is no float32")
    fraction = significand << shift if shift >= 0 else significand >> -shift
    # A normal number's leading bit (2 ** 23) is added onto the exponent field, so the field starts one lower.
    return ((top + 126) << 23) + fraction if top >= -126 else fraction


@cache
def magnitude_bits() -> U32:
    """float32 patterns of every magnitude under every scale: uint32 ``[256, 8]``; row 255 is NaN."""
    rows = [[float32_bits(int(2 * m), scale - SCALE_BIAS - 1) for m in MAGNITUDES] for scale in range(NAN_SCALE)]
    return _read_only(np.array([*rows, [FLOAT32_NAN] * len(MAGNITUDES)], dtype=np.uint32))


@cache
def rounding_bits() -> U32:
    """The smallest float32 pattern that rounds to each magnitude but zero: uint32 ``[256, 7]``; row 255 is unused.

    Patterns of positive floats are ordered as the floats are, so ``code = number of thresholds <= pattern``.
    """
    rows = [
        [float32_bits(quarters, scale - SCALE_BIAS - 2) + (not upper) for quarters, upper in _MIDPOINTS_IN_QUARTERS]
        for scale in range(NAN_SCALE)
    ]
    return _read_only(np.array([*rows, [FLOAT32_NAN] * len(_MIDPOINTS_IN_QUARTERS)], dtype=np.uint32))


@cache
def decoded_pairs() -> U32:
    """Both bf16 values of every packed byte under every scale: uint32 ``[256 * 256]``, index ``scale * 256 + byte``.

    The low half is the low nibble's bf16 pattern, the high half the high nibble's: in memory, two uint16 in column
    order on a little-endian machine.
    """
    half_S8 = magnitude_bits() >> 16
    code_S16 = np.concatenate((half_S8, half_S8 | 0x8000), axis=1)
    code_S16[NAN_SCALE] = FLOAT32_NAN >> 16
    byte = np.arange(256)
    pair_SB: U32 = code_S16[:, byte & 0xF] | code_S16[:, byte >> 4] << 16
    return _read_only(pair_SB.reshape(-1))


def require_blocks(packed: U8, scale: U8) -> tuple[int, int]:
    """Check that packed codes and scales belong together; return rows and blocks per row.

    Args:
        packed: uint8 ``[rows, blocks * 16]``, C-contiguous.
        scale: uint8 ``[rows, blocks]``, C-contiguous.

    Raises:
        ValueError: another dtype, a view with strides, or shapes that do not belong together.
    """
    require_array("packed", packed, np.uint8, (scale.shape[0], scale.shape[-1] * BLOCK_BYTES))
    require_array("scale", scale, np.uint8, (packed.shape[0], packed.shape[-1] // BLOCK_BYTES))
    return scale.shape[0], scale.shape[1]


def require_array(name: str, array: NDArray[Any], dtype: type[np.generic], shape: tuple[int, ...]) -> None:
    """Check one argument's dtype, shape and layout.

    Raises:
        ValueError: it differs; the message names the argument, what was found and what is wanted.
    """
    if array.dtype != dtype or array.shape != shape:
        raise ValueError(f"{name} is {array.dtype} {list(array.shape)}, wanted {np.dtype(dtype)} {list(shape)}")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name} {list(shape)} has strides {array.strides}; it must be C-contiguous")


def _read_only(table: U32) -> U32:
    """Lock a table that every caller shares."""
    table.setflags(write=False)
    return table
