"""Distances between arrays: bits, units in the last place, values."""

from __future__ import annotations

import numpy as np
import pytest

from k3convert.numerics.difference import Difference, compare


def float32(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def test_equal_arrays_are_bitwise_equal_nan_included() -> None:
    values = float32(1.0, np.nan, -0.0)

    assert compare(values, values.copy()) == Difference(num_compared=3)


def test_one_step_between_neighbouring_floats_is_one_ulp() -> None:
    a = float32(1.0, -1.0, 0.0, -np.finfo(np.float32).max)
    b = np.nextafter(a, np.float32(np.inf), dtype=np.float32)

    for first, second in zip(a, b, strict=True):
        assert compare(float32(first), float32(second)).max_ulp == 1


def test_both_zeros_differ_by_no_ulp_and_are_not_bitwise_equal() -> None:
    found = compare(float32(0.0), float32(-0.0))

    assert (found.num_different, found.max_ulp, found.max_abs) == (1, 0, 0.0)
    assert not found.is_bitwise_equal


def test_distances_across_zero_add_up() -> None:
    smallest = np.array([0x0001, 0x8001], dtype=np.uint16)

    found = compare(smallest[:1], smallest[1:])

    assert found.max_ulp == 2
    assert found.max_abs == 2.0**-132


def test_bf16_patterns_are_compared_as_bf16() -> None:
    found = compare(np.array([0x3F80, 0x4000], np.uint16), np.array([0x3F80, 0x4002], np.uint16))

    assert found == Difference(num_compared=2, num_different=1, first_different=1, max_ulp=2, max_abs=2 * 2.0**-6)


def test_differences_that_involve_nan_are_counted_apart() -> None:
    found = compare(float32(np.nan, 1.0, np.inf), float32(1.0, 1.0, -np.inf))

    assert (found.num_different, found.num_with_nan, found.max_abs) == (2, 1, np.inf)


def test_positions_and_maxima_hold_over_many_pieces() -> None:
    a = np.zeros((700, 512), dtype=np.float32)
    b = a.copy()
    b[300, 17], b[699, 511] = 2.0, -8.0

    found = compare(a, b)

    assert (found.num_compared, found.num_different) == (700 * 512, 2)
    assert found.first_different == 300 * 512 + 17
    assert found.max_abs == 8.0


def test_arrays_of_different_dtype_are_refused() -> None:
    with pytest.raises(ValueError, match=r"b is float32 \[1\], wanted uint16 \[1\]"):
        compare(np.zeros(1, np.uint16), float32(0.0))
