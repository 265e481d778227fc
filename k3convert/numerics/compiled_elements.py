"""Element-wise work on bf16 and float32 patterns on one core; called through ``casts`` and ``difference``."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from k3convert.numerics.jit import (
    READ_F32,
    READ_U16,
    READ_U32,
    WRITTEN_F64,
    WRITTEN_I64,
    WRITTEN_U16,
    WRITTEN_U32,
    compiled,
    int64,
    void,
)
from k3convert.numerics.mxfp4_format import F32, U16, U32

# Slots of the counters that ``compare_patterns`` adds to.
DIFFERENT = 0
WITH_NAN = 1
FIRST = 2
MAX_ULP = 3
NUM_COUNTERS = 4


@compiled(void(READ_U16, WRITTEN_U32))
def widen(bits_I: U16, out_I: U32) -> None:
    """bf16 patterns to float32 patterns, exactly."""
    for i in range(bits_I.size):
        out_I[i] = np.uint32(bits_I[i]) << np.uint32(16)


@compiled(void(READ_U32, WRITTEN_U16))
def narrow(bits_I: U32, out_I: U16) -> None:
    """float32 patterns to bf16 patterns, to nearest even; a NaN keeps its sign and upper payload and turns quiet."""
    for i in range(bits_I.size):
        bits = np.uint32(bits_I[i])
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
        is_nan = (bits & np.uint32(0x7FFF_FFFF)) > np.uint32(0x7F80_0000)
        out_I[i] = quiet if is_nan else rounded


_PATTERNS = (READ_F32, READ_F32, int64, WRITTEN_I64, WRITTEN_F64)


@compiled(void(READ_U16, READ_U16, *_PATTERNS), void(READ_U32, READ_U32, *_PATTERNS))
def compare_patterns(
    a_I: NDArray[Any],
    b_I: NDArray[Any],
    a_f_I: F32,
    b_f_I: F32,
    sign: int,
    counters: NDArray[np.int64],
    max_abs: NDArray[np.float64],
) -> None:
    """Compare patterns of one dtype whose sign bit is ``sign``; ``a_f_I`` and ``b_f_I`` are the same values.

    A pattern's rank among the floats is its magnitude bits, negated if the sign bit is set: both zeros rank 0, and
    the distance of two ranks is their distance in units in the last place.
    """
    for i in range(a_I.size):
        if a_I[i] == b_I[i]:
            continue
        if counters[DIFFERENT] == 0:
            counters[FIRST] = i
        counters[DIFFERENT] += 1
        if np.isnan(a_f_I[i]) or np.isnan(b_f_I[i]):
            counters[WITH_NAN] += 1
            continue
        a, b = np.int64(a_I[i]), np.int64(b_I[i])
        rank_a = sign - a if a >= sign else a
        rank_b = sign - b if b >= sign else b
        counters[MAX_ULP] = max(counters[MAX_ULP], abs(rank_a - rank_b))
        max_abs[0] = max(max_abs[0], abs(np.float64(a_f_I[i]) - np.float64(b_f_I[i])))
