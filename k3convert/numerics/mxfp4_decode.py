"""Decode MXFP4 on the CPU, exactly and at the speed of a copy."""

from __future__ import annotations

import numpy as np

from k3convert.numerics.mxfp4_format import BLOCK_SIZE, F32, U8, U16, decoded_pairs, require_array, require_blocks


def decode(packed: U8, scale: U8, out: U16) -> None:
    """Decode blocks to bf16 patterns, exactly: no rounding, subnormals and both zeros kept.

    Every result is finite for scale bytes 0..252. Under 253 and 254 the largest codes overflow to infinity of their
    sign, and 255 makes its whole block NaN; ``find_unrepresentable`` says where, and a caller that must not write
    infinities asks it first.

    Args:
        packed: uint8 ``[rows, columns / 2]``; the low nibble is the even column.
        scale: uint8 ``[rows, columns / 32]``; E8M0, the exponent plus 127.
        out: uint16 ``[rows, columns]``; overwritten with bf16 patterns.

    Raises:
        ValueError: dtypes, shapes or strides do not fit.
    """
    from k3convert.numerics.compiled_decode import decode_to_bf16_pairs

    rows, blocks = require_blocks(packed, scale)
    require_array("out", out, np.uint16, (rows, blocks * BLOCK_SIZE))
    decode_to_bf16_pairs(packed.reshape(-1), scale.reshape(-1), decoded_pairs(), out.reshape(-1).view(np.uint32))


def decode_float32(packed: U8, scale: U8, out: F32) -> None:
    """Decode blocks to float32, exactly; infinities and NaN as in :func:`decode`.

    Args:
        packed: uint8 ``[rows, columns / 2]``.
        scale: uint8 ``[rows, columns / 32]``.
        out: float32 ``[rows, columns]``; overwritten.

    Raises:
        ValueError: dtypes, shapes or strides do not fit.
    """
    from k3convert.numerics.compiled_decode import decode_to_float32_bits

    rows, blocks = require_blocks(packed, scale)
    require_array("out", out, np.float32, (rows, blocks * BLOCK_SIZE))
    decode_to_float32_bits(packed.reshape(-1), scale.reshape(-1), decoded_pairs(), out.reshape(-1).view(np.uint32))
