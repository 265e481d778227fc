"""The dtype in which reductions and transcendental functions are computed."""

from __future__ import annotations

import torch
from torch import Tensor


def inside_dtype(x: Tensor) -> torch.dtype:
    """float32 for bfloat16 and float32 input, float64 for float64: what the contracts call the inside dtype."""
    return torch.promote_types(x.dtype, torch.float32)
