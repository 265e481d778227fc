"""The log decay of Kimi Delta Attention, from its pre-activation."""

from __future__ import annotations

from k3kernels.requirement import GpuKernelRequirement
from k3kernels.row import Row

ROWS = (
    Row(
        "kda_gate",
        "standard",
        "eager",
        forward="k3kernels.ops.kda_gate.standard.eager:forward",
        backward="k3kernels.ops.kda_gate.standard.eager:backward",
        description="Bounded (sigmoid) or unbounded (softplus) log decay in fp32.",
    ),
    Row(
        "kda_gate",
        "standard",
        "fla",
        wrapper="k3kernels.ops.kda_gate.standard.fla:kda_gate",
        description="Fused gate of flash-linear-attention.",
        requirement=GpuKernelRequirement(),
        requires=("fla.ops.kda", "triton", "einops"),
    ),
)
