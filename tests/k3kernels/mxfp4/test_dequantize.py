"""The decoder over its whole domain."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from k3kernels.ops.mxfp4.dequantize.eager import dequantize

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NAN_BYTE = 255


@pytest.fixture
def flush_to_zero() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no flush-to-zero mode")
    yield
    torch.set_flush_denormal(False)


def every_byte_under_every_scale() -> tuple[Tensor, Tensor]:
    """All 256 packed bytes in 16 rows of one block, under each of the 256 scales."""
    packed = torch.arange(256, dtype=torch.uint8).view(16, 16).repeat(256, 1)
    scale = torch.arange(256, dtype=torch.uint8).repeat_interleave(16)[:, None]
    return packed, scale


def decode_one(code: int, byte: int) -> float:
    if byte == NAN_BYTE:
        return float("nan")
    sign = -1.0 if code >= 8 else 1.0
    return sign * MAGNITUDES[code % 8] * 2.0 ** (byte - 127)


def test_every_byte_under_every_scale_matches_a_scalar_decoder() -> None:
    packed, scale = every_byte_under_every_scale()

    got = dequantize(packed, scale)

    want = [
        [decode_one(code, byte) for pair in row for code in (pair & 0xF, pair >> 4)]
        for row, (byte,) in zip(packed.tolist(), scale.tolist(), strict=True)
    ]
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64).float(), rtol=0, atol=0, equal_nan=True)


def test_zeros_keep_their_sign() -> None:
    packed, scale = every_byte_under_every_scale()

    got = dequantize(packed, scale)

    codes = torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2)
    is_number = (scale != NAN_BYTE).expand_as(codes)
    assert torch.equal(torch.signbit(got)[is_number], (codes >= 8)[is_number])


def test_bfloat16_holds_the_same_values() -> None:
    packed, scale = every_byte_under_every_scale()

    got = dequantize(packed, scale, dtype=torch.bfloat16)

    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), dequantize(packed, scale), rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("flush_to_zero")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_smallest_value_survives_a_flushing_processor(dtype: torch.dtype) -> None:
    packed = torch.full((1, 16), 0x91, dtype=torch.uint8)

    got = dequantize(packed, torch.zeros(1, 1, dtype=torch.uint8), dtype=dtype)

    bits = got.view(torch.int32 if dtype == torch.float32 else torch.int16)
    smallest = 1 << 21 if dtype == torch.float32 else 1 << 5
    assert bits[0, 0] == smallest  # 2 ** -128
    assert bits[0, 1] - torch.iinfo(bits.dtype).min == smallest  # -(2 ** -128)


def test_b11_element_zero_is_the_low_nibble() -> None:
    packed = torch.zeros(1, 16, dtype=torch.uint8)
    packed[0, 0] = 0x21

    got = dequantize(packed, torch.tensor([[127]], dtype=torch.uint8))

    assert got[0, :3].tolist() == [0.5, 1.0, 0.0]


def test_the_published_vector_of_compressed_tensors_decodes() -> None:
    codes_by_hand = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
    row = torch.tensor([16, 50, 84, 118, 144, 186, 220, 254] * 4, dtype=torch.uint8)
    scale = torch.tensor([[126, 127], [128, 129]], dtype=torch.uint8)

    got = dequantize(row.expand(2, -1), scale)

    block = torch.tensor(codes_by_hand * 2)
    want = torch.stack((torch.cat((block / 2, block)), torch.cat((block * 2, block * 4))))
    assert torch.equal(got, want)


@pytest.mark.parametrize("rows", [1, 4, 7, 8])
def test_b3_few_rows_decode_like_many(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    packed = torch.randint(0, 256, (9, 48), dtype=torch.uint8, generator=generator)
    scale = torch.randint(100, 140, (9, 3), dtype=torch.uint8, generator=generator)

    assert torch.equal(dequantize(packed[:rows], scale[:rows]), dequantize(packed, scale)[:rows])


def test_leading_dims_and_empty_stacks_are_kept() -> None:
    packed = torch.zeros(0, 5, 32, dtype=torch.uint8)

    assert dequantize(packed, torch.zeros(0, 5, 2, dtype=torch.uint8)).shape == (0, 5, 64)


@pytest.mark.parametrize(
    ("packed", "scale", "dtype"),
    [
        (torch.zeros(2, 32, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8), torch.float32),
        (torch.zeros(2, 24, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8), torch.float32),
        (torch.zeros(2, 16, dtype=torch.int8), torch.zeros(2, 1, dtype=torch.uint8), torch.float32),
        (torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(2, 1), torch.float32),
        (torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8), torch.float16),
    ],
    ids=["too few scales", "ragged block", "signed codes", "float scales", "float16 out"],
)
def test_what_is_not_mxfp4_is_refused(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"uint8|needs scales|float16"):
        dequantize(packed, scale, dtype=dtype)
