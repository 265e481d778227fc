"""Attention residuals: a softmax over depth instead of a running sum."""

from __future__ import annotations

from k3kernels.requirement import GpuKernelRequirement
from k3kernels.row import Row

ROWS = (
    Row(
        "attn_res",
        "standard",
        "eager",
        forward="k3kernels.ops.attn_res.standard.eager:forward",
        backward="k3kernels.ops.attn_res.standard.eager:backward",
        description="Scores, softmax and mix in fp32, source by source; closed-form backward.",
    ),
    Row(
        "attn_res",
        "standard",
        "fla",
        wrapper="k3kernels.ops.attn_res.standard.fla:attn_res",
        description="Fused kernel of flash-linear-attention, one pass over the sources.",
        requirement=GpuKernelRequirement(),
        requires=("fla.ops.attnres", "triton", "einops"),
    ),
)
