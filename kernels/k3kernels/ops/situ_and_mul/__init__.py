"""SiTU-GLU: a tanh-bounded gate times a tanh-bounded up branch."""

from __future__ import annotations

from k3kernels.row import Row

ROWS = (
    Row(
        "situ_and_mul",
        "standard",
        "eager",
        forward="k3kernels.ops.situ_and_mul.standard.eager:forward",
        backward="k3kernels.ops.situ_and_mul.standard.eager:backward",
        description="fp32 inside, closed-form backward.",
    ),
    Row(
        "situ_and_mul",
        "weighted",
        "eager",
        forward="k3kernels.ops.situ_and_mul.weighted.eager:forward",
        backward="k3kernels.ops.situ_and_mul.weighted.eager:backward",
        description="The same times a weight per row, before the one rounding.",
    ),
)
