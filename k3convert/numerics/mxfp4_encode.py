"""Quantize bf16 or float32 to MXFP4: on the scales that are already there, or by a stated rule."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from k3convert.numerics.casts import bf16_to_float32
from k3convert.numerics.mxfp4_format import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    F32,
    NAN_SCALE,
    NUM_SCALES,
    U8,
    U16,
    decoded_pairs,
    magnitude_bits,
    require_array,
    rounding_bits,
)

SHOWN_POSITIONS = 8
# A piece's float32 copy (256 KiB) stays in the second-level cache.
_PIECE_BLOCKS = 2048
_NO_SCALES: U8 = np.empty(0, dtype=np.uint8)


class ScaleRule(Enum):
    """How a block that does not fit its source's scale gets one. Every rule rounds elements to nearest even.

    With ``2 ** k <= amax < 2 ** (k + 1)``, where amax is the block's largest magnitude:

    * ``source``: the source's byte, always; larger values saturate at 6.
    * ``compressed-tensors``: exponent k - 1 if ``amax >= 1.75 * 2 ** k``, else k - 2 (compressed-tensors 0.20).
    * ``ocp-floor``: exponent k - 2; values above 6 saturate (OCP Microscaling Formats v1.0, section 6.3).
    * ``ceil``: the smallest e with ``amax <= 6 * 2 ** e``; nothing saturates (Megatron-Bridge).
    """

    SOURCE = "source"
    COMPRESSED_TENSORS = "compressed-tensors"
    OCP_FLOOR = "ocp-floor"
    CEIL = "ceil"


@dataclass(frozen=True, slots=True)
class EncodeStatistics:
    """What quantizing did to the blocks of one piece; pieces add up with :meth:`merged`."""

    num_blocks: int = 0
    num_off_grid: int = 0
    """Blocks with a source scale whose values were not all on that scale's grid."""
    num_changed: int | None = None
    """Blocks whose packed or scale bytes differ from the source's; None where the source's bytes are not known."""
    num_scale_moved: int = 0
    num_saturated: int = 0
    """Blocks with a value above 6 times their scale."""
    max_abs_error: float = 0.0
    max_relative_error: float = 0.0
    """The largest error divided by the largest magnitude of its block."""
    num_not_finite: int = 0
    """NaN and infinite values. Their blocks are written as NaN blocks (scale byte 255); callers refuse the input."""
    not_finite_at: tuple[tuple[int, int], ...] = ()
    """Row and column of the first of them."""

    def merged(self, other: EncodeStatistics) -> EncodeStatistics:
        """Both pieces as one; each position in ``not_finite_at`` stays relative to its own piece."""
        if self.num_blocks == 0:
            return other
        known = self.num_changed is not None and other.num_changed is not None
        return EncodeStatistics(
            num_blocks=self.num_blocks + other.num_blocks,
            num_off_grid=self.num_off_grid + other.num_off_grid,
            num_changed=(self.num_changed or 0) + (other.num_changed or 0) if known else None,
            num_scale_moved=self.num_scale_moved + other.num_scale_moved,
            num_saturated=self.num_saturated + other.num_saturated,
            max_abs_error=max(self.max_abs_error, other.max_abs_error),
            max_relative_error=max(self.max_relative_error, other.max_relative_error),
            num_not_finite=self.num_not_finite + other.num_not_finite,
            not_finite_at=(self.not_finite_at + other.not_finite_at)[:SHOWN_POSITIONS],
        )


