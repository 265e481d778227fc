"""Softmax attention of the MLA layers: causal, per document, different key and value widths."""

from __future__ import annotations

from k3kernels.row import Row

ROWS = (
    Row(
        "mla_attention",
        "causal",
        "eager",
        wrapper="k3kernels.ops.mla_attention.causal.eager:mla_attention",
        description="Full score matrix; the softmax in fp32, products in the activation dtype.",
    ),
    Row(
        "mla_attention",
        "causal",
        "sdpa",
        wrapper="k3kernels.ops.mla_attention.causal.sdpa:mla_attention",
        description="torch scaled_dot_product_attention.",
    ),
)
