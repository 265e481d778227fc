"""The CPU decoder against the reference op, over every byte and every scale."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from k3convert.numerics.mxfp4_decode import decode, decode_float32
from k3convert.numerics.mxfp4_format import MAGNITUDES, U8
from k3kernels.ops.mxfp4.dequantize.eager import dequantize


def every_byte_under_every_scale() -> tuple[U8, U8]:
    packed = np.tile(np.arange(256, dtype=np.uint8), 256).reshape(256, 256)
    scale = np.repeat(np.arange(256, dtype=np.uint8), 16).reshape(256, 16)
    return packed, scale


def test_bf16_equals_the_reference_for_every_byte_under_every_scale() -> None:
    packed, scale = every_byte_under_every_scale()
    got = np.empty((256, 512), dtype=np.uint16)

    decode(packed, scale, got)

    want = dequantize(torch.from_numpy(packed), torch.from_numpy(scale), dtype=torch.bfloat16)
    np.testing.assert_array_equal(got, want.view(torch.int16).numpy().view(np.uint16))


def test_float32_equals_the_reference_for_every_byte_under_every_scale() -> None:
    packed, scale = every_byte_under_every_scale()
    got = np.empty((256, 512), dtype=np.float32)

    decode_float32(packed, scale, got)

    want = dequantize(torch.from_numpy(packed), torch.from_numpy(scale)).numpy()
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


def test_float32_equals_the_formula_in_float64_for_every_finite_value() -> None:
    packed, scale = every_byte_under_every_scale()
    packed, scale = packed[:253], scale[:253]
    got = np.empty((253, 512), dtype=np.float32)

    decode_float32(packed, scale, got)

    signed = np.array([*MAGNITUDES, *(-m for m in MAGNITUDES)])
    values = np.stack((signed[packed & 0xF], signed[packed >> 4]), axis=-1).reshape(253, 512)
    want = np.ldexp(values, np.repeat(scale.astype(np.int64) - 127, 32, axis=1))
    np.testing.assert_array_equal(got.astype(np.float64), want)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(want))


@settings(deadline=None, max_examples=50)
@given(rows=st.integers(0, 40), blocks=st.integers(0, 9), seed=st.integers(0, 2**32 - 1))
def test_any_shape_equals_the_reference(rows: int, blocks: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    packed = random.integers(0, 256, (rows, blocks * 16), dtype=np.uint8)
    scale = random.integers(0, 253, (rows, blocks), dtype=np.uint8)
    got = np.empty((rows, blocks * 32), dtype=np.uint16)

    decode(packed, scale, got)

    want = dequantize(torch.from_numpy(packed), torch.from_numpy(scale), dtype=torch.bfloat16)
    np.testing.assert_array_equal(got, want.view(torch.int16).numpy().view(np.uint16))


def test_input_may_be_read_only_and_nothing_needs_to_be_aligned() -> None:
    random = np.random.default_rng(0)
    packed = random.integers(0, 256, (3, 32), dtype=np.uint8)
    scale = random.integers(117, 124, (3, 2), dtype=np.uint8)
    want = np.empty((3, 64), dtype=np.uint16)
    decode(packed, scale, want)
    locked = np.frombuffer(b"x" + packed.tobytes(), dtype=np.uint8, offset=1).reshape(3, 32)
    buffer = np.empty(1 + want.nbytes, dtype=np.uint8)
    got = buffer[1:].view(np.uint16).reshape(3, 64)

    decode(locked, scale, got)

    np.testing.assert_array_equal(got, want)


def test_only_the_given_rows_of_a_larger_buffer_are_written() -> None:
    packed = np.full((1, 16), 0x77, dtype=np.uint8)
    scale = np.full((1, 1), 127, dtype=np.uint8)
    stack = np.zeros((3, 32), dtype=np.uint16)

    decode(packed, scale, stack[1:2])

    assert stack.any(axis=1).tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("packed", "scale", "out", "message"),
    [
        ((2, 32), (2, 1), (2, 64), r"packed is uint8 \[2, 32\], wanted uint8 \[2, 16\]"),
        ((2, 32), (3, 2), (2, 64), r"packed is uint8 \[2, 32\], wanted uint8 \[3, 32\]"),
        ((2, 32), (2, 2), (2, 32), r"out is uint16 \[2, 32\], wanted uint16 \[2, 64\]"),
    ],
)
def test_shapes_that_do_not_belong_together_are_refused(
    packed: tuple[int, ...], scale: tuple[int, ...], out: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        decode(np.zeros(packed, np.uint8), np.zeros(scale, np.uint8), np.zeros(out, np.uint16))


def test_a_strided_view_is_refused() -> None:
    packed = np.zeros((4, 16), dtype=np.uint8)[::2]

    with pytest.raises(ValueError, match="must be C-contiguous"):
        decode(packed, np.zeros((2, 1), np.uint8), np.zeros((2, 32), np.uint16))


def test_another_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="scale is int8"):
        decode(np.zeros((1, 16), np.uint8), np.zeros((1, 1), np.int8), np.zeros((1, 32), np.uint16))  # type: ignore[arg-type]
