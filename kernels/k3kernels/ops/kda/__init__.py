"""Kimi Delta Attention: the gated delta rule with a decay per key channel."""

from __future__ import annotations

from k3kernels.requirement import GpuKernelRequirement
from k3kernels.row import Row

ROWS = (
    Row(
        "kda",
        "chunk",
        "eager",
        forward="k3kernels.ops.kda.chunk.eager:forward",
        backward="k3kernels.ops.kda.chunk.eager:backward",
        description="Chunks of 64 tokens, plain torch, analytic backward; safe for any decay.",
    ),
    Row(
        "kda",
        "chunk",
        "fla",
        wrapper="k3kernels.ops.kda.chunk.fla:chunk_kda",
        description="Triton kernels of flash-linear-attention.",
        requirement=GpuKernelRequirement(),
        requires=("fla.ops.kda", "triton", "einops"),
    ),
    Row(
        "kda",
        "recurrent",
        "eager",
        wrapper="k3kernels.ops.kda.recurrent.eager:recurrent_kda",
        description="One token after another: the definition, and the decode step.",
    ),
    Row(
        "kda",
        "recurrent",
        "fla",
        wrapper="k3kernels.ops.kda.recurrent.fla:recurrent_kda",
        description="Fused recurrence of flash-linear-attention; forward only.",
        requirement=GpuKernelRequirement(),
        requires=("fla.ops.kda", "triton", "einops"),
    ),
)
