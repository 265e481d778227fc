"""RMS normalisation in the two roundings that K3 has."""

from __future__ import annotations

from k3kernels.row import Row

ROWS = (
    Row(
        "rms_norm",
        "standard",
        "eager",
        forward="k3kernels.ops.rms_norm.standard.eager:forward",
        backward="k3kernels.ops.rms_norm.standard.eager:backward",
        description="Text norms: the cast comes before the weight multiply.",
    ),
    Row(
        "rms_norm",
        "torch",
        "eager",
        forward="k3kernels.ops.rms_norm.torch.eager:forward",
        backward="k3kernels.ops.rms_norm.torch.eager:backward",
        description="Vision norms, as torch.nn.RMSNorm: the cast comes after the weight multiply.",
    ),
)
