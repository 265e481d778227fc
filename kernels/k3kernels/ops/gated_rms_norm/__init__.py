"""RMS normalisation of the recurrence output, times the sigmoid of the output gate."""

from __future__ import annotations

from k3kernels.requirement import GpuKernelRequirement
from k3kernels.row import Row

ROWS = (
    Row(
        "gated_rms_norm",
        "standard",
        "eager",
        forward="k3kernels.ops.gated_rms_norm.standard.eager:forward",
        backward="k3kernels.ops.gated_rms_norm.standard.eager:backward",
        description="Norm, weight and sigmoid gate in fp32, one rounding at the end.",
    ),
    Row(
        "gated_rms_norm",
        "standard",
        "fla",
        wrapper="k3kernels.ops.gated_rms_norm.standard.fla:gated_rms_norm",
        description="Fused gated norm of flash-linear-attention.",
        requirement=GpuKernelRequirement(),
        requires=("fla.modules", "triton", "einops"),
    ),
)
