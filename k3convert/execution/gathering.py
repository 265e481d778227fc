"""Puts a tensor together from stored chunks that may be cut anywhere, a few rows at a time."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from k3convert.checkpoint.dtypes import num_bytes
from k3convert.execution.open_files import SourceFiles
from k3convert.planning.plan import Box, Gather

SLAB_BYTES = 4 << 20
NUMPY_DTYPES: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
Array = np.ndarray[Any, Any]


def element_dtype(dtype: str) -> Any:
    """The unsigned numpy dtype that carries the bits of one element."""
    return NUMPY_DTYPES[num_bytes(dtype, (1,))]


def byte_view(values: Array) -> memoryview:
    """The bytes of a contiguous array, writable where the array is."""
    return values.reshape(-1).view(np.uint8).data


def row_bytes(gather: Gather) -> int:
    """Stored bytes of one row: one index of dim 0."""
    return num_bytes(gather.stored_dtype, (1, *gather.shape[1:]))


def gather_rows(sources: SourceFiles, gather: Gather, first: int, count: int, out: Array) -> None:
    """Fill ``out`` (``[count, *shape[1:]]``, unsigned of the stored width) with rows ``first`` and on.

    Raises:
        BadInput: a source cannot be read.
    """
    for box in gather.boxes:
        dims = len(gather.shape)
        extra = len(box.chunk_shape) - dims
        begin = max(first, box.at[0])
        end = min(first + count, box.at[0] + box.hi[extra] - box.lo[extra])
        if begin >= end:
            continue
        lo, hi = list(box.lo), list(box.hi)
        lo[extra] = box.lo[extra] + begin - box.at[0]
        hi[extra] = box.lo[extra] + end - box.at[0]
        where = (
            slice(begin - first, end - first),
            *(slice(box.at[d], box.at[d] + hi[extra + d] - lo[extra + d]) for d in range(1, dims)),
        )
        target = out[where][(None,) * extra]
        _read_part(sources, box, tuple(lo), tuple(hi), 0, 0, target)


def _read_part(
    sources: SourceFiles, box: Box, lo: tuple[int, ...], hi: tuple[int, ...], dim: int, start: int, out: Array
) -> None:
    """Read ``[lo, hi)`` of the dims from ``dim`` on; ``start`` is the element offset of the dims before it."""
    shape = box.chunk_shape
    stride = prod(shape[dim + 1 :])
    if dim + 1 < len(shape) and hi[dim] - lo[dim] == 1:
        _read_part(sources, box, lo, hi, dim + 1, start + lo[dim] * stride, out[0])
        return
    width = out.dtype.itemsize
    whole = all(lo[d] == 0 and hi[d] == shape[d] for d in range(dim + 1, len(shape)))
    step = max(1, SLAB_BYTES // max(1, stride * width))
    if dim + 1 < len(shape) and not whole and stride * width > SLAB_BYTES:
        for index in range(lo[dim], hi[dim]):
            _read_part(sources, box, lo, hi, dim + 1, start + index * stride, out[index - lo[dim]])
        return
    for index in range(lo[dim], hi[dim], step):
        count = min(step, hi[dim] - index)
        offset = box.payload_offset + (start + index * stride) * width
        part = out[index - lo[dim] : index - lo[dim] + count]
        if whole and part.flags.c_contiguous:
            sources.read_into(box.source, byte_view(part), offset)
            continue
        slab = np.empty((count, *shape[dim + 1 :]), out.dtype)
        sources.read_into(box.source, byte_view(slab), offset)
        part[...] = slab[(slice(None), *(slice(lo[d], hi[d]) for d in range(dim + 1, len(shape))))]
