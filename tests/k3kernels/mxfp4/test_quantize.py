"""The encoder: element step, scale rules, and returning to the bytes of a checkpoint."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from k3kernels.ops.mxfp4.dequantize.eager import dequantize
from k3kernels.ops.mxfp4.quantize.eager import SCALE_RULES, quantize

RULES = tuple(SCALE_RULES)
FLOAT_DTYPES = (torch.float32, torch.bfloat16)


def block_of(*values: float) -> Tensor:
    """One block that begins with the values and goes on with zeros."""
    return torch.tensor([[*values, *[0.0] * (32 - len(values))]])


def codes_of(packed: Tensor) -> list[int]:
    return [code for byte in packed.flatten().tolist() for code in (byte & 0xF, byte >> 4)]


def scale_of(byte: int) -> Tensor:
    return torch.tensor([[byte]], dtype=torch.uint8)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("byte", [0, 1, 64, 127, 200, 252])
def test_b13_all_sixteen_codes_survive_decode_then_encode(dtype: torch.dtype, byte: int) -> None:
    packed = torch.tensor([[low | (high << 4) for low, high in zip(range(16), reversed(range(16)), strict=True)]])
    packed = packed.to(torch.uint8)

    weight = dequantize(packed, scale_of(byte), dtype=dtype)

    assert torch.equal(quantize(weight, scale_of(byte), rule="source")[0], packed)


def test_every_byte_returns_under_its_own_scale() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(16, 16).repeat(253, 1)
    scale = torch.arange(253, dtype=torch.uint8).repeat_interleave(16)[:, None]

    got, kept = quantize(dequantize(packed, scale), scale, rule="source")

    assert torch.equal(got, packed)
    assert torch.equal(kept, scale)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("tie", "rounded"), [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0)]
)
def test_ties_go_to_the_even_code(tie: float, rounded: float, sign: int) -> None:
    weight = block_of(sign * tie)

    decoded = dequantize(*quantize(weight, scale_of(127), rule="source"))

    assert decoded[0, 0] == sign * rounded
    assert math.copysign(1, float(decoded[0, 0])) == sign


@pytest.mark.parametrize("tie", [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
def test_beside_a_tie_the_nearer_value_wins(tie: float) -> None:
    below, above = (float(torch.nextafter(torch.tensor(tie), torch.tensor(to))) for to in (0.0, 10.0))

    decoded = dequantize(*quantize(block_of(below, above), scale_of(127), rule="source"))

    assert float(decoded[0, 0]) < tie < float(decoded[0, 1])


def test_a_given_scale_saturates() -> None:
    decoded = dequantize(*quantize(block_of(6.5, 1e30, -100.0), scale_of(127), rule="source"))

    assert decoded[0, :3].tolist() == [6.0, 6.0, -6.0]


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_the_sign_comes_from_the_sign_bit(dtype: torch.dtype) -> None:
    weight = block_of(-0.0, 0.0, -1e-3, 4.0).to(dtype)

    packed, _ = quantize(weight, rule="ocp-floor")

    assert codes_of(packed)[:4] == [8, 0, 8, 6]


@pytest.mark.parametrize(
    ("rule", "amax", "exponent"),
    [
        ("ocp-floor", 4.0, 0),
        ("ocp-floor", 5.0, 0),
        ("ocp-floor", 6.0, 0),
        ("ocp-floor", 7.0, 0),
        ("ocp-floor", 7.99, 0),
        ("compressed-tensors", 5.0, 0),
        ("compressed-tensors", 6.0, 0),
        ("compressed-tensors", 6.99, 0),
        ("compressed-tensors", 7.0, 1),
        ("compressed-tensors", 7.99, 1),
        ("ceil", 5.0, 0),
        ("ceil", 6.0, 0),
        ("ceil", 6.01, 1),
        ("ceil", 7.0, 1),
        ("ceil", 7.99, 1),
    ],
)
@pytest.mark.parametrize("shift", [-100, -3, 0, 40])
def test_b12_b14_each_rule_steps_where_it_says(rule: str, amax: float, exponent: int, shift: int) -> None:
    _, scale = quantize(block_of(-amax * 2.0**shift), rule=rule)

    assert scale.item() == exponent + shift + 127


@pytest.mark.parametrize(("rule", "byte"), [("ocp-floor", 0), ("compressed-tensors", 0), ("ceil", 127)])
def test_a_block_of_zeros_has_the_byte_of_its_rule(rule: str, byte: int) -> None:
    packed, scale = quantize(torch.zeros(1, 32), rule=rule)

    assert scale.item() == byte
    assert packed.eq(0).all()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_b15_a_subnormal_amax_clamps_the_byte(rule: str, dtype: torch.dtype) -> None:
    packed, scale = quantize(torch.full((1, 32), 1e-40).to(dtype), rule=rule)

    assert scale.item() == 0
    assert dequantize(packed, scale).eq(0).all()


@pytest.mark.parametrize("rule", RULES)
def test_subnormals_that_fit_survive_a_flushing_processor(rule: str) -> None:
    smallest = torch.full((1, 32), 1 << 21, dtype=torch.int32).view(torch.float32)  # 2 ** -128
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no flush-to-zero mode")
    try:
        packed, scale = quantize(smallest, rule=rule)
    finally:
        torch.set_flush_denormal(False)

    assert scale.item() == 0
    assert codes_of(packed) == [1] * 32


@pytest.mark.parametrize(("rule", "byte"), [("ocp-floor", 252), ("compressed-tensors", 253), ("ceil", 253)])
def test_the_largest_float_stays_finite(rule: str, byte: int) -> None:
    packed, scale = quantize(torch.full((1, 32), torch.finfo(torch.float32).max), rule=rule)

    assert scale.item() == byte
    assert codes_of(packed)[0] == (7 if rule == "ocp-floor" else 6)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("largest", "lowered_by"), [(6.0, 0), (4.0, 0), (3.0, 1), (2.0, 1), (1.5, 2), (1.0, 2), (0.5, 3)]
)
def test_requantizing_decoded_values_keeps_them_and_lowers_small_scales(
    rule: str, largest: float, lowered_by: int, dtype: torch.dtype
) -> None:
    grid = [value for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0) if value <= largest]
    weight = (block_of(*grid, *(-value for value in grid)) * 2.0**-6).to(dtype)

    packed, scale = quantize(weight, rule=rule)

    assert scale.item() == 127 - 6 - lowered_by
    assert torch.equal(dequantize(packed, scale, dtype=dtype), weight)


@pytest.mark.parametrize("rule", RULES)
def test_quantizing_twice_changes_nothing(rule: str) -> None:
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)) * 0.02

    once = quantize(weight, rule=rule)

    twice = quantize(dequantize(*once), rule=rule)
    assert torch.equal(dequantize(*twice), dequantize(*once))


def test_only_the_ceil_rule_never_saturates() -> None:
    weight = torch.randn(256, 64, generator=torch.Generator().manual_seed(1))
    amax = weight.view(256, 2, 32).abs().amax(-1)

    normalised = {rule: amax / torch.exp2(quantize(weight, rule=rule)[1].float() - 127) for rule in RULES}

    assert normalised["ceil"].max() <= 6
    assert normalised["ceil"].min() > 3
    assert normalised["ocp-floor"].min() >= 4
    assert normalised["ocp-floor"].max() > 7
    assert 3.5 <= normalised["compressed-tensors"].min() <= normalised["compressed-tensors"].max() < 7


@pytest.mark.parametrize(
    ("weight", "scale", "rule", "message"),
    [
        (torch.zeros(1, 32), None, "even", "no scale rule 'even'"),
        (torch.zeros(1, 32), None, "source", "needs uint8 scales"),
        (torch.zeros(1, 32), torch.zeros(1, 1), "source", "needs uint8 scales"),
        (torch.zeros(1, 32), scale_of(255), "source", r"255 \(NaN\)"),
        (torch.zeros(1, 32), scale_of(127), "ceil", "makes its own scales"),
        (torch.zeros(1, 33), None, "ceil", "not a multiple of 32"),
        (torch.zeros(1, 32).half(), None, "ceil", "float16"),
        (torch.full((1, 32), math.nan), None, "ceil", "32 values are not finite"),
        (torch.full((1, 32), math.inf), None, "ceil", "32 values are not finite"),
    ],
)
def test_what_cannot_be_encoded_is_refused(weight: Tensor, scale: Tensor | None, rule: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantize(weight, scale, rule=rule)
