"""How the kernels of this package are compiled: once, to disk, without the interpreter lock.

Signatures are explicit, so that no call compiles anything after its module is loaded. Arrays are contiguous; inputs
may be read-only (a memory map), and nothing needs to be aligned (a tensor may start at any byte of a file).

numba renews its cache when the file of a kernel changes, not when a file that the kernel imports does. So whatever a
kernel takes from elsewhere at compile time must not change without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba import types

_Kernel = TypeVar("_Kernel", bound=Callable[..., Any])

void = types.void
int64 = types.int64


def read(dtype: Any, ndim: int = 1) -> Any:
    """The type of an input array of ``dtype``: a numba scalar type such as ``types.uint8``."""
    return types.Array(dtype, ndim, "C", readonly=True, aligned=False)


def written(dtype: Any, ndim: int = 1) -> Any:
    """The type of an output array of ``dtype``."""
    return types.Array(dtype, ndim, "C", aligned=False)


READ_U8 = read(types.uint8)
READ_U16 = read(types.uint16)
READ_U32 = read(types.uint32)
READ_F32 = read(types.float32)
READ_U16_2D = read(types.uint16, 2)
READ_U32_2D = read(types.uint32, 2)
READ_I32_2D = read(types.int32, 2)
READ_F32_2D = read(types.float32, 2)
WRITTEN_U8 = written(types.uint8)
WRITTEN_U8_2D = written(types.uint8, 2)
WRITTEN_U16 = written(types.uint16)
WRITTEN_U32 = written(types.uint32)
WRITTEN_I64 = written(types.int64)
WRITTEN_F64 = written(types.float64)


def compiled(*signatures: Any) -> Callable[[_Kernel], _Kernel]:
    """Compile a function for these signatures, or load it from numba's cache beside the source."""

    def decorate(function: _Kernel) -> _Kernel:
        return cast(_Kernel, numba.njit(list(signatures), nogil=True, cache=True)(function))

    return decorate


def compiled_into_caller(function: _Kernel) -> _Kernel:
    """Compile a function as part of the kernel that calls it, for the types that it is called with."""
    return cast(_Kernel, numba.njit(inline="always")(function))
