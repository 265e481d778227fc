"""bf16 <-> float32 over the caller's buffers; bf16 travels as uint16 patterns, since numpy has no such dtype."""

from __future__ import annotations

import numpy as np

from k3convert.numerics.mxfp4_format import F32, U16, require_array


def bf16_to_float32(bits: U16, out: F32) -> None:
    """Widen bf16 patterns, exactly: uint16 ``[...]`` into float32 of the same shape.

    Raises:
        ValueError: dtypes, shapes or strides do not fit.
    """
    from k3convert.numerics.compiled_elements import widen

    require_array("bits", bits, np.uint16, bits.shape)
    require_array("out", out, np.float32, bits.shape)
    widen(bits.reshape(-1), out.reshape(-1).view(np.uint32))


def float32_to_bf16(values: F32, out: U16) -> None:
    """Round to bf16 patterns, to nearest, ties to even: float32 ``[...]`` into uint16 of the same shape.

    Magnitudes from 2**128 - 2**119 on become infinity. A NaN stays a NaN: sign and upper payload are kept and the
    quiet bit is set, so that a payload in the lower half cannot turn it into infinity.

    Raises:
        ValueError: dtypes, shapes or strides do not fit.
    """
    from k3convert.numerics.compiled_elements import narrow

    require_array("values", values, np.float32, values.shape)
    require_array("out", out, np.uint16, values.shape)
    narrow(values.reshape(-1).view(np.uint32), out.reshape(-1))
