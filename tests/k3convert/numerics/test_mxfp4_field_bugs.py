"""Faults of other MXFP4 codecs, as public reports describe them; the number is the report's place in our list."""

from __future__ import annotations

import numpy as np
import pytest

from k3convert.numerics.mxfp4_decode import decode, decode_float32
from k3convert.numerics.mxfp4_encode import ScaleRule, encode
from k3convert.numerics.mxfp4_format import MAGNITUDES, U8
from k3convert.numerics.mxfp4_scales import PLAUSIBLE_MEDIANS, median_scale, scale_histogram

ALL_CODES = np.array([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2, dtype=np.uint8)
SIGNED = [*MAGNITUDES, *(-m for m in MAGNITUDES)]


def decoded(packed: U8, scale: U8) -> np.ndarray:
    out = np.empty((packed.shape[0], packed.shape[1] * 2), dtype=np.float32)
    decode_float32(packed, scale, out)
    return out


def encoded(values: np.ndarray, rule: ScaleRule) -> tuple[U8, U8]:
    packed = np.empty((values.shape[0], values.shape[1] // 2), dtype=np.uint8)
    scale = np.empty((values.shape[0], values.shape[1] // 32), dtype=np.uint8)
    encode(values.astype(np.float32), packed, scale, rule=rule)
    return packed, scale


def block(*values: float) -> np.ndarray:
    return np.array([[*values, *([0.0] * (32 - len(values)))]])


def test_b1_a_scale_byte_stands_for_two_to_the_byte_minus_127() -> None:
    got = decoded(ALL_CODES[None], np.array([[120]], dtype=np.uint8))

    assert got[0, :16].tolist() == [value * 2.0**-7 for value in SIGNED]


def test_b1_bytes_that_are_off_by_two_show_in_the_histogram() -> None:
    scale = np.random.default_rng(0).choice(np.array([119, 120, 121], dtype=np.uint8), (64, 8))

    medians = [median_scale(scale_histogram(scale - shift)) for shift in (np.uint8(0), np.uint8(3))]

    assert [median in PLAUSIBLE_MEDIANS for median in medians] == [True, False]


def test_b2_the_scale_is_an_exponent_and_never_a_multiplier() -> None:
    got = decoded(ALL_CODES[None], np.array([[127]], dtype=np.uint8))

    assert got[0, :16].tolist() == SIGNED


@pytest.mark.parametrize("rows", [1, 4, 7, 8])
def test_b3_few_rows_decode_as_a_scalar_decoder_does(rows: int) -> None:
    random = np.random.default_rng(rows)
    packed = random.integers(0, 256, (rows, 32), dtype=np.uint8)
    scale = random.integers(0, 253, (rows, 2), dtype=np.uint8)

    got = decoded(packed, scale)

    for row in range(rows):
        for column in range(64):
            code = packed[row, column // 2] >> (4 * (column % 2)) & 0xF
            assert got[row, column] == SIGNED[code] * 2.0 ** (int(scale[row, column // 32]) - 127)


def test_b9_a_matrix_that_is_not_square_takes_its_shape_from_the_packed_columns() -> None:
    random = np.random.default_rng(9)
    packed = random.integers(0, 256, (96, 32), dtype=np.uint8)
    scale = random.integers(118, 123, (96, 2), dtype=np.uint8)

    got = decoded(packed, scale)

    assert got.shape == (96, 64)
    assert got[95, 63] == SIGNED[packed[95, 31] >> 4] * 2.0 ** (int(scale[95, 1]) - 127)


def test_b11_the_low_nibble_is_the_even_column() -> None:
    packed = np.zeros((1, 16), dtype=np.uint8)
    packed[0, 0] = 0x21

    got = decoded(packed, np.array([[127]], dtype=np.uint8))

    assert got[0, :2].tolist() == [0.5, 1.0]


def test_b11_the_encoder_agrees_on_the_order() -> None:
    packed, _ = encoded(block(4.0, 6.0), ScaleRule.OCP_FLOOR)

    assert packed[0, 0] == 0x76


@pytest.mark.parametrize(
    ("rule", "amax", "byte", "decoded_amax"),
    [
        (ScaleRule.OCP_FLOOR, 5.0, 127, 4.0),
        (ScaleRule.OCP_FLOOR, 6.0, 127, 6.0),
        (ScaleRule.OCP_FLOOR, 7.0, 127, 6.0),
        (ScaleRule.OCP_FLOOR, 7.99, 127, 6.0),
        (ScaleRule.COMPRESSED_TENSORS, 5.0, 127, 4.0),
        (ScaleRule.COMPRESSED_TENSORS, 6.0, 127, 6.0),
        (ScaleRule.COMPRESSED_TENSORS, 7.0, 128, 8.0),
        (ScaleRule.COMPRESSED_TENSORS, 7.99, 128, 8.0),
        (ScaleRule.CEIL, 5.0, 127, 4.0),
        (ScaleRule.CEIL, 6.0, 127, 6.0),
        (ScaleRule.CEIL, 7.0, 128, 8.0),
        (ScaleRule.CEIL, 7.99, 128, 8.0),
    ],
)
@pytest.mark.parametrize("shift", [-130, -20, 0, 40])
def test_b12_each_rule_gives_the_scale_that_it_states(
    rule: ScaleRule, amax: float, byte: int, decoded_amax: float, shift: int
) -> None:
    packed, scale = encoded(block(np.ldexp(np.float32(amax), shift)), rule)

    assert scale.tolist() == [[max(byte + shift, 0)]]
    if byte + shift >= 0:
        assert decoded(packed, scale)[0, 0] == np.ldexp(decoded_amax, shift)


def test_b12_values_that_were_not_touched_return_the_original_bytes_whatever_the_rule() -> None:
    packed = np.random.default_rng(12).integers(0, 256, (8, 64), dtype=np.uint8)
    packed[:4] &= 0x99  # magnitudes 0 and 0.5 only: no rule finds these scales again
    scale = np.full((8, 4), 121, dtype=np.uint8)
    values = np.empty((8, 128), dtype=np.uint16)
    decode(packed, scale, values)

    for rule in ScaleRule:
        got_packed, got_scale = np.empty_like(packed), np.empty_like(scale)
        encode(values, got_packed, got_scale, rule=rule, source_scale=scale)

        assert got_packed.tobytes() == packed.tobytes()
        assert got_scale.tobytes() == scale.tobytes()


@pytest.mark.parametrize("byte", [0, 1, 2, 3, 100, 120, 127, 200, 252])
def test_b13_all_sixteen_codes_survive(byte: int) -> None:
    scale = np.array([[byte]], dtype=np.uint8)
    values = np.empty((1, 32), dtype=np.uint16)
    decode(ALL_CODES[None], scale, values)

    packed, kept = np.empty((1, 16), np.uint8), np.empty((1, 1), np.uint8)
    encode(values, packed, kept, rule=ScaleRule.SOURCE, source_scale=scale)

    assert packed[0].tolist() == ALL_CODES.tolist()


def test_b13_ties_go_to_the_even_code_and_minus_zero_is_kept() -> None:
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]

    packed, scale = encoded(block(6.0, -0.0, *ties, *(-tie for tie in ties)), ScaleRule.OCP_FLOOR)

    got = decoded(packed, scale)[0]
    assert got[2:9].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert got[9:16].tolist() == [-0.0, -1.0, -1.0, -2.0, -2.0, -4.0, -4.0]
    assert np.signbit(got[[1, 9]]).all()


@pytest.mark.parametrize("rule", [ScaleRule.OCP_FLOOR, ScaleRule.COMPRESSED_TENSORS, ScaleRule.CEIL])
@pytest.mark.parametrize(("amax", "exponent"), [(0.3, -4), (0.5, -3), (0.7, -3)])
def test_b14_the_exponent_of_a_small_block_is_a_floor_and_not_a_truncation(
    rule: ScaleRule, amax: float, exponent: int
) -> None:
    _, scale = encoded(block(amax), rule)

    assert scale.tolist() == [[127 + exponent]]


@pytest.mark.parametrize("rule", [ScaleRule.OCP_FLOOR, ScaleRule.COMPRESSED_TENSORS, ScaleRule.CEIL])
def test_b15_subnormal_blocks_stay_finite_and_zeros_stay_zeros(rule: ScaleRule) -> None:
    packed, scale = encoded(np.concatenate((np.full((1, 32), 1e-40), np.zeros((1, 32)))), rule)

    got = decoded(packed, scale)
    assert scale[0, 0] == 0
    assert np.isfinite(got).all()
    assert not got[1].any()
