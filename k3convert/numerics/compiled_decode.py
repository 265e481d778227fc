"""MXFP4 -> bf16 and float32 on one core; called through ``mxfp4_decode``."""

from __future__ import annotations

import numpy as np

from k3convert.numerics.jit import READ_U8, READ_U32, WRITTEN_U32, compiled, void
from k3convert.numerics.mxfp4_format import U8, U32

# Both halves of a word at once: the low nibble's code in bits 0..3, the high nibble's in bits 16..19.
_MAGNITUDE = np.uint32(0x0007_0007)
_SIGN = np.uint32(0x0008_0008)
_ONE = np.uint32(0x0001_0001)
_BF16_EXPONENT_STEP = np.uint32(0x0080_0080)


@compiled(void(READ_U8, READ_U8, READ_U32, WRITTEN_U32))
def decode_to_bf16_pairs(packed_P: U8, scale_G: U8, pair_table: U32, out_P: U32) -> None:
    """Write two bf16 patterns for every packed byte.

    Where all eight magnitudes are normal bf16 numbers (scale bytes 2..252), magnitude index ``m`` reads as a tiny
    float of two exponent bits and one mantissa bit, so its pattern is ``(m << 6) + ((s - 1) << 7)``; only 0.5, a
    subnormal of that tiny format, loses its mantissa bit, and 0 loses everything. That is a dozen integer
    operations on both halves of a word, which the compiler turns into vector code: a table look-up per byte reaches
    two thirds of a plain copy, this reaches nearly all of it. The other scale bytes read the table.
    """
    for group in range(scale_G.size):
        scale = np.uint32(scale_G[group])
        first = group * 16
        if scale < np.uint32(2) or scale > np.uint32(252):
            for j in range(16):
                out_P[first + j] = pair_table[(scale << np.uint32(8)) | np.uint32(packed_P[first + j])]
            continue
        exponent = (scale - np.uint32(1)) * _BF16_EXPONENT_STEP
        for j in range(16):
            byte = np.uint32(packed_P[first + j])
            code = byte | (byte << np.uint32(12))
            index = code & _MAGNITUDE
            at_least_1 = (index + np.uint32(7) * _ONE) & _SIGN
            at_least_2 = (index + np.uint32(6) * _ONE) & _SIGN
            is_half = (at_least_1 ^ at_least_2) << np.uint32(3)
            not_zero = (at_least_1 << np.uint32(13)) - (at_least_1 >> np.uint32(3))
            magnitude = ((index << np.uint32(6)) - is_half + exponent) & not_zero
            out_P[first + j] = magnitude | ((code & _SIGN) << np.uint32(12))


@compiled(void(READ_U8, READ_U8, READ_U32, WRITTEN_U32))
def decode_to_float32_bits(packed_P: U8, scale_G: U8, pair_table: U32, out_I: U32) -> None:
    """Write two float32 patterns for every packed byte: the bf16 patterns, widened."""
    for group in range(scale_G.size):
        row = np.uint32(scale_G[group]) << np.uint32(8)
        for j in range(group * 16, group * 16 + 16):
            pair = pair_table[row | np.uint32(packed_P[j])]
            out_I[2 * j] = pair << np.uint32(16)
            out_I[2 * j + 1] = pair & np.uint32(0xFFFF_0000)
