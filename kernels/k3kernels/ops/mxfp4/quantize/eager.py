"""Float to MXFP4: the specification of the element step and of every scale rule in use.

The element step is the same everywhere: ``w / 2 ** e`` is rounded to the E2M1 grid, to nearest with ties to the even
code, and saturates at 6. The rules differ in the exponent ``e`` that they give to a block whose largest magnitude is
``a = m * 2 ** k`` with ``1 <= m < 2``:

- ``ocp-floor``: ``e = k - 2`` (OCP Microscaling Formats 1.0, section 6.3). 7 and 7.99 saturate to 6.
- ``compressed-tensors``: ``e = k - 1`` from ``m = 1.75`` on, ``k - 2`` below (``generate_mx_scales``, 0.20.1).
- ``ceil``: the smallest ``e`` with ``a <= 6 * 2 ** e``, so ``k - 1`` above ``m = 1.5`` (Megatron-Bridge).
- ``source``: the exponent is given; used to return to the bytes of a checkpoint.

On values that came out of a decoder all rules preserve every value; they may move the exponent down, never up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from k3kernels.ops.mxfp4.dequantize.eager import BLOCK_SIZE, E8M0_NAN, split_blocks

E8M0_BIAS = 127
E8M0_MAX = 254
MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Halfway between neighbouring magnitudes of E2M1; midpoint ``i`` lies between codes ``i`` and ``i + 1``."""


@dataclass(frozen=True, slots=True)
class ScaleRule:
    """How a rule turns a block's largest magnitude ``m * 2 ** k`` into an exponent.

    Attributes:
        threshold: Where in ``1 <= m < 2`` the exponent steps from ``k - 2`` to ``k - 1``; 2 never steps.
        at_threshold: Whether ``m == threshold`` steps already.
        zero_byte: The scale byte of a block of zeros.
    """

    threshold: float
    at_threshold: bool
    zero_byte: int


SOURCE_RULE = "source"
SCALE_RULES: Mapping[str, ScaleRule] = {
    "ocp-floor": ScaleRule(threshold=2.0, at_threshold=False, zero_byte=0),
    "compressed-tensors": ScaleRule(threshold=1.75, at_threshold=True, zero_byte=0),
    "ceil": ScaleRule(threshold=1.5, at_threshold=False, zero_byte=127),
}


def quantize(weight: Tensor, scale: Tensor | None = None, *, rule: str) -> tuple[Tensor, Tensor]:
    """Encode to MXFP4.

    The arithmetic is float64, in which every quotient ``w / 2 ** e`` is exact, and a subnormal input is read from its
    bits, so that flush-to-zero modes cannot change the result.

    Args:
        weight: float32 or bfloat16 ``[..., out, in]``, finite; ``in`` is a multiple of 32.
        scale: uint8 ``[..., out, in / 32]`` for rule ``source``, else None.
        rule: ``"source"``, ``"compressed-tensors"``, ``"ocp-floor"`` or ``"ceil"``.

    Returns:
        ``(packed, scale)``: uint8 ``[..., out, in / 2]``, low nibble first, and uint8 ``[..., out, in / 32]``. The sign
        comes from the sign bit, so that ``-0.0`` and negative values that round to zero become code 8. Scale bytes are
        clamped to 0..254; a block that is too small for byte 0 becomes zeros.

    Raises:
        ValueError: an unknown rule, a scale missing or superfluous, wrong dtypes or shapes, values that are not
            finite, or a given scale byte of 255 (NaN).
    """
    _check(weight, scale, rule)
    magnitude, is_negative = _exact_magnitudes(weight)
    if not bool(torch.isfinite(magnitude).all()):
        raise ValueError(f"{int((~torch.isfinite(magnitude)).sum())} values are not finite; MXFP4 has no code for them")
    magnitude_GB = split_blocks(magnitude)
    if scale is None:
        scale = scale_bytes(magnitude_GB.amax(-1), rule)
    quotient_GB = magnitude_GB * _power_of_two(E8M0_BIAS - scale.int())[..., None]
    code = element_codes(quotient_GB).flatten(-2) | (is_negative.to(torch.uint8) << 3)
    return code[..., 0::2] | (code[..., 1::2] << 4), scale.clone()


def scale_bytes(amax: Tensor, rule: str) -> Tensor:
    """The scale byte of each block.

    Args:
        amax: float64, the largest magnitude of each block.
        rule: A key of ``SCALE_RULES``.

    Returns:
        uint8 of the same shape.
    """
    chosen = SCALE_RULES[rule]
    half_mantissa, exponent = torch.frexp(amax)  # amax = half_mantissa * 2 ** exponent, half_mantissa in [0.5, 1)
    mantissa, floor = 2 * half_mantissa, exponent - 1
    steps = mantissa >= chosen.threshold if chosen.at_threshold else mantissa > chosen.threshold
    byte = (floor - 2 + steps.int() + E8M0_BIAS).clamp(0, E8M0_MAX)
    return torch.where(amax == 0, chosen.zero_byte, byte).to(torch.uint8)


def element_codes(quotient: Tensor) -> Tensor:
    """Magnitude codes 0..7 (uint8) of non-negative float64 quotients: nearest, ties to even, saturating."""
    midpoints = torch.tensor(MIDPOINTS, dtype=quotient.dtype, device=quotient.device)
    ties_down = torch.bucketize(quotient, midpoints, right=False)
    ties_up = torch.bucketize(quotient, midpoints, right=True)
    return torch.where(ties_down % 2 == 0, ties_down, ties_up).to(torch.uint8)


def _check(weight: Tensor, scale: Tensor | None, rule: str) -> None:
    if rule != SOURCE_RULE and rule not in SCALE_RULES:
        raise ValueError(f"no scale rule {rule!r}; there are: {', '.join(sorted((SOURCE_RULE, *SCALE_RULES)))}")
    if weight.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"MXFP4 is encoded from float32 or bfloat16, not from {weight.dtype}")
    if weight.dim() == 0 or weight.shape[-1] % BLOCK_SIZE:
        raise ValueError(f"the last dim of {tuple(weight.shape)} is not a multiple of {BLOCK_SIZE}")
    if rule != SOURCE_RULE:
        if scale is not None:
            raise ValueError(f"rule {rule!r} makes its own scales; a given scale belongs to rule {SOURCE_RULE!r}")
        return
    wanted = (*weight.shape[:-1], weight.shape[-1] // BLOCK_SIZE)
    if scale is None or scale.dtype != torch.uint8 or tuple(scale.shape) != wanted:
        got = "none" if scale is None else f"{scale.dtype} {tuple(scale.shape)}"
        raise ValueError(f"rule {SOURCE_RULE!r} needs uint8 scales {wanted}; got {got}")
    if num_nan := int((scale == E8M0_NAN).sum()):
        raise ValueError(f"{num_nan} scale bytes are {E8M0_NAN} (NaN); such blocks have no codes")


def _exact_magnitudes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Magnitudes as float64, read from the bits, and the sign bits (bool)."""
    if weight.dtype == torch.bfloat16:
        bits = weight.contiguous().view(torch.int16).int() << 16
    else:
        bits = weight.contiguous().view(torch.int32)
    exponent, fraction = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    significand = torch.where(exponent > 0, fraction | 0x800000, fraction)
    magnitude = significand.double() * _power_of_two(exponent.clamp(min=1) - (E8M0_BIAS + 23))
    return torch.where(exponent == 0xFF, torch.inf, magnitude), bits < 0


def _power_of_two(exponent: Tensor) -> Tensor:
    """``2.0 ** exponent`` in float64, exactly, for exponents within -1022..1023."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)
