"""MXFP4 to float: the specification.

A block is 32 values along the last (input) dim. An element is E2M1: one sign bit and a magnitude code into
{0, 0.5, 1, 1.5, 2, 3, 4, 6}; a scale is E8M0: the byte is the exponent plus 127, and 255 stands for NaN (OCP
Microscaling Formats 1.0, section 5.2; the layout is that of compressed-tensors' ``mxfp4-pack-quantized``).

Shape suffixes: G = blocks in a row, B = block size (32), P = B / 2 packed bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_SIZE = 32
PACKED_BLOCK_BYTES = BLOCK_SIZE // 2
E8M0_NAN = 255

FLOAT32_EXPONENT_SHIFT = 23
FLOAT32_INFINITY_EXPONENT = 255


def dequantize(packed: Tensor, scale: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode MXFP4: ``value = E2M1[code] * 2 ** (scale - 127)``, without rounding.

    The result is put together from bits, so that neither the processor's flush-to-zero mode nor a device's handling
    of subnormal numbers can change it: the smallest magnitude, ``2 ** -128``, is subnormal in both result types.

    Args:
        packed: uint8 ``[..., out, in / 2]``; byte ``j`` holds column ``2j`` in its low nibble, ``2j + 1`` in its high.
        scale: uint8 ``[..., out, in / 32]``, one byte a block.
        dtype: ``torch.float32`` or ``torch.bfloat16``.

    Returns:
        ``[..., out, in]``. Every value below ``2 ** 128`` is exact in both dtypes; 4 and 6 under byte 253 or 254 and
        2 and 3 under byte 254 lie above and become infinite. A block under byte 255 is NaN. Code 8 is ``-0.0``.

    Raises:
        ValueError: wrong dtypes, or shapes that do not belong together.
    """
    check_packed(packed, scale)
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"MXFP4 decodes exactly to float32 or bfloat16, not to {dtype}")
    code_GB = split_blocks(unpack_codes(packed)).int()
    bits_GB = _float32_bits(code_GB, scale.int()[..., None])
    if dtype == torch.bfloat16:
        return (bits_GB >> 16).to(torch.int16).view(torch.bfloat16).flatten(-2)
    return bits_GB.view(torch.float32).flatten(-2)


def unpack_codes(packed: Tensor) -> Tensor:
    """Split bytes into 4-bit codes, low nibble first: uint8 ``[..., in / 2]`` -> uint8 ``[..., in]``."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def split_blocks(values: Tensor) -> Tensor:
    """View rows as blocks: ``[..., in]`` -> ``[..., in / 32, 32]``."""
    return values.reshape(*values.shape[:-1], values.shape[-1] // BLOCK_SIZE, BLOCK_SIZE)


def check_packed(packed: Tensor, scale: Tensor) -> None:
    """Refuse a pair that is not MXFP4.

    Raises:
        ValueError: a dtype is not uint8, or the scales are not one byte for every 16 packed bytes.
    """
    if packed.dtype != torch.uint8 or scale.dtype != torch.uint8:
        raise ValueError(f"packed codes and scales are uint8, got {packed.dtype} and {scale.dtype}")
    wanted = (*packed.shape[:-1], packed.shape[-1] // PACKED_BLOCK_BYTES) if packed.dim() else ()
    if packed.dim() == 0 or packed.shape[-1] % PACKED_BLOCK_BYTES or tuple(scale.shape) != wanted:
        raise ValueError(
            f"packed {tuple(packed.shape)} needs scales {wanted} and a multiple of {PACKED_BLOCK_BYTES} bytes a row; "
            f"got scales {tuple(scale.shape)}"
        )


def _float32_bits(code: Tensor, scale: Tensor) -> Tensor:
    """The float32 bit patterns (int32) of codes under scales (int32, broadcast)."""
    exponent, mantissa = (code & 0x7) >> 1, code & 0x1
    # 0.5, the one subnormal of E2M1, is a normal number here: 1.0 times 2 ** -1, like exponent code 0 with no mantissa
    is_half = (exponent == 0) & (mantissa == 1)
    significand = (1 << FLOAT32_EXPONENT_SHIFT) | torch.where(is_half, 0, mantissa << (FLOAT32_EXPONENT_SHIFT - 1))
    biased = scale + exponent - 1
    normal = (biased << FLOAT32_EXPONENT_SHIFT) | (significand & ((1 << FLOAT32_EXPONENT_SHIFT) - 1))
    subnormal = significand >> (1 - biased).clamp(min=0)
    infinite = FLOAT32_INFINITY_EXPONENT << FLOAT32_EXPONENT_SHIFT
    magnitude = torch.where(biased > 0, normal, subnormal)
    magnitude = torch.where(biased >= FLOAT32_INFINITY_EXPONENT, infinite, magnitude)
    magnitude = torch.where((code & 0x7) == 0, 0, magnitude)
    magnitude = torch.where(scale == E8M0_NAN, infinite | (1 << (FLOAT32_EXPONENT_SHIFT - 1)), magnitude)
    sign = torch.where((code >= 8) & (scale != E8M0_NAN), -(1 << 31), 0)
    return (magnitude | sign).to(torch.int32)
