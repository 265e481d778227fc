"""bf16 and float32 -> MXFP4 on one core; called through ``mxfp4_encode``.

Decisions are made on integers only: values are bit patterns, and patterns of positive floats are ordered as the
floats are. So nothing depends on the rounding mode or on flush-to-zero, and a block fits a scale exactly when its
codes stand for the block's patterns.

The compiler turns a loop over one row view (``for i in range(row.size)``) into vector code, and a loop over 32 fixed
iterations not; patterns are signed because vector units compare signed integers. That is a factor of four here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from k3convert.numerics.jit import (
    READ_F32_2D,
    READ_I32_2D,
    READ_U8,
    READ_U16_2D,
    READ_U32_2D,
    WRITTEN_F64,
    WRITTEN_I64,
    WRITTEN_U8,
    WRITTEN_U8_2D,
    compiled,
    compiled_into_caller,
    int64,
    void,
)
from k3convert.numerics.mxfp4_format import F32, U8, U16, U32

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]

# Rules, as ``encode_blocks`` takes them.
KEEP_SOURCE = 0
COMPRESSED_TENSORS = 1
OCP_FLOOR = 2
CEIL = 3

# Slots of the counters that ``encode_blocks`` adds to.
OFF_GRID = 0
SCALE_MOVED = 1
SATURATED = 2
NOT_FINITE = 3
NUM_COUNTERS = 4

_INFINITY = np.int32(0x7F80_0000)
_ABSOLUTE = np.int32(0x7FFF_FFFF)
_LARGEST_ALL_FINITE_SCALE = 252


@compiled_into_caller
def _pack(code_pair_P: U16, packed_P: U8) -> None:
    """Two codes, a byte each in a uint16, to one byte: the first code is the low nibble."""
    for j in range(packed_P.size):
        pair = np.uint32(code_pair_P[j])
        packed_P[j] = pair | (pair >> np.uint32(4))


@compiled(void(READ_U16_2D, READ_U32_2D, READ_U8, READ_U32_2D, WRITTEN_U8_2D, WRITTEN_U8_2D, WRITTEN_U8))
def encode_exact_blocks(
    bits_GB: U16, bits_GP: U32, scale_G: U8, pair_table_S: U32, code_GB: U8, packed_GP: U8, exact_G: U8
) -> None:
    """Encode bf16 blocks on the given scales and say which of them that reproduces exactly; the rest is undefined.

    A guess that is right for every normal value on the grid, and a check by decoding. The guess reads a pattern as
    the tiny float of the code (see ``compiled_decode``), so it costs a third of rounding. It is wrong for subnormal
    values; the check finds that as it finds values off the grid. ``bits_GB`` and ``bits_GP`` are one buffer.
    """
    zero, one = np.int16(0), np.int16(1)
    for group in range(scale_G.size):
        bits_B, code_B = bits_GB[group], code_GB[group]
        half = np.int16((np.int64(scale_G[group]) - 1) << 7)
        for i in range(bits_B.size):
            bits = bits_B[i]
            above_half = np.int16(np.int16(bits & np.uint16(0x7FFF)) - half)
            index = np.int16(above_half >> 6)
            index = one if index < one else index
            index = zero if above_half < zero else index
            code_B[i] = np.uint8((index & np.int16(7)) | np.int16((bits >> np.uint16(12)) & np.uint16(8)))
    _pack(code_GB[: scale_G.size].reshape(-1).view(np.uint16), packed_GP.reshape(-1))
    for group in range(scale_G.size):
        bits_P, packed_P = bits_GP[group], packed_GP[group]
        pair_table_256 = pair_table_S[scale_G[group]]
        difference = np.uint32(0)
        for j in range(packed_P.size):
            difference = np.uint32(difference | np.uint32(pair_table_256[packed_P[j]] ^ bits_P[j]))
        # Under 253 and 254 some codes stand for infinity, and an infinite value must not pass as exact.
        exact_G[group] = difference == 0 and scale_G[group] <= _LARGEST_ALL_FINITE_SCALE


@compiled_into_caller
def _round(word_B: I32, threshold_7: I32, code_B: U8) -> None:
    """Write a block's codes: the number of rounding thresholds that a magnitude has reached, and the sign bit."""
    t1, t2, t3, t4 = threshold_7[0], threshold_7[1], threshold_7[2], threshold_7[3]
    t5, t6, t7 = threshold_7[4], threshold_7[5], threshold_7[6]
    for i in range(word_B.size):
        word = word_B[i]
        a = np.int32(word & _ABSOLUTE)
        low = np.int32(a >= t1) + np.int32(a >= t2) + np.int32(a >= t3) + np.int32(a >= t4)
        index = np.int32(low + np.int32(a >= t5) + np.int32(a >= t6) + np.int32(a >= t7))
        code_B[i] = np.int32(index | np.int32(np.int32(word >> np.int32(28)) & np.int32(8)))


@compiled_into_caller
def _look_up(magnitude_8: I32, code_B: U8, value_word_B: I32) -> None:
    """Write the patterns of the magnitudes that a block's codes stand for."""
    for i in range(code_B.size):
        value_word_B[i] = magnitude_8[code_B[i] & 7]


@compiled_into_caller
def _is_exact(word_B: I32, value_word_B: I32) -> Any:
    difference = np.int32(0)
    for i in range(word_B.size):
        difference = np.int32(difference | np.int32((word_B[i] & _ABSOLUTE) ^ value_word_B[i]))
    return difference == 0


