"""bf16 and float32, compared with torch over every bf16 pattern and around every tie."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from k3convert.numerics.casts import bf16_to_float32, float32_to_bf16


def test_every_bf16_pattern_widens_as_in_torch() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    got = np.empty(bits.shape, dtype=np.float32)

    bf16_to_float32(bits, got)

    want = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


def test_every_pattern_around_every_tie_rounds_as_in_torch() -> None:
    upper = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16
    bits = upper | np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    values = bits.view(np.float32)
    got = np.empty(values.shape, dtype=np.uint16)

    float32_to_bf16(values, got)

    is_number = ~np.isnan(values)
    want = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(got[is_number], want[is_number])


def test_a_nan_stays_a_quiet_nan_with_its_sign_and_upper_payload() -> None:
    bits = np.array([0x7F80_0001, 0xFF80_FFFF, 0x7FC1_0000, 0xFFA5_1234], dtype=np.uint32)
    got = np.empty(4, dtype=np.uint16)

    float32_to_bf16(bits.view(np.float32), got)

    assert [hex(value) for value in got] == ["0x7fc0", "0xffc0", "0x7fc1", "0xffe5"]


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match=r"out is float32 \[3\], wanted float32 \[2\]"):
        bf16_to_float32(np.zeros(2, np.uint16), np.zeros(3, np.float32))
