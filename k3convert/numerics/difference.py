"""How far two arrays are from each other: bitwise, in units in the last place, and in value."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from k3convert.numerics.casts import bf16_to_float32
from k3convert.numerics.mxfp4_format import F32, U16, require_array

_PIECE = 1 << 16


@dataclass(frozen=True, slots=True)
class Difference:
    """The comparison of two arrays of one dtype; equal means bitwise equal, so -0 and +0 differ (by 0 ULP)."""

    num_compared: int = 0
    num_different: int = 0
    first_different: int | None = None
    """Flat position of the first element that differs."""
    max_ulp: int = 0
    max_abs: float = 0.0
    num_with_nan: int = 0
    """Elements that differ and of which one or both are NaN; they count in neither maximum."""

    @property
    def is_bitwise_equal(self) -> bool:
        """Whether every bit is the same, NaN payloads included."""
        return self.num_different == 0

    def followed_by(self, other: Difference) -> Difference:
        """This comparison and that of the elements right after it, as one."""
        first = self.first_different
        if first is None and other.first_different is not None:
            first = self.num_compared + other.first_different
        return Difference(
            num_compared=self.num_compared + other.num_compared,
            num_different=self.num_different + other.num_different,
            first_different=first,
            max_ulp=max(self.max_ulp, other.max_ulp),
            max_abs=max(self.max_abs, other.max_abs),
            num_with_nan=self.num_with_nan + other.num_with_nan,
        )


def compare(a: U16 | F32, b: U16 | F32) -> Difference:
    """Compare two arrays of bf16 patterns (uint16) or two of float32, of equal shape.

    Raises:
        ValueError: the two have different dtypes or shapes, or strides.
    """
    dtype = np.uint16 if a.dtype == np.uint16 else np.float32
    require_array("a", a, dtype, a.shape)
    require_array("b", b, dtype, a.shape)
    flat_a, flat_b = a.reshape(-1), b.reshape(-1)
    found = Difference()
    for first in range(0, flat_a.size, _PIECE):
        found = found.followed_by(_compare_piece(flat_a[first : first + _PIECE], flat_b[first : first + _PIECE]))
    return found


def _compare_piece(a: U16 | F32, b: U16 | F32) -> Difference:
    bits = np.uint16 if a.dtype == np.uint16 else np.uint32
    a_bits, b_bits = a.view(bits), b.view(bits)
    if np.array_equal(a_bits, b_bits):
        return Difference(num_compared=a.size)
    from k3convert.numerics import compiled_elements as kernels

    counters = np.zeros(kernels.NUM_COUNTERS, dtype=np.int64)
    max_abs = np.zeros(1, dtype=np.float64)
    sign = 1 << (8 * a.itemsize - 1)
    kernels.compare_patterns(a_bits, b_bits, _as_float32(a), _as_float32(b), sign, counters, max_abs)
    return Difference(
        num_compared=a.size,
        num_different=int(counters[kernels.DIFFERENT]),
        first_different=int(counters[kernels.FIRST]),
        max_ulp=int(counters[kernels.MAX_ULP]),
        max_abs=float(max_abs[0]),
        num_with_nan=int(counters[kernels.WITH_NAN]),
    )


def _as_float32(values: U16 | F32) -> F32:
    if values.dtype == np.uint16:
        widened = np.empty(values.shape, dtype=np.float32)
        bf16_to_float32(values.view(np.uint16), widened)
        return widened
    return values.view(np.float32)
