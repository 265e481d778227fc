"""The short causal depthwise convolution before Kimi Delta Attention."""

from __future__ import annotations

from k3kernels.requirement import GpuKernelRequirement
from k3kernels.row import Row

ROWS = (
    Row(
        "short_conv",
        "standard",
        "eager",
        wrapper="k3kernels.ops.short_conv.standard.eager:short_conv",
        description="Shifted multiply-adds in fp32, then SiLU; history in and out.",
    ),
    Row(
        "short_conv",
        "standard",
        "fla",
        wrapper="k3kernels.ops.short_conv.standard.fla:short_conv",
        description="Fused convolution of flash-linear-attention.",
        requirement=GpuKernelRequirement(),
        requires=("fla.modules", "triton", "einops"),
    ),
)
