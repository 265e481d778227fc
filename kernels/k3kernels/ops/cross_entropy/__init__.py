"""Token-level cross entropy: losses, sum and count, so that the caller has one denominator for the whole batch."""

from __future__ import annotations

from k3kernels.row import Row

ROWS = (
    Row(
        "cross_entropy",
        "standard",
        "eager",
        wrapper="k3kernels.ops.cross_entropy.standard.eager:cross_entropy",
        description="From logits; log-softmax in fp32.",
    ),
    Row(
        "cross_entropy",
        "chunked",
        "eager",
        wrapper="k3kernels.ops.cross_entropy.chunked.eager:linear_cross_entropy",
        description="From hidden states and the head's weight, through full logits.",
    ),
    Row(
        "cross_entropy",
        "chunked",
        "chunk_loss",
        wrapper="k3kernels.ops.cross_entropy.chunked.chunk_loss:linear_cross_entropy",
        description="From hidden states, chunk by chunk; gradients made in the forward, never full logits.",
    ),
)
