"""The CPU quantizer: what the source's scale can hold returns bit for bit, the rest follows the stated rules."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from k3convert.numerics.casts import bf16_to_float32, float32_to_bf16
from k3convert.numerics.mxfp4_decode import decode, decode_float32
from k3convert.numerics.mxfp4_encode import SHOWN_POSITIONS, EncodeStatistics, ScaleRule, encode
from k3convert.numerics.mxfp4_format import F32, U8, U16, decoded_pairs, magnitude_bits, rounding_bits
from k3kernels.ops.mxfp4.quantize.eager import quantize

RULES = list(ScaleRule)
OWN_SCALE_RULES = [rule for rule in RULES if rule is not ScaleRule.SOURCE]


def encoded(
    values: U16 | F32, rule: ScaleRule, source_scale: U8 | None = None, source_packed: U8 | None = None
) -> tuple[U8, U8, EncodeStatistics]:
    rows, columns = values.shape
    packed = np.full((rows, columns // 2), 0xAA, dtype=np.uint8)
    scale = np.full((rows, columns // 32), 0xAA, dtype=np.uint8)
    statistics = encode(values, packed, scale, rule=rule, source_scale=source_scale, source_packed=source_packed)
    return packed, scale, statistics


def one_block(*values: float) -> F32:
    return np.array([[*values, *([0.0] * (32 - len(values)))]], dtype=np.float32)


def wild_values(seed: int, shape: tuple[int, int]) -> F32:
    """Finite float32 of every magnitude, both zeros and subnormals among them; magnitudes vary little in a block."""
    random = np.random.default_rng(seed)
    exponents = np.repeat(random.integers(-152, 127, (shape[0], shape[1] // 32)), 32, axis=1)
    values = np.ldexp(random.standard_normal(shape), exponents + random.integers(-3, 1, shape)).astype(np.float32)
    values[random.random(shape) < 0.05] = -0.0
    return np.clip(values, -3e38, 3e38)


@pytest.mark.parametrize("rule", RULES)
def test_decoded_bytes_return_bit_for_bit_for_every_byte_under_every_finite_scale(rule: ScaleRule) -> None:
    packed = np.tile(np.arange(256, dtype=np.uint8), 253).reshape(253, 256)
    scale = np.repeat(np.arange(253, dtype=np.uint8), 16).reshape(253, 16)
    values = np.empty((253, 512), dtype=np.uint16)
    decode(packed, scale, values)

    got_packed, got_scale, statistics = encoded(values, rule, scale, packed)

    np.testing.assert_array_equal(got_packed, packed)
    np.testing.assert_array_equal(got_scale, scale)
    assert statistics == EncodeStatistics(num_blocks=253 * 16, num_changed=0)


def test_float32_input_returns_bit_for_bit_too_and_under_253_and_254_where_values_are_finite() -> None:
    random = np.random.default_rng(1)
    scale = np.repeat(np.arange(255, dtype=np.uint8), 4).reshape(255, 4)
    codes = random.integers(0, 16, (255, 128), dtype=np.uint8)
    codes[253] &= 0xD  # at most 3
    codes[254] &= 0xB  # at most 1.5
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    values = np.empty((255, 128), dtype=np.float32)
    decode_float32(packed, scale, values)

    got_packed, got_scale, statistics = encoded(values, ScaleRule.COMPRESSED_TENSORS, scale)

    np.testing.assert_array_equal(got_packed, packed)
    np.testing.assert_array_equal(got_scale, scale)
    assert statistics.num_off_grid == 0


@pytest.mark.parametrize("rule", OWN_SCALE_RULES)
def test_an_all_zero_block_keeps_its_source_byte_and_its_signs(rule: ScaleRule) -> None:
    values = one_block(0.0, -0.0)

    packed, scale, _ = encoded(values, rule, np.array([[254]], dtype=np.uint8))

    assert scale.tolist() == [[254]]
    assert packed[0].tolist() == [0x80] + [0] * 15


@pytest.mark.parametrize("rule", OWN_SCALE_RULES)
@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 9), blocks=st.integers(1, 5), as_bf16=st.booleans())
def test_blocks_without_a_source_equal_the_reference(
    rule: ScaleRule, seed: int, rows: int, blocks: int, as_bf16: bool
) -> None:
    values = wild_values(seed, (rows, blocks * 32))
    bits = np.empty(values.shape, dtype=np.uint16)
    float32_to_bf16(values, bits)
    if as_bf16:
        bf16_to_float32(bits, values)

    packed, scale, _ = encoded(bits if as_bf16 else values, rule)

    want_packed, want_scale = quantize(torch.from_numpy(values), rule=rule.value)
    np.testing.assert_array_equal(scale, want_scale.numpy())
    np.testing.assert_array_equal(packed, want_packed.numpy())


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 9), blocks=st.integers(1, 5))
def test_the_source_rule_equals_the_reference_and_saturates(seed: int, rows: int, blocks: int) -> None:
    values = wild_values(seed, (rows, blocks * 32))
    source = np.random.default_rng(seed).integers(0, 255, (rows, blocks), dtype=np.uint8)

    packed, scale, _ = encoded(values, ScaleRule.SOURCE, source)

    want_packed, _ = quantize(torch.from_numpy(values), torch.from_numpy(source), rule="source")
    np.testing.assert_array_equal(scale, source)
    np.testing.assert_array_equal(packed, want_packed.numpy())


@pytest.mark.parametrize("rule", OWN_SCALE_RULES)
def test_every_bf16_number_as_a_blocks_largest_gets_the_reference_scale(rule: ScaleRule) -> None:
    bits = np.zeros((0x7F80, 32), dtype=np.uint16)
    bits[:, 5] = np.arange(0x7F80)

    packed, scale, statistics = encoded(bits, rule)

    weight = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    want_packed, want_scale = quantize(weight, rule=rule.value)
    np.testing.assert_array_equal(scale, want_scale.numpy())
    np.testing.assert_array_equal(packed, want_packed.numpy())
    assert statistics.num_not_finite == 0


def test_a_changed_block_moves_its_scale_and_leaves_its_neighbours_alone() -> None:
    random = np.random.default_rng(2)
    packed = random.integers(0, 256, (4, 64), dtype=np.uint8)
    scale = random.integers(117, 124, (4, 4), dtype=np.uint8)
    values = np.empty((4, 128), dtype=np.uint16)
    decode(packed, scale, values)
    as_float = np.empty((4, 128), dtype=np.float32)
    bf16_to_float32(values, as_float)
    as_float[2, 64:96] *= 3.0
    float32_to_bf16(as_float, values)

    got_packed, got_scale, statistics = encoded(values, ScaleRule.COMPRESSED_TENSORS, scale, packed)

    changed = (got_scale != scale) | (got_packed.reshape(4, 4, 16) != packed.reshape(4, 4, 16)).any(axis=2)
    assert np.argwhere(changed).tolist() == [[2, 2]]
    assert (statistics.num_changed, statistics.num_off_grid, statistics.num_scale_moved) == (1, 1, 1)


def test_an_element_that_stays_on_the_grid_counts_as_changed_and_not_as_off_grid() -> None:
    source_packed, source_scale, _ = encoded(one_block(6.0, 1.0), ScaleRule.OCP_FLOOR)

    _, _, statistics = encoded(one_block(6.0, 1.5), ScaleRule.OCP_FLOOR, source_scale, source_packed)

    assert (statistics.num_changed, statistics.num_off_grid, statistics.num_scale_moved) == (1, 0, 0)


def test_errors_and_saturation_are_reported() -> None:
    values = np.concatenate((one_block(7.0, 1.0), one_block(4.0, 1.125)), axis=1)
    source = np.array([[127, 127]], dtype=np.uint8)

    _, _, statistics = encoded(values, ScaleRule.SOURCE, source)

    assert statistics.num_saturated == 1
    assert statistics.max_abs_error == 1.0
    assert statistics.max_relative_error == pytest.approx(1.0 / 7.0, rel=1e-15)  # one float64 division


def test_flush_to_zero_changes_no_bit() -> None:
    packed = np.tile(np.arange(256, dtype=np.uint8), (3, 1))
    scale = np.repeat(np.arange(3, dtype=np.uint8), 16).reshape(3, 16)
    values, kept = np.empty((3, 512), dtype=np.uint16), np.empty((3, 512), dtype=np.float32)
    for table in (magnitude_bits, rounding_bits, decoded_pairs):
        table.cache_clear()

    assert torch.set_flush_denormal(True)
    try:
        decode(packed, scale, values)
        bf16_to_float32(values, kept)
        from_bf16, _, _ = encoded(values, ScaleRule.SOURCE, scale)
        from_float32, _, statistics = encoded(kept, ScaleRule.SOURCE, scale)
    finally:
        torch.set_flush_denormal(False)

    assert np.count_nonzero(values & 0x7FFF) == np.count_nonzero(np.stack((packed & 0x7, packed >> 4 & 0x7)))
    np.testing.assert_array_equal(from_bf16, packed)
    np.testing.assert_array_equal(from_float32, packed)
    assert statistics.num_off_grid == 0


def test_a_tiny_value_does_not_pass_for_zero() -> None:
    source = np.array([[254]], dtype=np.uint8)

    packed, scale, statistics = encoded(one_block(1e-40, -1e-40), ScaleRule.COMPRESSED_TENSORS, source)

    want_packed, want_scale = quantize(torch.from_numpy(one_block(1e-40, -1e-40)), rule="compressed-tensors")
    assert statistics.num_off_grid == 1
    np.testing.assert_array_equal(packed, want_packed.numpy())
    np.testing.assert_array_equal(scale, want_scale.numpy())


@pytest.mark.parametrize("as_bf16", [True, False])
def test_values_that_are_not_finite_are_counted_and_located_and_become_nan_blocks(as_bf16: bool) -> None:
    values = np.ones((3, 64), dtype=np.float32)
    values[1, 40], values[1, 41], values[2, 3] = np.nan, -np.inf, np.inf
    bits = np.empty(values.shape, dtype=np.uint16)
    float32_to_bf16(values, bits)
    source = np.full((3, 2), 253, dtype=np.uint8)

    _, scale, statistics = encoded(bits if as_bf16 else values, ScaleRule.CEIL, source)

    assert statistics.num_not_finite == 3
    assert statistics.not_finite_at == ((1, 40), (1, 41), (2, 3))
    assert (scale == 255).tolist() == [[False, False], [False, True], [True, False]]


@pytest.mark.parametrize("byte", [253, 254])
def test_an_infinity_does_not_pass_for_a_code_that_overflows(byte: int) -> None:
    bits = np.zeros((1, 32), dtype=np.uint16)
    bits[0, 9] = 0x7F80

    _, _, statistics = encoded(bits, ScaleRule.CEIL, np.array([[byte]], dtype=np.uint8))

    assert statistics.not_finite_at == ((0, 9),)


def test_positions_stay_right_beyond_the_first_piece_and_only_the_first_are_kept() -> None:
    values = np.zeros((300, 320), dtype=np.float32)
    values[290:, 319] = np.nan

    _, _, statistics = encoded(values, ScaleRule.CEIL)

    assert statistics.num_not_finite == 10
    assert statistics.not_finite_at == tuple((290 + i, 319) for i in range(SHOWN_POSITIONS))


def test_statistics_of_two_pieces_add_up() -> None:
    random = np.random.default_rng(3)
    values = random.standard_normal((6, 64)).astype(np.float32)
    source = np.full((6, 2), 126, dtype=np.uint8)
    packed = np.zeros((6, 32), dtype=np.uint8)
    _, _, whole = encoded(values, ScaleRule.CEIL, source, packed)

    parts = EncodeStatistics()
    for rows in (slice(0, 2), slice(2, 6)):
        _, _, part = encoded(values[rows], ScaleRule.CEIL, source[rows], packed[rows])
        parts = parts.merged(part)

    assert parts == whole


@pytest.mark.parametrize(
    ("columns", "rule", "source", "message"),
    [
        (48, ScaleRule.CEIL, None, "48 columns, wanted a multiple of 32"),
        (64, ScaleRule.SOURCE, None, "the rule 'source' needs source_scale"),
        (64, ScaleRule.CEIL, [[1, 2, 3]], r"source_scale is uint8 \[1, 3\], wanted uint8 \[1, 2\]"),
        (64, ScaleRule.CEIL, [[255, 2]], "1 source scales are 255"),
    ],
)
def test_input_without_meaning_is_refused(
    columns: int, rule: ScaleRule, source: list[list[int]] | None, message: str
) -> None:
    source_scale = None if source is None else np.array(source, dtype=np.uint8)

    with pytest.raises(ValueError, match=message):
        encoded(np.zeros((1, columns), dtype=np.float32), rule, source_scale)
