"""One folder an op: rows in ``<op>/__init__.py``, code in ``<op>/<variant>/<impl>.py``.

``eager.py`` is the specification of a variant and its docstring the contract that every other impl keeps.
"""

from __future__ import annotations

from k3kernels.ops import (
    attn_res,
    cross_entropy,
    gated_rms_norm,
    kda,
    kda_gate,
    mla_attention,
    moe_experts,
    mxfp4,
    rms_norm,
    short_conv,
    situ_and_mul,
)
from k3kernels.row import Row

_OPS = (
    kda,
    kda_gate,
    short_conv,
    gated_rms_norm,
    rms_norm,
    attn_res,
    situ_and_mul,
    moe_experts,
    mla_attention,
    mxfp4,
    cross_entropy,
)


def builtin_rows() -> tuple[Row, ...]:
    """The rows that this package brings."""
    return tuple(row for op in _OPS for row in op.ROWS)