@compiled_into_caller
def _subtract(float_B: F32, value_B: F32, error_B: F32) -> None:
    for i in range(float_B.size):
        error_B[i] = abs(float_B[i]) - value_B[i]


@compiled_into_caller
def _largest(word_B: I32) -> Any:
    """The pattern of a block's largest magnitude; NaN counts as larger than infinity."""
    largest = np.int32(0)
    for i in range(word_B.size):
        a = np.int32(word_B[i] & _ABSOLUTE)
        largest = a if a > largest else largest
    return largest


@compiled_into_caller
def _scale_by_rule(largest: np.int32, rule: int) -> Any:
    """The scale byte for a block whose largest magnitude has this pattern; the rules are ``ScaleRule``'s."""
    if largest == 0:
        # No rule covers this: byte 127 is Megatron-Bridge's choice, byte 0 that of compressed-tensors.
        return 127 if rule == CEIL else 0
    exponent = np.int64(largest) >> 23
    mantissa = np.int64(largest) & 0x7F_FFFF
    if exponent == 0:
        exponent = np.int64(1)
        while mantissa < 0x80_0000:
            mantissa <<= 1
            exponent -= 1
        mantissa &= 0x7F_FFFF
    byte = exponent - 2
    if (rule == COMPRESSED_TENSORS and mantissa >= 0x60_0000) or (rule == CEIL and mantissa > 0x40_0000):
        byte += 1
    return min(max(byte, 0), 254)


@compiled_into_caller
def _note_not_finite(word_B: I32, position: int, counters: I64, not_finite_at: I64) -> None:
    for i in range(word_B.size):
        if np.int32(word_B[i] & _ABSOLUTE) >= _INFINITY:
            if counters[NOT_FINITE] < not_finite_at.size:
                not_finite_at[counters[NOT_FINITE]] = position + i
            counters[NOT_FINITE] += 1


@compiled(
    void(
        READ_I32_2D,
        READ_F32_2D,
        int64,
        READ_U8,
        READ_U8,
        int64,
        READ_I32_2D,
        READ_I32_2D,
        WRITTEN_U8_2D,
        WRITTEN_U8_2D,
        WRITTEN_U8,
        WRITTEN_I64,
        WRITTEN_I64,
        WRITTEN_F64,
    )
)
def encode_blocks(
    word_GB: I32,
    float_GB: F32,
    first_block: int,
    source_scale_G: U8,
    exact_G: U8,
    rule: int,
    magnitude_S: I32,
    threshold_S: I32,
    code_GB: U8,
    packed_GP: U8,
    scale_G: U8,
    counters: I64,
    not_finite_at: I64,
    errors: NDArray[np.float64],
) -> None:
    """Quantize consecutive float32 blocks, but those marked in ``exact_G``, whose codes must be in ``code_GB``.

    ``word_GB`` and ``float_GB`` are one buffer as patterns and as floats. An empty ``source_scale_G`` means that
    there is no source. ``not_finite_at`` receives the flat positions of the first values that are NaN or infinite,
    as many as it holds, with ``first_block`` the number of the first block here; ``errors`` keeps the largest
    absolute error and the largest error relative to its block's largest magnitude.
    """
    has_scale = source_scale_G.size > 0
    value_word_B = np.empty(word_GB.shape[1], np.int32)
    value_B = value_word_B.view(np.float32)
    error_word_B = np.empty(word_GB.shape[1], np.int32)
    error_B = error_word_B.view(np.float32)
    largest_word_2 = np.empty(2, np.int32)
    largest_2 = largest_word_2.view(np.float32)
    for group in range(scale_G.size):
        if exact_G[group]:
            scale_G[group] = source_scale_G[group]
            continue
        word_B, code_B = word_GB[group], code_GB[group]
        largest = _largest(word_B)
        if largest >= _INFINITY:
            _note_not_finite(word_B, (first_block + group) * word_B.size, counters, not_finite_at)
            scale_G[group] = 255
            code_B[:] = 0
            continue
        scale = np.int64(source_scale_G[group]) if has_scale else _scale_by_rule(largest, rule)
        _round(word_B, threshold_S[scale], code_B)
        _look_up(magnitude_S[scale], code_B, value_word_B)
        exact = _is_exact(word_B, value_word_B)
        if has_scale and not exact:
            counters[OFF_GRID] += 1
            if rule != KEEP_SOURCE:
                scale = _scale_by_rule(largest, rule)
                if scale != source_scale_G[group]:
                    counters[SCALE_MOVED] += 1
                    _round(word_B, threshold_S[scale], code_B)
                    _look_up(magnitude_S[scale], code_B, value_word_B)
                    exact = _is_exact(word_B, value_word_B)
        scale_G[group] = scale
        if not exact:
            counters[SATURATED] += largest > magnitude_S[scale, 7]
            _subtract(float_GB[group], value_B, error_B)
            largest_word_2[0], largest_word_2[1] = largest, _largest(error_word_B)
            errors[0] = max(errors[0], largest_2[1])
            if largest_2[0] > 0:
                errors[1] = max(errors[1], np.float64(largest_2[1]) / np.float64(largest_2[0]))
    _pack(code_GB[: scale_G.size].reshape(-1).view(np.uint16), packed_GP.reshape(-1))
