"""Which blocks have no finite form, and what a histogram of scales says."""

from __future__ import annotations

import numpy as np
import pytest

from k3convert.numerics.mxfp4_decode import decode
from k3convert.numerics.mxfp4_scales import find_nan_scales, find_unrepresentable, median_scale, scale_histogram


def test_the_blocks_found_are_those_that_decode_to_something_not_finite() -> None:
    packed = np.tile(np.repeat(np.arange(256, dtype=np.uint8), 16), (256, 1))
    scale = np.repeat(np.arange(256, dtype=np.uint8), 256).reshape(256, 256)
    values = np.empty((256, 256 * 32), dtype=np.uint16)
    decode(packed, scale, values)

    found = find_unrepresentable(packed, scale)

    is_bad = (values.reshape(256, 256, 32) & 0x7F80 == 0x7F80).any(axis=2)
    assert [(row, block) for row, block, _ in found] == [tuple(at) for at in np.argwhere(is_bad).tolist()]


@pytest.mark.parametrize(
    ("byte", "code", "is_found"),
    [
        (252, 7, False),
        (253, 5, False),
        (253, 6, True),
        (253, 15, True),
        (254, 3, False),
        (254, 4, True),
        (255, 0, True),
    ],
)
def test_the_limit_depends_on_the_byte(byte: int, code: int, is_found: bool) -> None:
    packed = np.zeros((1, 16), dtype=np.uint8)
    packed[0, 7] = code << 4

    found = find_unrepresentable(packed, np.array([[byte]], dtype=np.uint8))

    assert list(found) == ([(0, 0, byte)] if is_found else [])


def test_every_offender_is_found_with_its_row_block_and_byte() -> None:
    packed = np.full((3, 48), 0x77, dtype=np.uint8)
    scale = np.array([[120, 254, 120], [120, 120, 120], [255, 252, 253]], dtype=np.uint8)

    found = find_unrepresentable(packed, scale)

    assert len(found) == 3
    assert list(found) == [(0, 1, 254), (2, 0, 255), (2, 2, 253)]


def test_nan_scales_are_found_without_their_codes() -> None:
    scale = np.array([[255, 254], [0, 255]], dtype=np.uint8)

    assert list(find_nan_scales(scale)) == [(0, 0, 255), (1, 1, 255)]


def test_an_empty_tensor_has_no_offender() -> None:
    assert len(find_unrepresentable(np.empty((0, 32), np.uint8), np.empty((0, 2), np.uint8))) == 0


def test_histograms_of_pieces_add_up() -> None:
    scale = np.random.default_rng(0).integers(0, 256, (10, 4), dtype=np.uint8)

    pieces = scale_histogram(scale[:3]) + scale_histogram(scale[3:])

    np.testing.assert_array_equal(pieces, scale_histogram(scale))


@pytest.mark.parametrize(
    ("scales", "median"), [([], None), ([7], 7), ([1, 2], 1), ([1, 2, 9], 2), ([255, 0, 255], 255)]
)
def test_the_median_is_the_lower_middle_byte(scales: list[int], median: int | None) -> None:
    assert median_scale(scale_histogram(np.array([scales], dtype=np.uint8))) == median
