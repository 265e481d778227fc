"""The routed experts: gather, three matrices an expert, weighted combine."""

from __future__ import annotations

from k3kernels.row import Row

ROWS = (
    Row(
        "moe_experts",
        "situ",
        "eager",
        forward="k3kernels.ops.moe_experts.situ.eager:forward",
        backward="k3kernels.ops.moe_experts.situ.eager:backward",
        description="One expert after another; gradients go into one stack a matrix.",
    ),
    Row(
        "moe_experts",
        "situ",
        "grouped_mm",
        forward="k3kernels.ops.moe_experts.situ.grouped_mm:forward",
        backward="k3kernels.ops.moe_experts.situ.grouped_mm:backward",
        description="All experts in one torch._grouped_mm a matrix.",
    ),
)