def encode(
    values: U16 | F32,
    packed: U8,
    scale: U8,
    *,
    rule: ScaleRule,
    source_scale: U8 | None = None,
    source_packed: U8 | None = None,
) -> EncodeStatistics:
    """Quantize rows to MXFP4.

    A block whose values all lie on the grid of its source scale keeps that scale; what :func:`mxfp4_decode.decode`
    made therefore returns bit for bit, for every scale byte with finite values and for both zeros, and an all-zero
    block keeps its byte. Any other block gets its scale by the rule. The sign comes from the sign bit: -0 is code 8.

    Args:
        values: ``[rows, columns]``, uint16 (bf16 patterns) or float32; columns a multiple of 32.
        packed: uint8 ``[rows, columns / 2]``; overwritten.
        scale: uint8 ``[rows, columns / 32]``; overwritten. Must not be ``source_scale``.
        rule: for blocks that do not fit, and for all blocks where there is no source scale.
        source_scale: uint8 ``[rows, columns / 32]`` without 255.
        source_packed: uint8 ``[rows, columns / 2]``; only to count the blocks that changed.

    Raises:
        ValueError: dtypes, shapes or strides do not fit; the rule is ``source`` and there is no source scale; a
            source scale is 255, which has no grid.
    """
    from k3convert.numerics import compiled_encode as kernels

    codes = {
        ScaleRule.SOURCE: kernels.KEEP_SOURCE,
        ScaleRule.COMPRESSED_TENSORS: kernels.COMPRESSED_TENSORS,
        ScaleRule.OCP_FLOOR: kernels.OCP_FLOOR,
        ScaleRule.CEIL: kernels.CEIL,
    }
    _require_shapes(values, packed, scale, rule, source_scale, source_packed)
    counters = np.zeros(kernels.NUM_COUNTERS, dtype=np.int64)
    not_finite_at = np.zeros(SHOWN_POSITIONS, dtype=np.int64)
    errors = np.zeros(2, dtype=np.float64)
    magnitudes, thresholds = magnitude_bits().view(np.int32), rounding_bits().view(np.int32)
    value_GB, packed_GP, scale_G = values.reshape(-1, BLOCK_SIZE), packed.reshape(-1, BLOCK_BYTES), scale.reshape(-1)
    source_G = _NO_SCALES if source_scale is None else source_scale.reshape(-1)
    widened_GB = np.empty((min(_PIECE_BLOCKS, scale.size), BLOCK_SIZE), dtype=np.float32)
    code_GB = np.empty(widened_GB.shape, dtype=np.uint8)
    for first in range(0, scale.size, _PIECE_BLOCKS):
        blocks = slice(first, min(first + _PIECE_BLOCKS, scale.size))
        piece_GB = value_GB[blocks]
        exact_G = np.zeros(len(piece_GB), dtype=np.uint8)
        if piece_GB.dtype == np.uint16:
            if source_scale is not None:
                _encode_exact(piece_GB.view(np.uint16), source_G[blocks], code_GB, packed_GP[blocks], exact_G)
                if exact_G.all():
                    scale_G[blocks] = source_G[blocks]
                    continue
            float_GB = widened_GB[: len(piece_GB)]
            bf16_to_float32(piece_GB.view(np.uint16), float_GB)
        else:
            float_GB = piece_GB.view(np.float32)
        kernels.encode_blocks(
            float_GB.view(np.int32),
            float_GB,
            first,
            source_G[blocks],
            exact_G,
            codes[rule],
            magnitudes,
            thresholds,
            code_GB,
            packed_GP[blocks],
            scale_G[blocks],
            counters,
            not_finite_at,
            errors,
        )
    num_not_finite = int(counters[kernels.NOT_FINITE])
    shown = not_finite_at[: min(num_not_finite, SHOWN_POSITIONS)].tolist()
    return EncodeStatistics(
        num_blocks=scale.size,
        num_off_grid=int(counters[kernels.OFF_GRID]),
        num_changed=_num_changed(packed, scale, source_packed, source_scale),
        num_scale_moved=int(counters[kernels.SCALE_MOVED]),
        num_saturated=int(counters[kernels.SATURATED]),
        max_abs_error=float(errors[0]),
        max_relative_error=float(errors[1]),
        num_not_finite=num_not_finite,
        not_finite_at=tuple(divmod(position, values.shape[1]) for position in shown),
    )


def _num_changed(packed: U8, scale: U8, source_packed: U8 | None, source_scale: U8 | None) -> int | None:
    if source_packed is None or source_scale is None:
        return None
    changed_G = (packed.reshape(-1, BLOCK_BYTES) != source_packed.reshape(-1, BLOCK_BYTES)).any(axis=1)
    return int(np.count_nonzero(changed_G | (scale != source_scale).reshape(-1)))


def _encode_exact(bits_GB: U16, source_scale_G: U8, code_GB: U8, packed_GP: U8, exact_G: U8) -> None:
    from k3convert.numerics.compiled_encode import encode_exact_blocks

    pair_table_S = decoded_pairs().reshape(NUM_SCALES, -1)
    encode_exact_blocks(bits_GB, bits_GB.view(np.uint32), source_scale_G, pair_table_S, code_GB, packed_GP, exact_G)


def _require_shapes(
    values: U16 | F32, packed: U8, scale: U8, rule: ScaleRule, source_scale: U8 | None, source_packed: U8 | None
) -> None:
    rows, columns = values.shape
    if columns % BLOCK_SIZE:
        raise ValueError(f"values has {columns} columns, wanted a multiple of {BLOCK_SIZE}")
    require_array("values", values, np.uint16 if values.dtype == np.uint16 else np.float32, (rows, columns))
    packed_shape, scale_shape = (rows, columns // BLOCK_SIZE * BLOCK_BYTES), (rows, columns // BLOCK_SIZE)
    require_array("packed", packed, np.uint8, packed_shape)
    require_array("scale", scale, np.uint8, scale_shape)
    if source_scale is None and rule is ScaleRule.SOURCE:
        raise ValueError("the rule 'source' needs source_scale")
    if source_scale is not None:
        require_array("source_scale", source_scale, np.uint8, scale_shape)
        if num_nan := int(np.count_nonzero(source_scale == NAN_SCALE)):
            raise ValueError(f"{num_nan} source scales are {NAN_SCALE} (NaN), which has no grid")
    if source_packed is not None:
        if source_scale is None:
            raise ValueError("source_packed needs source_scale")
        require_array("source_packed", source_packed, np.uint8, packed_shape)
