"""The MXFP4 codec of the released expert weights."""

from __future__ import annotations

from k3kernels.row import Row

ROWS = (
    Row(
        "mxfp4",
        "dequantize",
        "eager",
        wrapper="k3kernels.ops.mxfp4.dequantize.eager:dequantize",
        description="Packed codes and E8M0 scales to float32 or bfloat16, exactly.",
    ),
    Row(
        "mxfp4",
        "quantize",
        "eager",
        wrapper="k3kernels.ops.mxfp4.quantize.eager:quantize",
        description="float32 or bfloat16 to packed codes under a named scale rule.",
    ),
)
